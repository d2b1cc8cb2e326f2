"""The audit trail: what a run read and wrote, with digests, and the check of results/ against it."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from layerproof import __version__, digests
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.files import digest_of, read_json, sha256, write_json, write_text
from layerproof.paths import SNAKEFILE, WORKFLOW
from layerproof.rerun.records import Record, behind, read_all

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
CHECKSUMS = "MANIFEST.sha256"
"""The digests of the same files for `sha256sum -c`, which works without Layerproof."""
NOT_LISTED = ("archive/", "logs/archive/", "logs/export/", "logs/manifest.log", "README.md", MANIFEST, CHECKSUMS)
"""Files that are not listed: those written after or by the manifest, and those that ship with the repository."""


def write(output: Path) -> None:
    """Writes results/manifest.json: config, versions, commit, hardware, every job with its inputs, and every file.

    `jobs` are those that the report and a bisection rest on, found by following records. `outputs` are their files
    under results/, and `inputs` the files that they read from elsewhere, by path with digest and size. `others` are the
    remaining files of results/, for example those of a run with other settings. `workflow` are the Snakefile and its
    rules. `code` maps each source file to the digest of its functions that ran. `git` has the commit of the workflow's
    repository and what was not committed. `digest` covers all the other entries.

    Raises:
        UserError: if the report has no record.
    """
    results = output.parent
    jobs = jobs_behind_report(results)
    outputs = _outputs(results, jobs)
    read = {path for job in jobs.values() for path in job.inputs if not Path(path).is_relative_to(results)}
    elsewhere = {path for path in read if Path(path).parts[0] != ".snakemake"}  # local copies of files in storage
    content = {
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": jobs["report"].job.settings,
        "git": git_state() | _uncommitted(),
        "host": {"name": platform.node(), "platform": platform.platform(), "python": sys.version.split()[0]},
        "packages": package_versions() | _own_versions(),
        "jobs": {name: _job(record) for name, record in jobs.items()},
        "inputs": {path: _describe(Path(path)) for path in sorted(elsewhere) if Path(path).exists()},
        "checkpoint": _checkpoint(results),
        "workflow": {name: _describe(path) for name, path in workflow_files().items()},
        "code": {path: digest_of(functions) for path, functions in code_of(jobs).items()},
        "outputs": {name: _describe(results / name) for name in outputs},
        "others": {name: _describe(results / name) for name in _files(results) if name not in outputs},
    }
    write_json(output, {**content, "digest": digest_of(content)})
    listed = {**content["outputs"], **content["others"], output.name: _describe(output)}
    write_text(results / CHECKSUMS, "".join(f"{listed[name]['sha256']}  {name}\n" for name in sorted(listed)))


def jobs_behind_report(results: Path) -> dict[str, Record]:
    """Records by job: of the report, of any bisection, and of every job whose output one of these read."""
    records = read_all(results / "records")
    if "report" not in records:
        raise UserError(f"{results}/records/report.json: does not exist. Run layerproof run {results}/report.html.")
    return behind(records, ["report", *({"bisect"} & records.keys())])


def _outputs(results: Path, jobs: Mapping[str, Record]) -> list[str]:
    """Existing outputs, records, logs and benchmarks of these jobs, relative to results/."""
    made = {str(Path(path).relative_to(results)) for record in jobs.values() for path in record.outputs}
    made |= {f"records/{name}.json" for name in jobs}
    made |= {f"logs/{name}.log" for name in jobs}
    # The stages of a chain share one benchmark: results/benchmarks/chain/all.tsv is that of the jobs chain/all/STAGE.
    made |= {f"benchmarks/{part}.tsv" for name in jobs for part in (Path(name), Path(name).parent)}
    several = ("benchmarks/blocks/", "benchmarks/golden/whole.tsv")  # of jobs that ran several stages
    return [name for name in _files(results) if name in made or name.startswith(several)]


def code_of(jobs: Mapping[str, Record]) -> dict[str, list[tuple[str, str]]]:
    """The functions that these jobs ran, with their fingerprints, by source file."""
    files: dict[str, list[tuple[str, str]]] = {}
    for entry, recorded in sorted({item for record in jobs.values() for item in record.code.items()}):
        files.setdefault(entry.partition("::")[0], []).append((entry, recorded))
    return files


def _job(record: Record) -> dict[str, Any]:
    return {
        "settings": record.job.settings,
        "arguments": record.job.arguments,
        "versions": record.job.versions,
        "inputs": record.inputs,
        "outputs": {path: description["sha256"] for path, description in record.outputs.items()},
        "functions": len(record.code),
        "code": digest_of(record.code),
        "error": record.error,
        **record.run,
    }


def _checkpoint(results: Path) -> dict[str, str]:
    """Digest of the weights of each stage: a checkpoint is too large to list file by file."""
    paths = sorted((results / "weights").glob("*.json"))
    described = {path.stem: read_json(path) for path in paths if path.stem != "unused"}
    return {stage: entry.get("digest", entry.get("error", "")) for stage, entry in described.items()}


def _files(results: Path) -> list[str]:
    names = (str(path.relative_to(results)) for path in sorted(results.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(NOT_LISTED) and not name.endswith(".tmp")]


def _describe(path: Path) -> dict[str, Any]:
    return {"sha256": digests.sha256(path), "bytes": path.stat().st_size}


def git_state() -> dict[str, Any]:
    """The workflow's commit, and whether its tree had changes; `unknown` if there is no git or no repository."""
    try:
        if not (WORKFLOW / ".git").exists():  # the repository around an installed package is somebody else's
            return {"commit": "unknown", "dirty": None}
        commit = _git("rev-parse", "HEAD").strip()
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain").strip())}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": None}


def _uncommitted() -> dict[str, Any]:
    """What the workflow's tree has beyond its commit: `diff` for `git apply`, and the `untracked` files by name.

    A byte of the diff that is not UTF-8 becomes a surrogate (`surrogateescape`), so that no byte is lost.
    """
    if git_state()["commit"] == "unknown":
        return {"diff": None, "untracked": None}
    plain = ("--no-ext-diff", "--no-textconv", "--no-color", "--src-prefix=a/", "--dst-prefix=b/")
    untracked = _git("ls-files", "-z", "--others", "--exclude-standard").split("\0")
    return {"diff": _git("diff", "--binary", *plain, "HEAD"), "untracked": sorted(filter(None, untracked))}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(WORKFLOW), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout.decode("utf-8", "surrogateescape")


def _own_versions() -> dict[str, str]:
    try:
        return {"layerproof": __version__, "snakemake": metadata.version("snakemake")}
    except metadata.PackageNotFoundError:  # as in a container of another maker
        return {"layerproof": __version__}


def workflow_files() -> dict[str, Path]:
    """The Snakefile and its rules, by their names in the repository."""
    paths = [SNAKEFILE, *sorted((WORKFLOW / "workflow/rules").glob("*.smk"))]
    return {str(path.relative_to(WORKFLOW)): path for path in paths}


def differs(path: Path, digest: str) -> bool:
    """Whether a file does not exist or has another SHA-256."""
    return not path.exists() or sha256(path) != digest


def read(manifest: Path) -> dict[str, Any]:
    """The content of a manifest.

    Raises:
        UserError: if there is none, or if it was changed by hand.
    """
    try:
        content = read_json(manifest)
        return checked(content, manifest)
    except (OSError, ValueError) as error:
        raise UserError(f"{manifest}: cannot be read ({error}). Run layerproof run {manifest}.") from None


def checked(content: Any, where: Path) -> dict[str, Any]:
    """The content itself, if it has this schema and its own digest fits it.

    Raises:
        UserError: if not.
    """
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{where}: contains no manifest of schema {SCHEMA_VERSION}.")
    if content.get("digest") != digest_of({key: value for key, value in content.items() if key != "digest"}):
        raise UserError(f"{where}: was changed by hand: its digest does not match. Run snakemake again to renew it.")
    return content


def problems(results: Path, listed: Mapping[str, Any]) -> list[str]:
    """What was changed, removed or added under results/ since this manifest was written."""
    present = _files(results)
    files = listed["outputs"] | listed["others"]
    return [
        *(f"missing: {name}" for name in files if name not in present),
        *(f"added: {name}" for name in present if name not in files),
        *(f"changed: {n}" for n in files if n in present and differs(results / n, files[n]["sha256"])),
    ]

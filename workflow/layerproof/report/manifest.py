"""The audit trail: what a run read and wrote, with digests; the archive that contains it all; and the check of both."""

from __future__ import annotations

import itertools
import json
import platform
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from layerproof import digests
from layerproof.environment import package_versions
from layerproof.errors import UserError
from layerproof.files import digest_of, read_json, replacing, sha256, sha256_from_here, write_json, write_text
from layerproof.paths import WORKFLOW
from layerproof.rerun import fingerprint
from layerproof.rerun.records import Record, behind, read_all

if TYPE_CHECKING:
    from io import BufferedIOBase

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
CHECKSUMS = "MANIFEST.sha256"
"""The digests of the same files for `sha256sum -c`, which works without Layerproof."""
CONTENTS = "archive.json"
"""In an archive: a list of every other file in it, with digest and size."""
NOT_LISTED = ("archive/", "logs/archive/", "logs/export/", "logs/manifest.log", "README.md", MANIFEST, CHECKSUMS)
"""Files that are not listed: those written after or by the manifest, and those that ship with the repository."""


def write(output: Path) -> None:
    """Writes results/manifest.json: config, versions, commit, hardware, every job with its inputs, and every file.

    `jobs` are those that the report and a bisection rest on, found by following records. `outputs` are their files
    under results/, and `inputs` the files that they read from elsewhere, by path with digest and size. `others` are the
    remaining files of results/, for example those of a run with other settings. `code` maps each source file to the
    digest of its functions that ran. `digest` covers all the other entries.

    Raises:
        UserError: if the report has no record.
    """
    results = output.parent
    jobs = _jobs_behind_report(results)
    outputs = _outputs(results, jobs)
    read = {path for job in jobs.values() for path in job.inputs if not Path(path).is_relative_to(results)}
    elsewhere = {path for path in read if Path(path).parts[0] != ".snakemake"}  # local copies of files in storage
    content = {
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": jobs["report"].job.settings,
        "git": git_state(),
        "host": {"name": platform.node(), "platform": platform.platform(), "python": sys.version.split()[0]},
        "packages": package_versions(),
        "jobs": {name: _job(record) for name, record in jobs.items()},
        "inputs": {path: _describe(Path(path)) for path in sorted(elsewhere) if Path(path).exists()},
        "checkpoint": _checkpoint(results),
        "code": {path: digest_of(functions) for path, functions in _code(jobs).items()},
        "outputs": {name: _describe(results / name) for name in outputs},
        "others": {name: _describe(results / name) for name in _files(results) if name not in outputs},
    }
    write_json(output, {**content, "digest": digest_of(content)})
    listed = {**content["outputs"], **content["others"], output.name: _describe(output)}
    write_text(results / CHECKSUMS, "".join(f"{listed[name]['sha256']}  {name}\n" for name in sorted(listed)))


def _jobs_behind_report(results: Path) -> dict[str, Record]:
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


def _code(jobs: Mapping[str, Record]) -> dict[str, list[tuple[str, str]]]:
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


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(WORKFLOW), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def archive(manifest: Path, output: Path) -> None:
    """Packs the manifest, the files that the report rests on, and the code and inputs that they were made from.

    Raises:
        UserError: if a file was changed or removed after the manifest was written, or code other than comments and
            formatting after it ran: the archive contains exactly what ran.
    """
    results = manifest.parent
    listed = _read(manifest)
    code = _code(_jobs_behind_report(results))
    problems = _problems(results, listed)
    problems += [
        f"changed: {path}" for path in listed["inputs"] if _differs(Path(path), listed["inputs"][path]["sha256"])
    ]
    problems += [
        f"changed: {entry}"
        for entry, recorded in itertools.chain.from_iterable(code.values())
        if fingerprint.current(entry) != recorded
    ]
    if problems:
        renew = "layerproof run results/manifest.json -- --forcerun manifest"
        raise UserError(f"{manifest}: {problems[0]} ({len(problems)} in all). Renew it: {renew}")
    packed = {f"results/{name}": results / name for name in (MANIFEST, *listed["outputs"])}
    packed |= {
        f"code/{path.lstrip('/')}": fingerprint.path_of(path) for path in code if fingerprint.path_of(path).exists()
    }
    packed |= {f"inputs/{path.lstrip('/')}": Path(path) for path in listed["inputs"]}
    # Outputs and inputs were just checked against the manifest, so they are not read again.
    known = {f"results/{name}": entry for name, entry in listed["outputs"].items()}
    known |= {f"inputs/{path.lstrip('/')}": entry for path, entry in listed["inputs"].items()}
    files = {name: known.get(name) or _describe(path) for name, path in packed.items()}
    content = {"schema_version": SCHEMA_VERSION, "files": files}
    with (
        replacing(output) as temporary,
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED, strict_timestamps=False) as file,
    ):
        file.writestr(CONTENTS, json.dumps({**content, "digest": digest_of(content)}, indent=1))
        for name, path in packed.items():
            file.write(path, name)


def _differs(path: Path, digest: str) -> bool:
    return not path.exists() or sha256(path) != digest


def verify(path: Path) -> int:
    """Checks results/ against its manifest, or an archive against the manifest inside, and prints the differences.

    Returns 0 if nothing was changed, removed or added, otherwise 1.

    Raises:
        UserError: if there is no usable manifest.
    """
    problems = _archive_problems(path) if path.suffix == ".zip" else _problems(path.parent, _read(path))
    for problem in problems:
        print(problem)
    print(f"{path}: " + (f"{len(problems)} files differ" if problems else "every file is as it was"))
    return 1 if problems else 0


def _read(manifest: Path) -> dict[str, Any]:
    try:
        content = read_json(manifest)
        return _checked(content, manifest)
    except (OSError, ValueError) as error:
        raise UserError(f"{manifest}: cannot be read ({error}). Run layerproof run {manifest}.") from None


def _checked(content: Any, where: Path) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{where}: contains no manifest of schema {SCHEMA_VERSION}.")
    if content.get("digest") != digest_of({key: value for key, value in content.items() if key != "digest"}):
        raise UserError(f"{where}: was changed by hand: its digest does not match. Run snakemake again to renew it.")
    return content


def _problems(results: Path, listed: Mapping[str, Any]) -> list[str]:
    present = _files(results)
    files = listed["outputs"] | listed["others"]
    return [
        *(f"missing: {name}" for name in files if name not in present),
        *(f"added: {name}" for name in present if name not in files),
        *(f"changed: {n}" for n in files if n in present and _differs(results / n, files[n]["sha256"])),
    ]


def _archive_problems(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as file:
            wanted = _checked(json.loads(file.read(CONTENTS)), path)["files"]
            present = set(file.namelist()) - {CONTENTS}
            problems = [f"missing: {name}" for name in wanted if name not in present]
            problems += [f"added: {name}" for name in sorted(present - wanted.keys())]
            for name in sorted(present & wanted.keys()):
                try:
                    with file.open(name) as content:
                        same = sha256_from_here(cast("BufferedIOBase", content)) == wanted[name]["sha256"]
                except (zipfile.BadZipFile, zlib.error):
                    same = False
                problems += [] if same else [f"changed: {name}"]
            return problems
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is not an archive of a run ({error}).") from None

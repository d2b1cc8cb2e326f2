"""The audit trail: what a run read and wrote, with digests; the archive that holds it all; and the check of both."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import digest_of, read_json, replacing, sha256, write_json
from layerproof.fingerprint import REPOSITORY
from layerproof.jobs import package_versions
from layerproof.records import Record

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
APART = ("archive/", "logs/archive/", "logs/manifest.log", "README.md", MANIFEST)
"""Not listed: what is written after the manifest or by it, and what ships with the repository."""


def write(output: Path, spec: Mapping[str, Any]) -> None:
    """Writes results/manifest.json: config, versions, commit, hardware, every job with its inputs, and every file.

    `outputs` are the files under results/ and `inputs` what the jobs read from elsewhere, by path with digest and size.
    `digest` is that of all the rest.
    """
    results = output.parent
    records = {
        str(path.relative_to(results / "records")).removesuffix(".json"): Record.read(path)
        for path in sorted((results / "records").rglob("*.json"))
    }
    jobs = {name: _job(record) for name, record in records.items() if record is not None}
    outputs = {name: _describe(results / name) for name in _files(results)}
    elsewhere = {path for job in jobs.values() for path in job["inputs"] if not Path(path).is_relative_to(results)}
    code = {entry.partition("::")[0] for record in records.values() if record for entry in record.code}
    content = {
        "schema_version": SCHEMA_VERSION,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "config": spec["config"],
        "git": git_state(),
        "host": {"name": platform.node(), "platform": platform.platform(), "python": sys.version.split()[0]},
        "packages": package_versions(),
        "jobs": jobs,
        "inputs": {path: _describe(Path(path)) for path in sorted(elsewhere) if Path(path).exists()},
        "checkpoint": _checkpoint(results),
        "code": {path: _describe(REPOSITORY / path) for path in sorted(code) if (REPOSITORY / path).exists()},
        "outputs": outputs,
    }
    write_json(output, {**content, "digest": digest_of(content)})


def _job(record: Record) -> dict[str, Any]:
    return {
        "verb": record.verb,
        "settings": record.spec,
        "inputs": record.inputs,
        "outputs": {path: description["sha256"] for path, description in record.outputs.items()},
        "functions": len(record.code),
        "code": digest_of(record.code),
        "error": record.error,
        **record.run,
    }


def _checkpoint(results: Path) -> dict[str, str]:
    """Digest of the weights of each stage: a checkpoint is too large to be listed file by file."""
    described = {path.stem: read_json(path) for path in sorted((results / "weights").glob("*.json"))}
    return {stage: entry.get("digest", entry.get("error", "")) for stage, entry in described.items()}


def _files(results: Path) -> list[str]:
    names = (str(path.relative_to(results)) for path in sorted(results.rglob("*")) if path.is_file())
    return [name for name in names if not name.startswith(APART) and not name.endswith(".tmp")]


def _describe(path: Path) -> dict[str, Any]:
    return {"sha256": sha256(path), "bytes": path.stat().st_size}


def git_state() -> dict[str, Any]:
    """Commit of the workflow and whether its tree held changes; `unknown` where there is no git or no repository."""
    try:
        commit = _git("rev-parse", "HEAD").strip()
        return {"commit": commit, "dirty": bool(_git("status", "--porcelain").strip())}
    except (OSError, subprocess.CalledProcessError):
        return {"commit": "unknown", "dirty": None}


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def archive(manifest: Path, output: Path) -> None:
    """Packs the manifest, every file that it lists under results/, and the code and inputs that are not weights.

    Raises:
        UserError: if a file was changed or removed since the manifest was written; what the archive holds is what ran.
    """
    results = manifest.parent
    listed = _read(manifest)
    sources = {REPOSITORY / path: f"code/{path.lstrip('/')}" for path in listed["code"]}
    sources |= {Path(path): f"inputs/{path.lstrip('/')}" for path in listed["inputs"] if _is_packed(path)}
    digests = {REPOSITORY / path: entry["sha256"] for path, entry in listed["code"].items()}
    digests |= {Path(path): entry["sha256"] for path, entry in listed["inputs"].items()}
    problems = _problems(results, listed)
    problems += [f"changed: {path}" for path in sources if not path.exists() or sha256(path) != digests[path]]
    if problems:
        renew = "snakemake --cores 1 --forcerun manifest -- results/manifest.json"
        raise UserError(f"{manifest}: {problems[0]} ({len(problems)} in all). Renew it: {renew}")
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as file:
        for name in [MANIFEST, *listed["outputs"]]:
            file.write(results / name, f"results/{name}")
        for path, name in sources.items():
            file.write(path, name)


def _is_packed(path: str) -> bool:
    """Whether an archive holds this input; weights are too large for it."""
    return not path.endswith(".safetensors")


def verify(path: Path) -> int:
    """Checks results/ against its manifest, or an archive against the manifest inside; prints what differs.

    Returns 0 if nothing was changed, removed or added, else 1.

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
        raise UserError(f"{manifest}: cannot be read ({error}). Run snakemake --cores 1 {manifest}.") from None


def _checked(content: Any, where: Path) -> dict[str, Any]:
    if not isinstance(content, dict) or content.get("schema_version") != SCHEMA_VERSION:
        raise UserError(f"{where}: holds no manifest of schema {SCHEMA_VERSION}.")
    if content.get("digest") != digest_of({key: value for key, value in content.items() if key != "digest"}):
        raise UserError(f"{where}: was changed by hand: its digest does not match. Run snakemake again to renew it.")
    return content


def _problems(results: Path, listed: Mapping[str, Any]) -> list[str]:
    present = _files(results)
    outputs = listed["outputs"]
    return [
        *(f"missing: {name}" for name in outputs if name not in present),
        *(f"added: {name}" for name in present if name not in outputs),
        *(f"changed: {n}" for n in outputs if n in present and sha256(results / n) != outputs[n]["sha256"]),
    ]


def _archive_problems(path: Path) -> list[str]:
    try:
        with zipfile.ZipFile(path) as file:
            listed = _checked(json.loads(file.read(f"results/{MANIFEST}")), path)
            wanted = {f"results/{name}": entry for name, entry in listed["outputs"].items()}
            wanted |= {f"code/{name.lstrip('/')}": entry for name, entry in listed["code"].items()}
            wanted |= {
                f"inputs/{name.lstrip('/')}": entry for name, entry in listed["inputs"].items() if _is_packed(name)
            }
            present = set(file.namelist())
            problems = [f"missing: {name}" for name in wanted if name not in present]
            problems += [f"added: {name}" for name in sorted(present - wanted.keys() - {f"results/{MANIFEST}"})]
            for name in sorted(present & wanted.keys()):
                try:
                    same = hashlib.sha256(file.read(name)).hexdigest() == wanted[name]["sha256"]
                except (zipfile.BadZipFile, zlib.error):
                    same = False
                problems += [] if same else [f"changed: {name}"]
            return problems
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: is no archive of a run ({error}).") from None

"""What a job was run with, kept beside its output, and whether it would have to run again.

A record holds the settings, the digests of inputs and outputs, the fingerprints of the functions that ran, and what the
audit trail needs (command, times, versions, hardware). `results/records/` mirrors the outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from layerproof.config import values_now
from layerproof.digests import sha256, sha256_of_new
from layerproof.errors import UserError
from layerproof.files import read_json, write_json
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.tensors import pruning

SCHEMA_VERSION = 2


@dataclass(frozen=True)
class Record:
    """One run of one job. Paths are as Snakemake names them; `outputs` hold `sha256`, `size` and `mtime_ns`."""

    job: Job
    inputs: Mapping[str, str]
    outputs: Mapping[str, Mapping[str, Any]]
    code: Mapping[str, str]
    error: str | None
    run: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes the record as JSON.

        Raises:
            UserError: if it holds a value that JSON has not, such as one that a library put into the job's settings, or the
                file cannot be written, for instance because the disk is full.
        """
        try:
            write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{path}: cannot be written ({error}). Something that {self.job.name} ran changed the job's settings: "
                "give it a copy of them."
            ) from None
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error}). Free disk space and run again.") from None

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record at `path`, or None if there is none that can be used."""
        try:
            return cls.parse(read_json(path))
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, content: Any) -> Record | None:
        """The record from which `write` made this JSON value, or None if it did not."""
        try:
            if content["schema_version"] != SCHEMA_VERSION:
                return None
            fields = {key: value for key, value in content.items() if key not in ("schema_version", "job")}
            return cls(job=Job(**content["job"]), **fields)
        except (KeyError, TypeError, AttributeError):
            return None


def read_all(folder: Path) -> dict[str, Record]:
    """All readable records in a folder such as results/records, by the names of their jobs."""
    read = (
        (str(path.relative_to(folder).with_suffix("")), Record.read(path)) for path in sorted(folder.rglob("*.json"))
    )
    return {name: record for name, record in read if record is not None}


def behind(records: Mapping[str, Record], jobs: Iterable[str]) -> dict[str, Record]:
    """The records of these jobs, and of every job whose output one of them read, in the order of `records`."""
    makers = {output: name for name, record in records.items() for output in record.outputs}
    found: set[str] = set()
    waiting = list(jobs)
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += [makers[path] for path in records[name].inputs if path in makers]
    return {name: record for name, record in records.items() if name in found}


def describe_output(path: Path) -> dict[str, Any]:
    """Digest of a file that this process wrote and what `os.stat` says of it, so that an untouched one need not be read
    again.
    """
    digest = sha256_of_new(path)
    status = path.stat()
    return {"sha256": digest, "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def described(outputs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """`describe_output` of each output that exists."""
    return {str(path): describe_output(path) for path in outputs if path.exists()}


def is_intact(path: Path, description: Mapping[str, Any]) -> bool:
    """Whether an output still is what its record describes, by its content. A pruned output is intact if it stands for what
    the record describes.
    """
    try:
        if path.stat().st_size == description["size"] and sha256(path) == description["sha256"]:
            return True
        pruned = pruning.read(path)
        return pruned is not None and pruned.original == description["sha256"] and pruned.is_undamaged()
    except OSError:
        return False


def changed_settings(record: Record, job: Job) -> list[str]:
    """Names of the settings, arguments and versions that are not those with which the job ran, in dotted form."""
    names: list[str] = []
    for before, after in (
        (record.job.settings, job.settings),
        (record.job.arguments, job.arguments),
        (record.job.versions, job.versions),
    ):
        names += _different(before, after)
    return sorted(names)


def _different(before: Any, after: Any, prefix: str = "") -> list[str]:
    if before == after:
        return []
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        return [prefix.removesuffix(".")]
    missing = object()
    return [
        name
        for key in {*before, *after}
        for name in _different(before.get(key, missing), after.get(key, missing), f"{prefix}{key}.")
    ]


def as_asked_now(job: Job, settings: Mapping[str, Any], installed: Mapping[str, str]) -> Job:
    """A recorded job with the values that its settings have in config.yaml now, and the versions of its packages that are
    installed now. A package that is not installed here, as one of a container, keeps its version.
    """
    versions = {package: installed.get(package, version) for package, version in job.versions.items()}
    return replace(job, settings=values_now(job.settings, settings), versions=versions)


def why_stale(record: Record | None, job: Job, inputs: Iterable[Path], outputs: Iterable[Path]) -> str | None:
    """Why a job must run, in a clause, or None if it ran with the same settings, inputs and code before."""
    if record is None:
        return "it has not run before"
    if record.error is not None:
        return "it failed before"
    if names := changed_settings(record, job):
        return f"its settings changed ({', '.join(names)})"
    if record.job.token != job.token:
        return job.why
    if set(record.outputs) != set(map(str, outputs)):
        return "its set of outputs changed"
    if code := fingerprint.changed(record.code):
        return f"its code changed ({', '.join(code)})"
    digests = {str(path): pruning.digest(path) for path in inputs}
    if digests != record.inputs:
        different = sorted(key for key in {*digests, *record.inputs} if digests.get(key) != record.inputs.get(key))
        return f"its inputs changed ({', '.join(different)})"
    for name, description in record.outputs.items():
        if not is_intact(Path(name), description):
            return f"its output is missing or damaged ({name})"
    return None

"""What a job was run with, kept beside its output, and whether it would have to run again.

A record holds the settings, the digests of inputs and outputs, the fingerprints of the functions that ran, and what the
audit trail needs (command, times, versions, hardware). `results/records/` mirrors the outputs.

Snakemake starts a job when its parameters, or the content or time of its inputs changed. It cannot see code and damage, and
it takes a job that was killed for one that ran. So each job has a stamp: a parameter and a small input file, both renewed
by `Stamps` when the job has to run. A job that was started compares everything by content (`why_stale`) and returns at once
when nothing it depends on is different.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerproof import fingerprint, trimming
from layerproof.files import digest_of, read_json, sha256, write_json, write_text

SCHEMA_VERSION = 1
NEW = "new"


@dataclass(frozen=True)
class Record:
    """One run of one job. Paths are as Snakemake names them; `outputs` hold `sha256`, `size` and `mtime_ns`."""

    verb: str
    spec: Mapping[str, Any]
    stamp: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, Mapping[str, Any]]
    code: Mapping[str, str]
    error: str | None
    run: Mapping[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        write_json(path, {"schema_version": SCHEMA_VERSION, **asdict(self)})

    @classmethod
    def read(cls, path: Path) -> Record | None:
        """The record at `path`, or None if there is none that can be used."""
        try:
            return cls.parse(read_json(path))
        except (OSError, ValueError):
            return None

    @classmethod
    def parse(cls, content: Any) -> Record | None:
        """The record that `write` made this JSON value of, or None if it did not."""
        try:
            if content.pop("schema_version") != SCHEMA_VERSION:
                return None
            return cls(**content)
        except (KeyError, TypeError, AttributeError):
            return None


def describe_output(path: Path) -> dict[str, Any]:
    """Digest of an output and what `os.stat` says of it, so that an untouched file need not be read again."""
    status = path.stat()
    return {"sha256": sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def is_whole(path: Path, description: Mapping[str, Any], trust_times: bool) -> bool:
    """Whether an output still is what its record describes.

    With `trust_times` an equal size and modification time are enough; otherwise the content is read. A trimmed output is
    whole if it stands for what the record describes.
    """
    try:
        status = path.stat()
        known = trust_times and status.st_mtime_ns == description["mtime_ns"]
        if status.st_size == description["size"] and (known or sha256(path) == description["sha256"]):
            return True
        trimmed = trimming.read(path)
        return trimmed is not None and trimmed.whole == description["sha256"] and (known or trimmed.is_undamaged())
    except OSError:
        return False


def why_stale(
    record: Record | None, spec: Mapping[str, Any], stamp: str, inputs: Iterable[Path], outputs: Iterable[Path]
) -> str | None:
    """Why a job must run, in a sentence, or None if it was run with the same settings, inputs and code before."""
    if record is None:
        return "it has not run before"
    if record.error is not None:
        return "it failed before"
    if record.spec != spec:
        keys = sorted(key for key in {*record.spec, *spec} if record.spec.get(key) != spec.get(key))
        return f"its settings changed ({', '.join(keys)})"
    if record.stamp != stamp:
        return "its code or its output changed, or it was forced"
    if set(record.outputs) != set(map(str, outputs)):
        return "its set of outputs changed"
    if code := fingerprint.changed(record.code):
        return f"its code changed ({', '.join(code)})"
    digests = {str(path): trimming.digest(path) for path in inputs}
    if digests != record.inputs:
        different = sorted(key for key in {*digests, *record.inputs} if digests.get(key) != record.inputs.get(key))
        return f"its inputs changed ({', '.join(different)})"
    for name, description in record.outputs.items():
        if not is_whole(Path(name), description, trust_times=False):
            return f"its output is missing or damaged ({name})"
    return None


class Stamps:
    """Stamps of the jobs of one workflow; `records` and `files` are the folders that hold records and stamp files.

    A stamp stays what it was when the job ran as long as the code that ran and its outputs are what they were, and is a
    new one otherwise. A job that failed gets a new one, so it is tried again. Missing outputs count too: Snakemake does
    not make a file again that nothing newer needs, but a run without it is no proof.

    A trimmed output is as good as the file that it was, unless `wants_whole` says of the job that the file is wanted.
    """

    def __init__(self, records: Path, files: Path, wants_whole: Callable[[str], bool]) -> None:
        self.records, self.files, self.wants_whole = records, files, wants_whole
        self.trimmed: dict[str, bool] = {}
        self.known: dict[str, tuple[Record | None, list[list[str]]]] = {}
        self.written: set[str] = set()

    def value(self, job: str) -> str:
        """The stamp of a job, named by its record without ending, such as `port/layer_003`."""
        record, reasons = self._of(job)
        old = record.stamp if record else NEW
        return digest_of([old, reasons])[:16] if reasons else old

    def settings(self, job: str) -> Mapping[str, Any]:
        """What the job ran with last; nothing if it did not, or has to run for a reason of its own."""
        record, reasons = self._of(job)
        return record.spec if record and not reasons else {}

    def file(self, job: str, spec: Mapping[str, Any]) -> str:
        """The stamp file of a job that is to run with `spec`: given a new time and content if the job has to run.

        Snakemake records the parameters and inputs of a job when it starts it and keeps them if the job is killed, so
        nothing that it was told before makes it run the job again.
        """
        path = self.files / job
        if job not in self.written:
            self.written.add(job)
            if _is_stale(*self._of(job), spec) or not path.exists():
                write_text(path, secrets.token_hex(8))
        return str(path)

    def is_stale(self, job: str, spec: Mapping[str, Any]) -> bool:
        """Whether the job has to run with `spec`, for all that is known before any job ran."""
        return _is_stale(*self._own(job), spec)

    def _of(self, job: str) -> tuple[Record | None, list[list[str]]]:
        record, reasons = self._own(job)
        if job not in self.trimmed:
            names = record.outputs if record and not reasons else ()
            self.trimmed[job] = any(trimming.read(Path(name)) for name in names) and self.wants_whole(job)
        return record, [*reasons, ["taps", "dropped"]] if self.trimmed[job] else reasons

    def _own(self, job: str) -> tuple[Record | None, list[list[str]]]:
        if job not in self.known:
            record = Record.read(self.records / f"{job}.json")
            self.known[job] = (record, _reasons(record) if record else [])
        return self.known[job]


def _is_stale(record: Record | None, reasons: Sequence[Sequence[str]], spec: Mapping[str, Any]) -> bool:
    return record is None or bool(reasons) or any(record.spec.get(key) != value for key, value in spec.items())


def _reasons(record: Record) -> list[list[str]]:
    """What Snakemake does not see of why a job has to run again."""
    reasons = [[entry, fingerprint.current(entry)] for entry in fingerprint.changed(record.code)]
    for name, description in record.outputs.items():
        if not is_whole(Path(name), description, trust_times=True):
            reasons.append([name, "missing or damaged"])
    if record.error is not None:
        reasons.append(["failed", record.stamp])
    return reasons


def described(outputs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """`describe_output` of each output that is there."""
    return {str(path): describe_output(path) for path in outputs if path.exists()}

"""What a job was run with, kept beside its output, and whether it would have to run again.

A record holds the settings, the digests of inputs and outputs, the fingerprints of the functions that ran, and what the
audit trail needs (command, times, versions, hardware). `results/records/` mirrors the outputs.

Snakemake starts a job when its parameters, or the content or time of its inputs changed. It cannot see code and damage, and
it takes a job that was killed for one that ran. So each job has a stamp: a parameter and a small input file, both renewed
by `Stamps` when the job has to run. A job that was started compares everything by content (`why_stale`) and returns at once
when nothing it depends on is different.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from layerproof.files import read_json, sha256, write_json
from layerproof.rerun import fingerprint
from layerproof.tensors import pruning

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
    """Digest of a file and what `os.stat` says of it, so that an untouched one need not be read again."""
    status = path.stat()
    return {"sha256": sha256(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def is_whole(path: Path, description: Mapping[str, Any]) -> bool:
    """Whether an output still is what its record describes, by its content. A trimmed output is whole if it stands for what
    the record describes.
    """
    try:
        if path.stat().st_size == description["size"] and sha256(path) == description["sha256"]:
            return True
        trimmed = pruning.read(path)
        return trimmed is not None and trimmed.whole == description["sha256"] and trimmed.is_undamaged()
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
    digests = {str(path): pruning.digest(path) for path in inputs}
    if digests != record.inputs:
        different = sorted(key for key in {*digests, *record.inputs} if digests.get(key) != record.inputs.get(key))
        return f"its inputs changed ({', '.join(different)})"
    for name, description in record.outputs.items():
        if not is_whole(Path(name), description):
            return f"its output is missing or damaged ({name})"
    return None


def described(outputs: Sequence[Path]) -> dict[str, dict[str, Any]]:
    """`describe_output` of each output that is there."""
    return {str(path): describe_output(path) for path in outputs if path.exists()}

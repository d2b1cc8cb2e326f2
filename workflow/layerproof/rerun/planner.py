"""Decides, before any job runs, which jobs must run for a reason that Snakemake does not see."""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from layerproof.files import canonical_json, digest_of, read_json, write_text
from layerproof.rerun import fingerprint
from layerproof.rerun.records import NEW, Record, is_whole
from layerproof.tensors import pruning


class Stamps:
    """Stamps of the jobs of one workflow; `records` and `files` are the folders that hold records and stamp files, `seen`
    one for notes of which outputs were read.

    A stamp stays what it was when the job ran as long as the code that ran and its outputs are what they were, and is a
    new one otherwise. A job that failed gets a new one, so it is tried again. Missing outputs count too: Snakemake does
    not make a file again that nothing newer needs, but a run without it is no proof.

    A trimmed output is as good as the file that it was, unless `wants_whole` says of the job that the file is wanted.
    """

    def __init__(self, records: Path, files: Path, seen: Path, wants_whole: Callable[[str], bool]) -> None:
        self.records, self.files, self.seen, self.wants_whole = records, files, seen, wants_whole
        self.trimmed: dict[str, bool] = {}
        self.read: dict[str, Record | None] = {}
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
        nothing that it was told before makes it run the job again. Then it puts the outputs back that were there before,
        made from other inputs maybe, with a new time.
        """
        path = self.files / job
        if job not in self.written:
            self.written.add(job)
            if self._is_stale(*self._of(job), spec) or not path.exists():
                write_text(path, secrets.token_hex(8))
        return str(path)

    def is_stale(self, job: str, spec: Mapping[str, Any]) -> bool:
        """Whether the job has to run with `spec`, for all that is known before any job ran."""
        return self._is_stale(*self._own(job), spec)

    def _is_stale(self, record: Record | None, reasons: Sequence[Sequence[str]], spec: Mapping[str, Any]) -> bool:
        if record is None or reasons or any(record.spec.get(key) != value for key, value in spec.items()):
            return True
        return any(self._made.get(name, digest) != digest for name, digest in record.inputs.items())

    @functools.cached_property
    def _made(self) -> dict[str, str]:
        """Digests of all that jobs made, by path. They are no reason for another stamp: while jobs run they change."""
        jobs = (str(path.relative_to(self.records).with_suffix("")) for path in self.records.rglob("*.json"))
        records = filter(None, map(self._record, jobs))
        return {name: output["sha256"] for record in records for name, output in record.outputs.items()}

    def _of(self, job: str) -> tuple[Record | None, list[list[str]]]:
        record, reasons = self._own(job)
        if job not in self.trimmed:
            names = record.outputs if record and not reasons else ()
            self.trimmed[job] = any(pruning.read(Path(name)) for name in names) and self.wants_whole(job)
        return record, [*reasons, ["taps", "dropped"]] if self.trimmed[job] else reasons

    def _own(self, job: str) -> tuple[Record | None, list[list[str]]]:
        if job not in self.known:
            record = self._record(job)
            self.known[job] = (record, self._reasons(job, record) if record else [])
        return self.known[job]

    def _record(self, job: str) -> Record | None:
        if job not in self.read:
            self.read[job] = Record.read(self.records / f"{job}.json")
        return self.read[job]

    def _reasons(self, job: str, record: Record) -> list[list[str]]:
        """What Snakemake does not see of why a job has to run again."""
        reasons = [[entry, fingerprint.current(entry)] for entry in fingerprint.changed(record.code)]
        whole = self._whole(job, record)
        reasons += [[name, "missing or damaged"] for name in record.outputs if name not in whole]
        if record.error is not None:
            reasons.append(["failed", record.stamp])
        return reasons

    def _whole(self, job: str, record: Record) -> dict[str, list[Any]]:
        """Outputs that are whole, with what they are known by: of one with the size and time with which it was read before,
        it is not read again. The time that a record has is not enough: Snakemake gives outputs another when a job has ended.
        """
        note = self.seen / f"{job}.json"
        try:
            before = read_json(note)
        except (OSError, ValueError):
            before = {}
        whole = {}
        for name, description in record.outputs.items():
            with contextlib.suppress(OSError):
                status = Path(name).stat()
                known_by = [description["sha256"], status.st_size, status.st_mtime_ns]
                if before.get(name) == known_by or is_whole(Path(name), description):
                    whole[name] = known_by
        if whole != before:
            note.parent.mkdir(parents=True, exist_ok=True)
            note.write_text(canonical_json(whole))
        return whole

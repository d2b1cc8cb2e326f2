"""Decides, before any job runs, which jobs must run for a reason that Snakemake does not see.

Snakemake starts a job when the content or time of its inputs changed. It cannot see code, damage and failures, and it takes
a job that was killed for one that ran. So each job has a job file among its inputs, which gets new content and a new time
whenever the job may have to run. A job that starts compares everything by content (`records.why_stale`) and returns at once
when nothing it depends on is different, unless its token changed, which says that it must run in any case.

Tokens and plans are random and not made from the reasons: Snakemake records the inputs of a job when it starts it and keeps
them if the job is killed, so nothing that it was told before makes it run the job again.
"""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from layerproof.files import read_json
from layerproof.rerun import fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.records import Record, changed_settings, is_intact
from layerproof.tensors import pruning


class Planner:
    """Plans the jobs of one workflow. `records` holds their records, and `files` their job files.

    A job that failed runs again. Missing outputs count too: Snakemake does not make a file again that nothing newer
    needs, but a run without it is no proof. A pruned output is as good as the file that it was, unless `wants_taps`
    says of the job that its taps are wanted.
    """

    def __init__(self, records: Path, files: Path, wants_taps: Callable[[str], bool]) -> None:
        self.records, self.files, self.wants_taps = records, files, wants_taps
        self._read: dict[str, Record | None] = {}
        self._reasons: dict[str, list[str]] = {}
        self._written: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.files / f"{name}.json"

    def job_file(
        self,
        name: str,
        settings: Mapping[str, Any],
        arguments: Mapping[str, Any],
        versions: Mapping[str, str],
        rerun_requested: bool,
    ) -> str:
        """The path of a job's file, which is written once in a process: with a new token if the job must run, and else as it
        was when the job ran, so that a plan that was not carried out changes nothing.
        """
        if name not in self._written:
            token = secrets.token_hex(8)
            job = Job(name, settings, arguments, versions, token, "", token)
            why, must = ("a rerun was requested", True) if rerun_requested else self.why(job)
            record = self.record(name)
            if why is None:
                self._restore(name)
            elif must or record is None:
                replace(job, why=why).write(self.path(name))
            else:
                replace(job, why=why, token=record.job.token).write(self.path(name))
            self._written[name] = str(self.path(name))
        return self._written[name]

    def why(self, job: Job) -> tuple[str | None, bool]:
        """Why a job has to run, for all that is known before any job ran, None if nothing says so; and whether it must
        run even if its inputs turn out to be what they were.
        """
        record = self.record(job.name)
        if record is None:
            return "it has not run before", True
        if reasons := self._own_reasons(job.name, record):
            return reasons[0], True
        if any(pruning.read(Path(name)) for name in record.outputs) and self.wants_taps(job.name):
            return "the taps that were dropped from its output are needed again", True
        if names := changed_settings(record, job):
            return f"its settings changed ({', '.join(names)})", False
        made = self._made
        different = [name for name, digest in record.inputs.items() if made.get(name, digest) != digest]
        return (f"its inputs changed ({', '.join(different)})", False) if different else (None, False)

    def is_stale(self, job: Job) -> bool:
        """`why`, without asking whether taps are wanted, which asks this."""
        record = self.record(job.name)
        if record is None or self._own_reasons(job.name, record) or changed_settings(record, job):
            return True
        return any(self._made.get(name, digest) != digest for name, digest in record.inputs.items())

    def has_run_with(self, job: Job) -> bool:
        """Whether a job ran with these settings and has no reason of its own to run again."""
        record = self.record(job.name)
        return record is not None and not self._own_reasons(job.name, record) and not changed_settings(record, job)

    def record(self, name: str) -> Record | None:
        if name not in self._read:
            self._read[name] = Record.read(self.records / f"{name}.json")
        return self._read[name]

    def _restore(self, name: str) -> None:
        """Writes a job's file as it was when the job ran, older than its outputs, if it is another one now."""
        record, path = self.record(name), self.path(name)
        assert record is not None
        with contextlib.suppress(OSError, ValueError, TypeError):
            if Job(**read_json(path)) == record.job:
                return
        record.job.write(path)
        times = [Path(output).stat().st_mtime_ns for output in record.outputs if Path(output).exists()]
        older = min(times, default=10**9) - 10**9
        os.utime(path, ns=(older, older))

    def _own_reasons(self, name: str, record: Record) -> list[str]:
        """What of a job itself says that it must run again: its failure, its code and its outputs."""
        if name not in self._reasons:
            reasons = ["it failed before"] if record.error is not None else []
            if code := fingerprint.changed(record.code):
                reasons.append(f"its code changed ({', '.join(code)})")
            outputs = record.outputs.items()
            damaged = [path for path, description in outputs if not is_intact(Path(path), description)]
            reasons += [f"its output is missing or damaged ({path})" for path in damaged]
            self._reasons[name] = reasons
        return self._reasons[name]

    @functools.cached_property
    def _made(self) -> dict[str, str]:
        """Digests of all that jobs made, by path."""
        names = (str(path.relative_to(self.records).with_suffix("")) for path in self.records.rglob("*.json"))
        records = filter(None, map(self.record, names))
        return {name: output["sha256"] for record in records for name, output in record.outputs.items()}

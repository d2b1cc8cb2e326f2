"""Runs jobs: not at all if nothing that they depend on changed; else recorded, with their errors told in a line."""

from __future__ import annotations

import faulthandler
import functools
import getpass
import mmap
import os
import platform
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from layerproof.environment import package_versions
from layerproof.errors import StageError, StageMissing
from layerproof.failures import as_stage_error, died, end_with, forget_peak_memory, how_it_ended, peak_memory
from layerproof.rerun import fingerprint
from layerproof.rerun.recorder import Seen, lasting, recording
from layerproof.rerun.records import Record, described, why_stale
from layerproof.tensors import pruning


@dataclass(frozen=True)
class Job:
    """What a verb was asked for: `spec` holds its settings; `stamp` is explained in `records`."""

    verb: str
    spec: Mapping[str, Any]
    stamp: str
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    record: Path


Work = Callable[[], Mapping[str, Any] | None]
"""Makes a job's outputs and returns facts for its record."""

CODE = "code"
"""Among these facts: fingerprints of functions that were run elsewhere for this job, which count as if it had run them."""


def is_current(job: Job) -> bool:
    """Whether the job ran before with the same settings, code and inputs and its output is whole; says so in the log."""
    reason = why_stale(Record.read(job.record), job.spec, job.stamp, job.inputs, job.outputs)
    names = ", ".join(map(str, job.outputs[:1])) + (f" and {len(job.outputs) - 1} more" if len(job.outputs) > 1 else "")
    print(f"{names}: up to date" if reason is None else f"{names}: runs because {reason}", flush=True)
    return reason is None


def run(
    job: Job,
    work: Work,
    on_error: Callable[[StageError], None] | None = None,
) -> None:
    """Does the job's work unless `is_current`, and writes its record.

    `work` returns facts for the record. With `on_error` an exception becomes a result: the function is given the error
    and leaves an output that says so, the record keeps it, and the job succeeds, so that other stages go on.
    """
    if is_current(job):
        return
    inputs = {str(path): pruning.digest(path) for path in job.inputs}
    started, clock = datetime.now(UTC), time.perf_counter()
    facts: Mapping[str, Any] | None = None
    error = None
    seen = dict(_kept)
    directory = os.getcwd()
    forget_peak_memory()
    with recording(seen):
        try:
            facts = work()
        except (Exception, SystemExit) as exception:
            if on_error is None:
                raise
            if not isinstance(exception, StageError):
                traceback.print_exc()
            error = as_stage_error(exception)
    os.chdir(directory)  # where a port may have left it
    _ran.update(lasting(seen))
    if error is not None and on_error is not None:
        print(f"error: {error}", file=sys.stderr)
        on_error(error)
    Record(
        verb=job.verb,
        spec=job.spec,
        stamp=job.stamp,
        inputs=inputs,
        outputs=described(job.outputs),
        code=fingerprint.fingerprints(seen) | (facts or {}).get(CODE, {}),
        error=None if error is None else str(error),
        run={
            "command": shlex.join(["python", "-m", "layerproof", *sys.argv[1:]]),
            "started": started.isoformat(timespec="seconds"),
            "wall_s": round(time.perf_counter() - clock, 3),
            "peak_rss_bytes": peak_memory(),
            "host": platform.node(),
            "user": _user(),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": package_versions(),
            **{key: fact for key, fact in (facts or {}).items() if key != CODE},
        },
    ).write(job.record)


_ran: Seen = {}
_kept: Seen = {}


def keep_what_ran() -> None:
    """What the jobs of this process ran so far counts for those to come too: they may use what it left in memory."""
    _kept.update(_ran)


LeaveError = Callable[[Job, StageError], None]
"""Writes a job's outputs such that they say what went wrong."""

Apart = Callable[[Sequence[tuple[Job, Work]], LeaveError], None]
"""Runs jobs one after the other such that one whose process ends leaves an error too."""


def run_apart(tasks: Sequence[tuple[Job, Work]], leave_error: LeaveError) -> None:
    """Runs jobs one after the other in a process of their own, so that one whose process ends leaves an error too.

    A port, its compiler or its driver may abort, exit, or be killed for the memory that it takes.
    """
    finished = mmap.mmap(-1, len(tasks))  # shared by both processes
    parent = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        end_with(parent)
        faulthandler.enable()  # a crash leaves the Python stack in the log
        run_here(tasks, leave_error, lambda: finished.write_byte(1))
        return
    _, status = os.waitpid(child, 0)
    blame(tasks, leave_error, finished[:].count(1), os.waitstatus_to_exitcode(status))


def run_here(tasks: Sequence[tuple[Job, Work]], leave_error: LeaveError, finished: Callable[[], Any]) -> None:
    """Runs jobs one after the other in this process, and tells of each that it is finished."""
    for job, work in tasks:
        run(job, work, functools.partial(leave_error, job))
        finished()


def blame(tasks: Sequence[tuple[Job, Work]], leave_error: LeaveError, finished: int, code: int) -> None:
    """Leaves errors for jobs whose process ended: after the `finished` ones, the one at which that happened ends as an
    error that names the signal or exit code, and the ones after it as missing.
    """
    reason, error = how_it_ended(code), died(code)
    for job, _ in tasks[finished:]:
        run(job, functools.partial(_raise, error), functools.partial(leave_error, job))
        error = StageMissing(f"no input, because an earlier stage failed: {reason}")


def _raise(error: StageError) -> None:
    raise error


def _user() -> str:
    """Who ran the job; a number where the user has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())

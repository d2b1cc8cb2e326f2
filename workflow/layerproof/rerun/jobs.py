"""Runs tasks: not at all if nothing that they depend on changed; else recorded, with each error reported in one line."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import getpass
import logging
import os
import platform
import shlex
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from layerproof.environment import package_versions
from layerproof.errors import StageError, StageMissing, UserError
from layerproof.failures import as_stage_error, died, forget_peak_memory, how_it_ended, peak_memory
from layerproof.files import size
from layerproof.rerun import children, fingerprint
from layerproof.rerun.job import Job
from layerproof.rerun.recorder import Seen, lasting, recording
from layerproof.rerun.records import Record, described, why_stale
from layerproof.rerun.traces import leaving_no_trace
from layerproof.tensors import pruning

log = logging.getLogger(__name__)

Work = Callable[[], Mapping[str, Any] | None]
"""Makes a job's outputs and returns facts for its record."""

CODE = "code"
"""Among these facts: fingerprints of functions that ran elsewhere for this job, which count as if it had run them."""

HEARTBEAT_S = 60.0
"""Seconds between the lines in which a long job says that it still runs."""


@dataclass(frozen=True)
class Task:
    """A job with the files that it reads and writes, and the work that makes them. Without a log it prints on the
    terminal.
    """

    job: Job
    inputs: tuple[Path, ...]
    outputs: tuple[Path, ...]
    work: Work
    log: Path | None = None


LeaveError = Callable[[Task, StageError], None]
"""Writes a task's outputs such that they say what went wrong."""


def run(task: Task, leave_error: LeaveError | None = None, force: bool = False) -> None:
    """Does the task's work unless its job is up to date, and writes its record. `force` does it in any case.

    With `leave_error` an exception becomes a result: the function leaves outputs that say so, the record keeps it, and
    the job succeeds, so that other stages go on.
    """
    job = task.job
    reason = _why_stale(task)
    if reason is None and not force:
        log.info("%s: up to date", job.name)
        return
    log.info("%s: runs because %s", job.name, reason or "it was run by hand")
    inputs = {str(path): pruning.digest(path) for path in task.inputs}
    started, clock = datetime.now(UTC), time.perf_counter()
    facts: Mapping[str, Any] | None = None
    error = None
    seen = dict(_kept)
    forget_peak_memory()
    with _heartbeat(job.name), recording(seen), leaving_no_trace():
        try:
            facts = task.work()
        except (Exception, SystemExit) as exception:
            if leave_error is None:
                raise
            if not isinstance(exception, StageError):
                traceback.print_exc()
            error = as_stage_error(exception)
    _ran.update(lasting(seen))
    if error is not None and leave_error is not None:
        print(f"error: {error}", file=sys.stderr)
        leave_error(task, error)
    seconds, memory = time.perf_counter() - clock, peak_memory()
    Record(
        job=job,
        inputs=inputs,
        outputs=described(task.outputs),
        code=fingerprint.fingerprints(seen) | (facts or {}).get(CODE, {}),
        error=None if error is None else str(error),
        run={
            "command": shlex.join(["layerproof", *sys.argv[1:]]),
            "started": started.isoformat(timespec="seconds"),
            "wall_s": round(seconds, 3),
            "peak_rss_bytes": memory,
            "host": platform.node(),
            "user": _user(),
            "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
            "python": platform.python_version(),
            "packages": package_versions(),
            **{key: fact for key, fact in (facts or {}).items() if key != CODE},
        },
    ).write(job.record)
    ended = "ended as an error" if error else "done"
    log.info("%s: %s after %.1f s, peak memory %s", job.name, ended, seconds, size(memory))


def run_all(
    tasks: Sequence[Task], leave_error: LeaveError | None = None, independent: bool = False, force: bool = False
) -> None:
    """Runs tasks one after the other in this process, each printing to its own log.

    Tasks that are `independent` do not read each other's outputs. They may use what an earlier one left in memory, such as a
    compiled graph, so what one ran counts for those after it, too.
    """
    for task in tasks:
        with printing_to(task.log), _reporting(task.log):
            run(task, leave_error, force)
        if independent:
            _kept.update(_ran)


def run_in_subprocess(tasks: Sequence[Task], leave_error: LeaveError, independent: bool = False) -> None:
    """Runs tasks as `run_all` does, in a process of their own, so that one that takes its process down leaves an error, too.

    The task at which that happens ends as an error that names the signal or exit code. Independent tasks after it run in
    another process; others end as missing.
    """

    while tasks and _is_up_to_date(tasks[0]):
        tasks = tasks[1:]
    if not tasks:
        return

    def run_them(to_parent: Connection) -> None:
        faulthandler.enable()  # a crash leaves the Python stack in the log
        for task in tasks:
            run_all([task], leave_error, independent)
            to_parent.send(None)

    child = children.start(run_them, {})
    try:
        finished = sum(1 for _ in children.received(child))
        code = child.exit_code()
    finally:
        child.end()
    left = tasks[finished:]
    if independent:
        blame(left[:1], leave_error, code)
        run_in_subprocess(left[1:], leave_error, independent)
    else:
        blame(left, leave_error, code)


def _is_up_to_date(task: Task) -> bool:
    """Whether a task has nothing to do, for which it needs no process of its own. Its log then says so."""
    with printing_to(task.log), _reporting(task.log):
        up_to_date = _why_stale(task) is None
        if up_to_date:
            log.info("%s: up to date", task.job.name)
    return up_to_date


def _why_stale(task: Task) -> str | None:
    return why_stale(Record.read(task.job.record), task.job, task.inputs, task.outputs)


def blame(tasks: Sequence[Task], leave_error: LeaveError, code: int) -> None:
    """Leaves errors for tasks whose process ended with this exit code, or minus this signal, while it ran the first of
    them.
    """
    if not tasks:
        return
    with printing_to(tasks[0].log, append=True):
        error = died(code)
    for task in tasks:
        with printing_to(task.log, append=True):
            run(Task(task.job, task.inputs, task.outputs, functools.partial(_raise, error)), leave_error)
        error = StageMissing(f"no input, because an earlier stage failed: {how_it_ended(code)}")


@contextlib.contextmanager
def _reporting(log_file: Path | None) -> Iterator[None]:
    """Has an exception in the log, too, before it goes on to the terminal."""
    try:
        yield
    except UserError as error:
        if log_file:
            print(f"error: {error}", file=sys.stderr)
        raise
    except Exception:
        if log_file:
            traceback.print_exc()
        raise


def _raise(error: StageError) -> None:
    raise error


_ran: Seen = {}
"""What the jobs of this process ran so far."""
_kept: Seen = {}
"""What of it counts for the jobs to come."""


@contextlib.contextmanager
def printing_to(path: Path | None, append: bool = False) -> Iterator[None]:
    """Standard output and error, also of what this process starts, go to a file inside the block."""
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    before = os.dup(1), os.dup(2)
    if not append:
        path.write_bytes(b"")
    with open(path, "ab") as file:  # which other processes of the job append to as well
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, kept in enumerate(before, start=1):
            os.dup2(kept, number)
            os.close(kept)


@contextlib.contextmanager
def _heartbeat(name: str) -> Iterator[None]:
    """Logs once a minute that a job still runs."""
    done, clock = threading.Event(), time.perf_counter()

    def beat() -> None:
        while not done.wait(HEARTBEAT_S):
            log.info("%s: still running after %.0f s", name, time.perf_counter() - clock)

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


def _user() -> str:
    """Who ran the job; a number where the user has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())

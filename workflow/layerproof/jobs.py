"""Runs jobs: not at all if nothing that they depend on changed; else recorded, with their errors told in a line."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import getpass
import mmap
import os
import platform
import resource
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from layerproof import fingerprint, known_errors, trimming
from layerproof.errors import StageError, StageMissing, UserError
from layerproof.records import Record, described, why_stale

PACKAGES = (
    "torch",
    "torch-xla",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "numba",
    "h5py",
    "matplotlib",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)
"""Packages whose version a job's record states."""


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

LOG_END = 1 << 16
"""Bytes at the end of a log in which a reason is looked for."""
LONGEST_REASON = 500
"""Characters of a foreign error's message that the report shows."""


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
    inputs = {str(path): trimming.digest(path) for path in job.inputs}
    started, clock = datetime.now(UTC), time.perf_counter()
    facts: Mapping[str, Any] | None = None
    error = None
    seen = dict(_kept)
    directory = os.getcwd()
    _forget_peak_memory()
    with fingerprint.recording(seen):
        try:
            facts = work()
        except (Exception, SystemExit) as exception:
            if on_error is None:
                raise
            if not isinstance(exception, StageError):
                traceback.print_exc()
            error = as_stage_error(exception)
    os.chdir(directory)  # where a port may have left it
    _ran.update(fingerprint.lasting(seen))
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


_ran: fingerprint.Seen = {}
_kept: fingerprint.Seen = {}


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


def died(code: int, process: str = "The process of the job") -> StageError:
    """The error of what a process did that ended with this exit code, or minus this signal, with what its log tells."""
    meaning = known_errors.explained(_log_so_far())
    last = f"Its log has what it printed last{f': {meaning}' if meaning else '.'}"
    return StageError(f"{how_it_ended(code, process)} {last}")


def _log_so_far() -> str:
    """What this process and those that it started printed last, if it goes into a file."""
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_END))
            return log.read().decode(errors="replace")
    except OSError:  # a pipe or a terminal
        return ""


def end_with(parent: int) -> None:
    """Has this process killed when its parent dies: nobody would wait for what it writes."""
    PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def how_it_ended(code: int, process: str = "The process of the job") -> str:
    """A sentence on a process that ended before its job did; `code` is its exit code, or minus the signal."""
    if code >= 0:
        return f"{process} ended with exit code {code} before its output was written."
    cause = " (out of memory, or killed by hand)" if -code == signal.SIGKILL else ""
    known = -code in set(signal.Signals)
    return f"{process} was killed by {signal.Signals(-code).name if known else f'signal {-code}'}{cause}."


def _forget_peak_memory() -> None:
    """Begins to measure anew, in a process that had other jobs before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Largest resident size of this process in bytes: since `_forget_peak_memory` where the kernel says that."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _raise(error: StageError) -> None:
    raise error


def _user() -> str:
    """Who ran the job; a number where the user has no name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of the packages that numbers may depend on, of those that are installed."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def as_stage_error(exception: BaseException) -> StageError:
    """The error as one line for the report; what is none of ours is named by its type and the line that raised it.

    That line is the last one outside of this library and of installed packages, if there is any: the user's.
    """
    if isinstance(exception, UserError):
        meaning = known_errors.explained(str(exception))
        if isinstance(exception, StageError) and meaning is None:
            return exception
        kind = type(exception) if isinstance(exception, StageError) else StageError
        error = kind(f"{exception} {meaning}" if meaning else str(exception))
        error.__cause__ = exception.__cause__
        return error
    try:
        text = str(exception).strip()
    except Exception:
        text = "its message cannot be read"
    message = " ".join(text.split())[:LONGEST_REASON] if text else "no message"
    frames = [frame for frame in traceback.extract_tb(exception.__traceback__) if "site-packages" not in frame.filename]
    users = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)]
    where = next((f" at {Path(frame.filename).name}:{frame.lineno}" for frame in reversed(users or frames)), "")
    meaning = known_errors.explained(f"{type(exception).__name__}: {text}")
    error = StageError(f"{type(exception).__name__}{where}: {message}{f' {meaning}' if meaning else ''}")
    error.__cause__ = exception
    return error

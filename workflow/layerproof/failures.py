"""Describes in one line of the report how a job failed: exceptions, exit codes, signals and the end of its log."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import traceback
from pathlib import Path

from layerproof import known_errors
from layerproof.errors import StageError, UserError

LOG_END = 1 << 16
"""Bytes at the end of a log to search for a reason."""

MODELS = "site-packages/transformers/models/"
"""Part of the paths of transformers' own models."""

LONGEST_REASON = 500
"""Characters of an external error's message that the report shows."""


def died(code: int | None, process: str = "The process of the job") -> StageError:
    """Returns the error for a process that ended with this exit code, or minus this signal, explained from its log. None is
    the code of a process whose parent alone knows how it ended.
    """
    meaning = known_errors.explained(_log_so_far())
    last = f"Its log shows what it printed last{f': {meaning}' if meaning else '.'}"
    return StageError(f"{how_it_ended(code, process)} {last}")


def _log_so_far() -> str:
    """Returns the last output of this process and its children, if the output goes to a file."""
    try:
        with open("/proc/self/fd/2", "rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_END))
            return log.read().decode(errors="replace")
    except OSError:  # a pipe or a terminal
        return ""


def end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, because nobody would wait for its output."""
    PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def how_it_ended(code: int | None, process: str = "The process of the job") -> str:
    """Describes a process that ended before its job did; `code` is its exit code, or minus the signal."""
    if code is None:
        return f"{process} was killed, or ended before its output was written."
    if code >= 0:
        return f"{process} ended with exit code {code} before its output was written."
    cause = " (out of memory, or killed by hand)" if -code == signal.SIGKILL else ""
    known = -code in set(signal.Signals)
    return f"{process} was killed by {signal.Signals(-code).name if known else f'signal {-code}'}{cause}."


def forget_peak_memory() -> None:
    """Resets the peak memory of a process that ran other jobs before."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """Returns the largest resident size of this process in bytes, since `forget_peak_memory` where possible."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def as_stage_error(exception: BaseException) -> StageError:
    """Converts an exception to an error of one line for the report.

    For an exception that is not ours, the message names its type and the line that raised it. That is the last line
    outside this library and installed packages if there is one, because it is the user's; otherwise the last one of a model
    of transformers, which a patch may have changed.
    """
    if isinstance(exception, UserError):
        meaning = known_errors.explained(str(exception))
        if isinstance(exception, StageError) and meaning is None:
            return exception
        error_type = type(exception) if isinstance(exception, StageError) else StageError
        error = error_type(f"{exception} {meaning}" if meaning else str(exception))
        error.__cause__ = exception.__cause__
        return error
    try:
        text = str(exception).strip()
    except Exception:
        text = "its message cannot be read"
    message = " ".join(text.split())[:LONGEST_REASON] if text else "no message"
    frames = traceback.extract_tb(exception.__traceback__)
    models = [frame for frame in frames if MODELS in frame.filename]
    own = [frame for frame in frames if "site-packages" not in frame.filename]
    users = [frame for frame in own if not Path(frame.filename).is_relative_to(Path(__file__).parent)]
    where = next((f" at {Path(frame.filename).name}:{frame.lineno}" for frame in reversed(users or models or own)), "")
    meaning = known_errors.explained(f"{type(exception).__name__}: {text}")
    more = "".join(f" {note}" for note in (*getattr(exception, "__notes__", ()), *([meaning] if meaning else ())))
    if more and not message.endswith((".", "!", "?")):
        message += "."
    error = StageError(f"{type(exception).__name__}{where}: {message}{more}")
    error.__cause__ = exception
    return error

"""The ranks of a job: one process each on this host, with the environment that torchrun sets.

The job's own process starts the ranks, waits, and collects their results and the functions that they ran. It neither
uses a device nor computes anything, because a process cannot use a device or threads that its parent used.
"""

from __future__ import annotations

import functools
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from layerproof import distributed
from layerproof.distributed.board import free_port
from layerproof.errors import StageError
from layerproof.failures import as_stage_error, died, peak_memory
from layerproof.rerun import children, fingerprint
from layerproof.rerun.recorder import Seen, recording

if TYPE_CHECKING:
    from layerproof.distributed.launcher import Attendant

GRACE = 2.0
"""Seconds in which the other ranks can report a failure after the first one does.

If all report the same failure, no single rank is to blame.
"""
DONE, FAILED = "done", "failed"


@dataclass(frozen=True)
class Done[T]:
    """A rank's return value, fingerprints of the functions that it ran, and its largest resident size in bytes."""

    value: T
    code: dict[str, str]
    peak_rss_bytes: int


@dataclass
class _Rank:
    number: int
    child: children.Child
    done: Done[Any] | None = None
    failure: StageError | None = None
    failed_at: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.number}"


def run[T](count: int, function: Callable[[int], T], launch: children.Launcher = children.start) -> list[Done[T]]:
    """Calls a function with each rank's number, in its own process with RANK, WORLD_SIZE and so on set.

    Raises:
        StageError: if a rank fails or dies, which ends the others. Names the rank, unless all fail with the same words,
            and the step that it was in. If ranks hang, says why.
    """
    attendant = _attendant() if count > 1 else None
    environment = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TORCHELASTIC_RUN_ID": "layerproof",  # makes torch_xla give each rank a core of its own
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **(attendant.variables() if attendant else {}),
    }
    ranks: list[_Rank] = []
    try:
        for number in range(count):
            own = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
            ranks.append(_Rank(number, launch(functools.partial(_run_rank, function), own)))
        _listen(ranks, attendant)
    finally:
        for rank in ranks:
            rank.child.end()
    return [rank.done for rank in ranks if rank.done is not None]


def code_of(done: Sequence[Done[Any]]) -> dict[str, str]:
    """Fingerprints of everything that any of these ranks ran.

    Code edited between two ranks gets a fingerprint that matches nothing.
    """
    code: dict[str, str] = {}
    for one in done:
        for entry, found in one.code.items():
            code[entry] = found if code.get(entry, found) == found else "edited while ranks ran"
    return code


def _run_rank(function: Callable[[int], Any], to_job: Connection) -> None:
    """Runs one rank, in its own process."""
    _share_cores(int(os.environ["WORLD_SIZE"]))
    seen: Seen = {}
    directory = os.getcwd()
    try:
        with recording(seen):
            value = function(int(os.environ["RANK"]))
        os.chdir(directory)  # a port may have left it
        distributed.ended()
        to_job.send((DONE, Done(value, fingerprint.fingerprints(seen), peak_memory())))
    except (Exception, SystemExit) as exception:
        distributed.ended(exception)
        if not isinstance(exception, StageError):
            traceback.print_exc()
        to_job.send((FAILED, (time.monotonic(), as_stage_error(exception))))


def _share_cores(count: int) -> None:
    """Limits each rank to its share of the cores: more threads than cores wait for each other."""
    share = max(1, len(os.sched_getaffinity(0)) // count)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(share)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(min(share, torch.get_num_threads()))


def _listen(ranks: Sequence[_Rank], attendant: Attendant | None) -> None:
    """Receives messages until every rank is done.

    Raises:
        StageError: GRACE seconds after the first rank failed or died, or as soon as all did.
    """
    deadline = None
    while waiting := [rank for rank in ranks if rank.done is None and rank.failure is None]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([source for rank in waiting for source in (rank.child.messages, rank.child.ended.fileno())], left)
        if not ready:
            break
        for rank in waiting:
            if rank.child.messages in ready:
                _take(rank)
            elif rank.child.ended.fileno() in ready:
                _died(rank)
        if deadline is None and any(rank.failure for rank in ranks):
            deadline = time.monotonic() + GRACE
    if any(rank.failure for rank in ranks):
        raise _hang(attendant) or _failure(ranks, attendant)


def _take(rank: _Rank) -> None:
    try:
        message, content = rank.child.messages.recv()
    except (EOFError, OSError):
        _died(rank)
        return
    if message == DONE:
        rank.done = content
    else:
        rank.failed_at, rank.failure = content


def _died(rank: _Rank) -> None:
    rank.failure = died(rank.child.exit_code(), "Its process")


def _hang(attendant: Attendant | None) -> StageError | None:
    """The error of ranks that a doctor ended because they hang; the log has all that it found."""
    found = attendant.found() if attendant else None
    if not found:
        return None
    print(found.text, file=sys.stderr, flush=True)
    return StageError(found.finding.sentence)


def _failure(ranks: Sequence[_Rank], attendant: Attendant | None) -> StageError:
    """The error of the rank that died, or else failed first: the others fail because it is gone."""
    failed = [(rank.failed_at, rank.number, rank, rank.failure) for rank in ranks if rank.failure is not None]
    _, _, first, failure = min(failed)
    texts = {str(rank.failure).removeprefix(f"{rank}: ") for rank in ranks}
    if len(texts) == 1:
        return failure
    step = attendant.step_of(first.number) if attendant else ""
    return type(failure)(f"{first}: {str(failure).removeprefix(f'{first}: ')}{step}")


def _attendant() -> Attendant:
    from layerproof.distributed.launcher import Attendant

    return Attendant(f"ranks of process {os.getpid()}, {time.time()}")

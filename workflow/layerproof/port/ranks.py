"""The ranks of a job: a process for each on this host, with the environment that torchrun gives.

The job's own process starts them, waits, and takes over what they made and ran. It uses no device and computes nothing: a
process cannot use a device, or threads, that its parent did.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, cast

from layerproof.distributed import marks
from layerproof.errors import StageError
from layerproof.failures import as_stage_error, died, end_with, peak_memory
from layerproof.rerun import fingerprint
from layerproof.rerun.recorder import Seen, recording

GRACE = 2.0
"""Seconds that the other ranks have, once one has failed, to say that they did, too: then it is none of their own."""
MARK, DONE, FAILED = "mark", "done", "failed"


@dataclass(frozen=True)
class Done[T]:
    """What a rank returned, fingerprints of the functions that it ran, and its largest resident size in bytes."""

    value: T
    code: dict[str, str]
    peak_rss_bytes: int


@dataclass
class _Rank:
    number: int
    process: BaseProcess
    ended: IO[bytes]
    messages: Connection
    reached: list[str] = field(default_factory=list)
    done: Done[Any] | None = None
    failure: StageError | None = None
    failed_at: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.number}"


def run[T](count: int, function: Callable[[int], T]) -> list[Done[T]]:
    """Calls a function with each rank's number, in a process of its own with RANK, WORLD_SIZE and so on set.

    Raises:
        StageError: if a rank fails or dies, which ends the others. Names the rank, unless all fail with the same words, and
            the ranks that never reached the step that it had reached.
    """
    environment = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(marks.free_port()),
        "TORCHELASTIC_RUN_ID": "layerproof",  # by which torch_xla knows that each rank is to have a core of its own
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }
    sys.stdout.flush()
    sys.stderr.flush()
    ranks: list[_Rank] = []
    try:
        for number in range(count):
            ranks.append(_start(number, environment, function))
        _listen(ranks)
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()
            rank.messages.close()
            rank.ended.close()
    return [rank.done for rank in ranks if rank.done is not None]


def code_of(done: Sequence[Done[Any]]) -> dict[str, str]:
    """Fingerprints of all that any of these ran. What was edited between them gets one that nothing has."""
    code: dict[str, str] = {}
    for one in done:
        for entry, found in one.code.items():
            code[entry] = found if code.get(entry, found) == found else "edited while ranks ran"
    return code


def _start(number: int, environment: dict[str, str], function: Callable[[int], Any]) -> _Rank:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    own = environment | {"RANK": str(number), "LOCAL_RANK": str(number)}
    process = fork.Process(target=_be, args=(own, function, sender, os.getpid()))
    process.start()
    sender.close()
    # Not by its end of the pipe: what a rank starts may keep that open.
    ended = os.fdopen(os.pidfd_open(cast("int", process.pid)), "rb")
    return _Rank(number, process, ended, receiver)


def _be(environment: dict[str, str], function: Callable[[int], Any], to_job: Connection, parent: int) -> None:
    """One rank, in its own process."""
    end_with(parent)
    marks.on_mark = lambda step: to_job.send((MARK, step))
    os.environ.update(environment)
    _share_cores(int(environment["WORLD_SIZE"]))
    seen: Seen = {}
    directory = os.getcwd()
    try:
        with recording(seen):
            value = function(int(environment["RANK"]))
        os.chdir(directory)  # where a port may have left it
        to_job.send((DONE, Done(value, fingerprint.fingerprints(seen), peak_memory())))
    except (Exception, SystemExit) as exception:
        if not isinstance(exception, StageError):
            traceback.print_exc()
        to_job.send((FAILED, (time.monotonic(), as_stage_error(exception))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # what a port or a device leaves behind may not end by itself


def _share_cores(count: int) -> None:
    """Each rank computes on its share of the cores: more threads than cores wait for each other."""
    share = max(1, len(os.sched_getaffinity(0)) // count)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(share)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(min(share, torch.get_num_threads()))


def _listen(ranks: Sequence[_Rank]) -> None:
    """Takes messages until every rank is done.

    Raises:
        StageError: GRACE seconds after the first one failed or died, or when all did.
    """
    deadline = None
    while waiting := [rank for rank in ranks if rank.done is None and rank.failure is None]:
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([source for rank in waiting for source in (rank.messages, rank.ended.fileno())], left)
        if not ready:
            break
        for rank in waiting:
            if rank.messages in ready:
                _take(rank)
            elif rank.ended.fileno() in ready:
                _died(rank)
        if deadline is None and any(rank.failure for rank in ranks):
            deadline = time.monotonic() + GRACE
    if any(rank.failure for rank in ranks):
        raise _failure(ranks)


def _take(rank: _Rank) -> None:
    try:
        kind, content = rank.messages.recv()
    except (EOFError, OSError):
        _died(rank)
        return
    if kind == MARK:
        rank.reached.append(content)
    elif kind == DONE:
        rank.done = content
    else:
        rank.failed_at, rank.failure = content


def _died(rank: _Rank) -> None:
    rank.process.join()
    rank.failure = died(rank.process.exitcode or 0, "Its process")


def _failure(ranks: Sequence[_Rank]) -> StageError:
    """The error of the rank that died, or failed first: others fail because it is gone."""
    failed = [(rank.failed_at, rank.number, rank, rank.failure) for rank in ranks if rank.failure is not None]
    _, _, first, failure = min(failed)
    texts = {str(rank.failure).removeprefix(f"{rank}: ") for rank in ranks}
    if len(texts) == 1:
        return failure
    last = first.reached[-1] if first.reached else None
    behind = [str(rank) for rank in ranks if last and last not in rank.reached]
    hang = f" {' and '.join(behind).capitalize()} never reached “{last}”." if behind else ""
    return type(failure)(f"{first}: {str(failure).removeprefix(f'{first}: ')}{hang}")

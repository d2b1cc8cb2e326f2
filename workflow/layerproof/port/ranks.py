"""The ranks of a job: one process each, which starts for the first of its stages and stays for the others.

The job's own process has a launcher start the ranks, asks them for one stage after the other, and collects their results and
the functions that they ran. It neither uses a device nor computes anything, because a process cannot use a device or
threads that its parent used. Ranks that torchrun, Ray or srun start run the job's own command, and ask back what to do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import secrets
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Client, Connection, Listener, wait
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from layerproof import distributed
from layerproof.distributed.axes import as_variable
from layerproof.errors import StageError
from layerproof.failures import as_stage_error, died, end_with, forget_peak_memory, peak_memory
from layerproof.launch.commands import command
from layerproof.launch.variables import of_fork
from layerproof.rerun import children, fingerprint
from layerproof.rerun.jobs import printing_to
from layerproof.rerun.recorder import Seen, lasting, recording

if TYPE_CHECKING:
    from layerproof.distributed.launcher import Attendant

log = logging.getLogger(__name__)

GRACE = 2.0
"""Seconds in which the other ranks can report a failure after the first one does.

If all report the same failure, no single rank is to blame.
"""
END = 10.0
"""Seconds that a launcher has to end its ranks before it is killed."""
DONE, FAILED = "done", "failed"
JOB, KEY = "LAYERPROOF_RANK_OF", "LAYERPROOF_RANK_KEY"
"""The variables that tell a rank where its job listens, HOST:PORT, and what it has to know to be let in."""


class RankDied(StageError):
    """A rank was killed, or ended without a word."""


@dataclass(frozen=True)
class Done[T]:
    """A rank's return value, fingerprints of the functions that it ran, and its largest resident size in bytes."""

    value: T
    code: dict[str, str]
    peak_rss_bytes: int


@dataclass(frozen=True)
class Work:
    """What a rank can be asked for: a function of its number and of what it is asked with, and the log that it prints to."""

    function: Callable[..., Any]
    log: Path | None = None


@dataclass
class _Rank:
    number: int
    child: children.Child
    done: Done[Any] | None = None
    failure: StageError | None = None
    failed_at: float = 0.0

    def __str__(self) -> str:
        return f"rank {self.number}"


@dataclass
class _World:
    """Ranks that have been started. `launcher` is the process of torchrun, Ray or srun, if they are not forked."""

    ranks: list[_Rank] = field(default_factory=list)
    attendant: Attendant | None = None
    launcher: subprocess.Popen[bytes] | None = None

    def end(self) -> None:
        for rank in self.ranks:
            rank.child.end()
        if self.launcher:
            self.launcher.terminate()
            try:
                self.launcher.wait(END)
            except subprocess.TimeoutExpired:
                self.launcher.kill()
                self.launcher.wait()


@dataclass
class Crew:
    """The ranks of a job, and all that they can be asked for.

    `axes` are the sizes of the mesh that they are spread over, in the order of `axes.AXES`. A rank that fails ends the
    others, and the next stage gets new ones: their process groups are broken. A stage whose rank died is tried again, as
    often as `retries` says. What `independent` works ran counts as run by those after them, as in `jobs.run_all`.
    """

    launcher: str
    axes: Mapping[str, int]
    retries: int = 0
    independent: bool = False
    works: dict[str, Work] = field(default_factory=dict)
    _world: _World | None = None

    @property
    def count(self) -> int:
        return math.prod(self.axes.values())

    def run(self, name: str, *arguments: Any) -> list[Done[Any]]:
        """Has each rank do one of `works`. Its arguments and values must pickle.

        Raises:
            StageError: if a rank fails or dies, which ends the others. Names the rank, unless all fail with the same words,
                and the step that it was in. If ranks hang, says why.
        """
        for tried in range(1, self.retries + 1):
            try:
                return self._run(name, arguments)
            except RankDied as error:
                log.warning("%s: %s It runs again, for time %d of %d.", name, error, tried, self.retries)
        return self._run(name, arguments)

    def end(self) -> None:
        """Ends the ranks, if there are any."""
        world, self._world = self._world, None
        if world:
            world.end()

    def _run(self, name: str, arguments: Sequence[Any]) -> list[Done[Any]]:
        try:
            self._world = world = self._world or self._started()
            for rank in world.ranks:
                rank.done = None
                with contextlib.suppress(OSError):  # a rank that is gone is found out below
                    rank.child.messages.send((name, arguments))
            _listen(world)
        except BaseException:
            self.end()
            raise
        return [rank.done for rank in world.ranks if rank.done is not None]

    def _started(self) -> _World:
        world = _World(attendant=_attendant() if self.count > 1 else None)
        host = _own_host(self.launcher)
        given = world.attendant.variables(host) if world.attendant else {}
        given |= {distributed.MESH: as_variable(self.axes)}
        self._world = world  # which is ended if the others cannot start
        if self.launcher == "fork":
            serve = functools.partial(_serve, self.works, independent=self.independent)
            for number, own in enumerate(of_fork(self.count)):
                world.ranks.append(_Rank(number, children.start(serve, given | own)))
        else:
            _launch(world, self.launcher, self.count, given, host)
        return world


def run[T](count: int, function: Callable[[int], T]) -> list[Done[T]]:
    """Calls a function with each rank's number, in a process of its own that is forked for it.

    Raises:
        StageError: as `Crew.run` does.
    """
    crew = Crew("fork", {"tp": count}, works={"": Work(function)})
    try:
        return crew.run("")
    finally:
        crew.end()


def serves(crew: Crew) -> bool:
    """Whether this process is a rank that a launcher started; then it has done all that its job asked for."""
    where = os.environ.pop(JOB, None)  # a process that the rank starts is none
    if where is None:
        return False
    host, _, port = where.rpartition(":")
    channel = Client((host, int(port)), authkey=bytes.fromhex(os.environ.pop(KEY)))
    channel.send(int(os.environ["RANK"]))
    _serve(crew.works, channel, crew.independent)
    return True


def code_of(done: Sequence[Done[Any]]) -> dict[str, str]:
    """Fingerprints of everything that any of these ranks ran.

    Code edited between two ranks gets a fingerprint that matches nothing.
    """
    code: dict[str, str] = {}
    for one in done:
        for entry, found in one.code.items():
            code[entry] = found if code.get(entry, found) == found else "edited while ranks ran"
    return code


@dataclass
class _Joined:
    """A rank that a launcher started, which has come to its job. It ends at the latest with its launcher."""

    messages: Connection
    ended: IO[bytes]
    launcher: subprocess.Popen[bytes]

    def exit_code(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(GRACE)  # which has a word to say in the log

    def end(self) -> None:
        self.messages.close()
        self.ended.close()


def _launch(world: _World, launcher: str, count: int, given: Mapping[str, str], host: str) -> None:
    """Starts the ranks by a launcher, and waits until all have come.

    Raises:
        StageError: if the launcher ends before.
    """
    key = secrets.token_bytes(32)
    own = ["-m", "layerproof", *sys.argv[1:]]
    with Listener((host, 0), authkey=key) as listener:
        variables = {**given, JOB: f"{host}:{listener.address[1]}", KEY: key.hex()}
        world.launcher = process = subprocess.Popen(
            command(launcher, count, own),
            env=os.environ | variables,
            stdin=subprocess.DEVNULL,
            preexec_fn=functools.partial(end_with, os.getpid()),
        )
        come: queue.Queue[tuple[int, Connection]] = queue.Queue()
        threading.Thread(target=_accept, args=(listener, come), daemon=True).start()
        joined: dict[int, Connection] = {}
        while len(joined) < count:
            try:
                number, channel = come.get(timeout=0.5)
                joined[number] = channel
            except queue.Empty:
                if process.poll() is not None:
                    error = died(process.returncode, f"{launcher}, which starts the ranks,")
                    raise StageError(f"{error} {len(joined)} of {count} ranks have come.") from None
    for number, channel in sorted(joined.items()):
        ended = os.fdopen(os.pidfd_open(process.pid), "rb")
        world.ranks.append(_Rank(number, _Joined(channel, ended, process)))


def _accept(listener: Listener, come: queue.Queue[tuple[int, Connection]]) -> None:
    """Lets in the ranks, until the listener is closed."""
    while True:
        try:
            channel = listener.accept()
            come.put((channel.recv(), channel))
        except (OSError, EOFError):
            return


def _serve(works: Mapping[str, Work], to_job: Connection, independent: bool) -> None:
    """Does what the job asks for, in the process of a rank, until the job ends or something fails."""
    _share_cores(int(os.environ["LOCAL_WORLD_SIZE"]))
    kept: Seen = {}
    directory, process = os.getcwd(), os.getpid()
    while True:
        try:
            name, arguments = to_job.recv()
        except (EOFError, OSError):
            return
        distributed.rests(False)
        forget_peak_memory()
        seen = dict(kept)
        work = works[name]
        with printing_to(work.log, append=True):
            try:
                with recording(seen):
                    value = work.function(int(os.environ["RANK"]), *arguments)
            except (Exception, SystemExit) as exception:
                if os.getpid() != process:
                    os._exit(1)
                distributed.ended(exception)
                if not isinstance(exception, StageError):
                    traceback.print_exc()
                to_job.send((FAILED, (time.monotonic(), as_stage_error(exception))))
                return
        if os.getpid() != process:
            os._exit(0)  # a copy of the process that the port's code forked
        os.chdir(directory)  # a port may have left it
        sys.stdout.flush()
        sys.stderr.flush()
        if independent:
            kept.update(lasting(seen))
        distributed.rests(True)
        to_job.send((DONE, Done(value, fingerprint.fingerprints(seen), peak_memory())))


def _share_cores(count: int) -> None:
    """Limits each rank to its share of the cores: more threads than cores wait for each other."""
    share = max(1, len(os.sched_getaffinity(0)) // count)
    if "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = str(share)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(min(share, torch.get_num_threads()))


def _listen(world: _World) -> None:
    """Receives messages until every rank is done.

    Raises:
        StageError: GRACE seconds after the first rank failed or died, or as soon as all did.
    """
    deadline = None
    ranks = world.ranks
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
        raise _hang(world.attendant) or _failure(ranks, world.attendant)


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
    rank.failure = RankDied(str(died(rank.child.exit_code(), "Its process")))


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


def _own_host(launcher: str) -> str:
    """What ranks call this host."""
    if launcher == "srun" or (launcher == "ray" and "RAY_ADDRESS" in os.environ):
        return socket.gethostname()
    return "127.0.0.1"


def _attendant() -> Attendant:
    from layerproof.distributed.launcher import Attendant

    return Attendant(f"ranks of process {os.getpid()}, {time.time()}")

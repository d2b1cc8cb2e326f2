"""The board: where ranks leave word for each other, in a store that outlives them if a launcher hosts it."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from . import WORLD
from .marks import Step, longest_open

HOST = socket.gethostname()
READY = timedelta(seconds=10)
"""How long connecting to the store may take."""


@dataclass(frozen=True)
class State:
    """What one rank says of itself."""

    rank: int
    size: int
    address: str  # where it looks for the others, HOST:PORT
    host: str = HOST
    pid: int = field(default_factory=os.getpid)
    steps: Sequence[Step] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    groups: Mapping[str, Sequence[int]] = field(default_factory=dict)
    recorded: Sequence[Step] = ()
    """The collectives that torch's Flight Recorder has of it."""
    stack: Sequence[str] = ()
    stack_file: int = -1
    """The descriptor of the file that it writes its stack to when it is asked by a signal."""
    answers: bool = True
    """Whether it answered when it was asked for its stack."""
    ended: str = ""
    """How it ended, such as "raised ValueError: no weights"."""
    ended_at: float = 0.0
    rivals: Sequence[int] = ()
    """Other processes that say that they are this rank."""

    @classmethod
    def read(cls, text: str) -> State:
        values = json.loads(text)
        steps = {name: [Step(**step) for step in values[name]] for name in ("steps", "recorded")}
        return cls(**values | steps)

    def with_flight(self) -> State:
        """The same with the collective of Flight Recorder that it is in, if its own marks show no step: C++ has begun it."""
        counts = {step.group: step.number + 1 for step in self.recorded}
        where = self.stack[-1] if self.stack else "a line that Flight Recorder does not say"
        unended = [] if self.open() else [step for step in self.recorded if step.ended is None]
        steps = [*self.steps, *(dataclasses.replace(step, where=where) for step in unended)]
        return dataclasses.replace(self, steps=steps, counts={**self.counts, **counts})

    def without_ended(self, others: Iterable[State]) -> State:
        """The same without steps that are open only because this rank could not say more: others have ended them."""
        ended = {step.key for other in others for step in other.steps if step.ended is not None}
        return dataclasses.replace(
            self, steps=[step.at_its_end() if step.key in ended else step for step in self.steps]
        )

    def with_step(self, step: Step) -> State:
        """The same with a step that has begun since."""
        if self.counts.get(step.group, 0) > step.number:
            return self
        return dataclasses.replace(self, steps=[*self.steps, step], counts={**self.counts, step.group: step.number + 1})

    def open(self) -> Step | None:
        """The step that it is in, the one that has lasted longest if there are several."""
        return longest_open(self.steps)

    def last(self) -> Step | None:
        return self.steps[-1] if self.steps else None

    def is_alive(self) -> bool:
        """Whether its process is there; True for those of other hosts, of which nothing is known."""
        return self.host != HOST or is_running(self.pid)


def is_running(pid: int) -> bool:
    """Whether a process of this host is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@dataclass(frozen=True)
class Board:
    """The words of all ranks of one world. `store` is a torch.distributed.Store, whose stubs lack half of its methods."""

    store: Any
    world: str

    def _key(self, name: object) -> str:
        return f"{self.world}/{name}"

    def join(self, state: State) -> None:
        self.store.append("worlds", f"{self.world}\n")
        self.store.append(self._key("joined"), f"{state.rank} {state.host} {state.pid}\n")
        self.post(state)

    def enter(self, state: State) -> list[int]:
        """Says that this process initialises its group. Returns the processes of this host that did so as the same rank."""
        self.store.append(self._key(f"entered/{state.rank}"), f"{state.host} {state.pid}\n")
        entered = [line.split() for line in self._read(f"entered/{state.rank}").splitlines()]
        others = {int(pid) for host, pid in entered if host == HOST} - {state.pid}
        return sorted(pid for pid in others if is_running(pid))

    def post(self, state: State) -> None:
        self.store.set(self._key(state.rank), json.dumps(dataclasses.asdict(state)))

    def post_step(self, rank: int, step: Step) -> None:
        """Posts only that a step has begun, for a rank that may die in it. That takes no wait: the store does not answer."""
        self.store.set(self._key(f"step/{rank}"), json.dumps(vars(step)))

    def joined(self) -> list[tuple[int, str, int]]:
        """Rank, host and process of all that have joined."""
        lines = [line.split() for line in self._read("joined").splitlines()]
        return [(int(rank), host, int(pid)) for rank, host, pid in lines]

    def states(self) -> dict[int, State]:
        ranks = sorted({rank for rank, _, _ in self.joined()})
        return {rank: state for rank in ranks if (state := self.state(rank))}

    def state(self, rank: int) -> State | None:
        posted, step = self._read(str(rank)), self._read(f"step/{rank}")
        if not posted:
            return None
        state = State.read(posted)
        return state.with_step(Step(**json.loads(step))) if step else state

    def others(self) -> list[Board]:
        """The boards of other worlds in this store."""
        worlds = dict.fromkeys(self.store.get("worlds").decode().splitlines()) if self.store.check(["worlds"]) else {}
        return [Board(self.store, world) for world in worlds if world != self.world]

    def alarm(self, rank: int) -> None:
        """Calls all ranks together; the first to call writes the report."""
        self.store.compare_set(self._key("alarm"), "", str(rank))

    def alarmed(self) -> int | None:
        """The rank that called first, or None if none did."""
        return int(self._read("alarm")) if self.store.check([self._key("alarm")]) else None

    def leave_word(self, how: str) -> None:
        """The last words of the rank that hosts the store."""
        self.store.set(self._key("host"), how)

    def word(self) -> str:
        return self._read("host")

    def is_first(self, rank: int) -> bool:
        """Whether this rank is the first to say that it has lost another."""
        return self.store.compare_set(self._key("lost"), "", str(rank)) == str(rank).encode()

    def answer(self, state: State) -> None:
        self.post(state)
        self.store.set(self._key(f"answer/{state.rank}"), "")

    def has_answered(self, rank: int) -> bool:
        return self.store.check([self._key(f"answer/{rank}")])

    def write(self, report: str) -> None:
        self.store.set(self._key("report"), report)

    def report(self) -> str:
        """What was found, or an empty text."""
        return self._read("report")

    def leave(self, rank: int) -> None:
        """Says that a rank has read the report and needs the store no longer."""
        self.store.set(self._key(f"left/{rank}"), "")

    def has_left(self, rank: int) -> bool:
        return self.store.check([self._key(f"left/{rank}")])

    def report_progress(self) -> None:
        self.store.add(self._key("progress"), 1)

    def progress(self) -> int:
        return self.store.add(self._key("progress"), 0)

    def _read(self, name: str) -> str:
        return self.store.get(self._key(name)).decode() if self.store.check([self._key(name)]) else ""


@functools.cache
def host() -> Any:
    """The store for boards that this process hosts on a free port; torch is imported.

    It stays until the process ends: a child that was forked has it, too, and would wait for ever for its thread to end.
    """
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=READY)


def connect(address: str) -> Any:
    """The store at HOST:PORT, or None if nothing answers there."""
    from torch._C._distributed_c10d import TCPStore
    from torch.distributed import DistError

    name, _, port = address.rpartition(":")
    try:
        return TCPStore(name, int(port), is_master=False, wait_for_workers=False, timeout=READY)
    except DistError:
        return None


def free_port() -> int:
    """Returns a TCP port of this host that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def address() -> str:
    """Where this rank looks for the others."""
    return f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"


def known_world() -> str:
    """The launcher's name for this rank's world, or an empty text if the launcher gives it none.

    All ranks of a world have the same name, even those with a wrong address.
    """
    if world := os.environ.get(WORLD):
        return world
    run = os.environ.get("TORCHELASTIC_RUN_ID")
    return f"{run}.{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}" if run else ""

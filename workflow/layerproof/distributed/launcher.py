"""The launcher's side: it hosts the store that outlives the ranks, and says at the end what went wrong between them."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from typing import IO, Any

from . import ADDRESS, WORLD, board
from .board import HOST, Board, State
from .causes import FINISHED, KILLED, Cause
from .table import Report, reported


@dataclass
class Attendant:
    """Attends the ranks that a launcher of this host starts."""

    world: str = ""
    """What the launcher calls its ranks, or an empty text if they may be of several worlds."""
    store: Any = field(default_factory=board.host)
    _running: dict[tuple[str, int], IO[bytes]] = field(default_factory=dict)
    """By world and process, what can be read once the process has ended."""
    _gone: dict[tuple[str, int], float] = field(default_factory=dict)

    def variables(self, host: str = "127.0.0.1") -> dict[str, str]:
        """What the environment of each rank has to have; `host` is what the ranks' hosts call this one."""
        return {ADDRESS: f"{host}:{self.store.port}"} | ({WORLD: self.world} if self.world else {})

    def look(self, seconds: float = 0.0, until: Sequence[IO[bytes]] = ()) -> None:
        """Notes the processes that end, within this time or until one of `until` can be read. To be called again and again:
        a launcher ends all ranks as soon as one has died, and who went first is to blame.
        """
        for one in self._boards():
            for _, host, pid in one.joined():
                rank = one.world, pid
                if host != HOST or rank in self._gone or rank in self._running:
                    continue
                try:
                    self._running[rank] = os.fdopen(os.pidfd_open(pid), "rb")
                except ProcessLookupError:
                    self._gone[rank] = time.time()
        waited_for: list[Any] = [*self._running.values(), *until]
        ready = wait(waited_for, seconds)
        for rank, ended in list(self._running.items()):
            if ended in ready:
                self._gone[rank] = time.time()
                self._running.pop(rank).close()

    def found(self) -> Report | None:
        """What the doctors of the launcher's world found; None if its ranks do not hang."""
        written = Board(self.store, self.world).report()
        return Report.read(written) if written else None

    def step_of(self, rank: int) -> str:
        """A sentence with the step that a rank of the launcher's world was in last; an empty text if it was in none."""
        state = Board(self.store, self.world).states().get(rank)
        step = state and (state.open() or state.last())
        return f" {'It was in' if step.ended is None else 'Its last step was'} {step}." if step else ""

    def reports(self) -> list[Report]:
        """What the doctors found, or else what the ranks left behind shows; nothing if all ended well."""
        written = dict.fromkeys(one.report() for one in self._boards())
        found = [Report.read(text) for text in written if text]
        return found or [after for one in self._boards() if (after := self._after(one))]

    def _after(self, one: Board) -> Report | None:
        states = {rank: self._with_end(one, state) for rank, state in one.states().items()}
        if all(state.ended == FINISHED for state in states.values()) or len(states) == 1:
            return None
        size = max(state.size for state in states.values())
        found = reported(states, size)
        return found if found.finding.cause is not Cause.UNKNOWN else None

    def _with_end(self, one: Board, state: State) -> State:
        gone = self._gone.get((one.world, state.pid))
        return replace(state, ended=KILLED, ended_at=gone) if gone and not state.ended else state

    def _boards(self) -> list[Board]:
        return [Board(self.store, self.world)] if self.world else Board(self.store, "").others()

"""The doctor: a thread in every rank that finds out why ranks hang, and ends them.

It posts what its rank does to the board. Once a rank has been in one step for longer than the deadline, it calls all
others: each posts where it is, the one that called writes the report, and all end. gloo and NCCL block without Python's
lock, so this thread runs while they do; a rank whose native code holds the lock is asked by a signal instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import IO

import torch.distributed as dist

from . import flight
from .board import HOST, Board, State, is_running, known_world
from .causes import FINISHED, HOST_LOST, LOST, RAISED, Cause, mismatch
from .marks import Step, path_is_hidden, record, stack
from .table import Report, reported

POLL = 0.25
"""Seconds between two looks at the board."""
ANSWER = 1.5
"""Seconds that a rank has to post where it is."""
PATIENCE = 3.0
"""Seconds that the store has to answer a rank that is late."""
GOODBYE = 3.0
"""Seconds that the others have to read the report, before the rank that may host the store ends."""
PROMPT = 64
"""Ranks up to which each step is posted when it begins, and not only with the next look: the store serves all of them."""
EXIT_CODE = 1
SIGNAL = signal.SIGRTMIN + 7
"""Has faulthandler write the stack of a process into its file, also while native code holds Python's lock."""


@dataclass
class Doctor:
    """The doctor of this rank."""

    board: Board
    state: State
    deadline: timedelta
    is_hosted: bool
    """Whether the store is a launcher's, which then prints the report."""
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _stack_file: IO[bytes] | None = None
    """Where faulthandler writes, as long as this process is there."""
    _word: str = ""
    """The last words of the rank that hosts the store."""
    _host: State | None = None
    """What that rank posted first."""
    _asked: float = 0.0
    """When the store was asked what it has not answered yet; 0 if it has."""
    _progress: tuple[int, float] = (0, 0.0)
    """How often any rank has reported progress, and when this one heard of it last."""

    def start(self) -> None:
        """Joins the board and begins to look."""
        self._stack_file = tempfile.TemporaryFile()  # noqa: SIM115 it is there as long as this process
        faulthandler.register(SIGNAL, self._stack_file, all_threads=False)
        self.state = replace(self.state, stack_file=self._stack_file.fileno())
        self.board.join(self.now())
        if self.state.size <= PROMPT:
            record.on_step = self._post_step
        self._progress = (self.board.progress(), 0.0)
        self._thread = threading.Thread(target=self._look, name="layerproof doctor", daemon=True)
        self._thread.start()
        if not self.is_hosted and self.state.rank != 0:
            _until(lambda: self.board.state(0) is not None, PATIENCE)
            self._host = self.board.state(0)
            threading.Thread(target=self._watch_host, name="layerproof doctor of the host", daemon=True).start()

    def stop(self) -> None:
        """Looks no more. Waits for the thread, because torch's store must not be used while Python ends."""
        self._over.set()
        record.on_step = None
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join(ANSWER)

    def now(self, with_stack: bool = False) -> State:
        """What this rank does at the moment."""
        step = record.open()
        thread = step.thread if step else threading.main_thread().ident
        return replace(
            self.state,
            steps=list(record.steps),
            counts=dict(record.counts),
            groups=dict(record.groups) | (flight.groups() if with_stack else {}),
            stack=stack(thread) if with_stack and thread else (),
            recorded=flight.steps() if with_stack else (),
        )

    def _post_step(self, step: Step) -> None:
        with contextlib.suppress(dist.DistError):
            self.board.post_step(self.state.rank, step)

    def post(self) -> None:
        """Posts what this rank does, before it may be in native code that holds Python's lock."""
        with contextlib.suppress(dist.DistError):
            self.board.post(self.now())

    def rest(self, is_so: bool) -> None:
        """Posts that this rank is as one that has finished, or that it is no longer."""
        self.state = replace(self.state, ended=FINISHED if is_so else "", ended_at=time.time() if is_so else 0.0)
        self.post()

    def end(self, how: str) -> None:
        """Posts how this rank ended."""
        if os.getpid() != self.state.pid or self._over.is_set():  # a child that was forked
            return
        self.stop()
        self.state = replace(self.state, ended=how, ended_at=time.time())
        self.post()
        if self.is_hosted or how == FINISHED:
            return
        try:
            if LOST.search(how):
                self._say_who_is_lost()
            elif self.state.rank == 0:  # the store ends with this rank, so the others have to hear of it before
                self.board.leave_word(how)
                time.sleep(2 * POLL)
        except dist.DistError:
            self._host_is_lost()

    def _say_who_is_lost(self) -> None:
        """Reports the rank that the others have lost: a launcher of ours would do so at the end."""
        if self.board.is_first(self.state.rank):
            time.sleep(POLL)  # for the others to say how they ended
            found = reported(self.board.states(), self.state.size)
            if found.finding.cause in (Cause.DIED, Cause.RAISED, Cause.LEFT):
                print(found.text, file=sys.stderr, flush=True)
            self.board.write("said")
        elif self.state.rank == 0:
            _until(lambda: self.board.report() != "", GOODBYE)

    def _host_is_lost(self) -> None:
        """Reports that the rank with the store is gone, or does not answer; nobody else can be asked."""
        host = self._host or replace(self.state, rank=0, host="an unknown host")
        if self._asked:
            host = replace(host, steps=(), counts={}, answers=False, stack=foreign_stack(host))
        else:
            host = replace(host, steps=(), counts={}, ended=self._word or HOST_LOST)
        states = {0: host, self.state.rank: self.now(with_stack=True)}
        print(reported(states, 0).text, file=sys.stderr, flush=True)

    def _watch_host(self) -> None:
        """Ends this rank if the one with the store is stopped, or if native code holds Python's lock there."""
        while not self._over.wait(1):
            if self._asked and time.time() - self._asked > PATIENCE and self._is_late():
                self._host_is_lost()
                if self._host and is_running(self._host.pid) and self._host.host == HOST:
                    os.kill(self._host.pid, signal.SIGKILL)
                os._exit(EXIT_CODE)

    def call(self) -> None:
        """Calls all ranks together. Does not return: the thread ends this process."""
        self.board.alarm(self.state.rank)
        threading.Event().wait()

    def check(self) -> None:
        """Ends all ranks at once if this one is of another world than those that came before it, by the launcher's name."""
        self.state = replace(self.state, rivals=self.board.enter(self.state))
        self.post()
        if known_world() and mismatch(self.board.states(), self.state.size):
            self.call()

    def _look(self) -> None:
        posted = None
        while not self._over.wait(POLL):
            try:
                self._asked, now = time.time(), self.now()
                if now != posted:
                    self.board.post(now)
                    posted = now
                if (count := self.board.progress()) != self._progress[0]:
                    self._progress = (count, time.time())
                if self._is_late():
                    self.board.alarm(self.state.rank)
                if not self.is_hosted:
                    self._word = self.board.word()
                caller = self.board.alarmed()
                self._asked = 0.0
                if caller is not None:
                    self._answer(caller)
            except dist.DistError:
                self._asked = 0.0
                self._lost()

    def _is_late(self) -> bool:
        """Whether this rank has been in a step for too long, counted from the last progress of any rank."""
        step = record.open() or flight.open_step()
        return step is not None and time.time() - max(step.began, self._progress[1]) > self.deadline.total_seconds()

    def _answer(self, caller: int) -> None:
        """Posts where this rank is, and ends it when the report is there."""
        self.board.answer(self.now(with_stack=True))
        if caller == self.state.rank:
            found = self._write()
            if not self.is_hosted:
                print(found.text, file=sys.stderr, flush=True)
        _until(lambda: self.board.report() != "", ANSWER + GOODBYE)
        self.board.leave(self.state.rank)
        if not self.is_hosted and self.state.rank == 0:  # it may host the store
            states = self.board.states()
            _until(
                lambda: not any(state.is_alive() for rank, state in states.items() if not self.board.has_left(rank)),
                GOODBYE,
            )
        os._exit(EXIT_CODE)

    def _write(self) -> Report:
        """Waits for the others, and writes the report."""
        ranks = [rank for rank, state in self.board.states().items() if not state.ended and state.is_alive()]
        _until(lambda: all(map(self.board.has_answered, ranks)), ANSWER)
        states, boards = all_states(self.board, self.state.size)
        for rank, state in states.items():
            if rank in ranks and not state.ended and not self.board.has_answered(rank):
                states[rank] = replace(state.without_ended(states.values()), answers=False, stack=foreign_stack(state))
        found = reported(states, self.state.size)
        for board in boards:
            board.alarm(self.state.rank)
            board.write(found.write())
        for state in states.values():
            if not state.answers and state.host == HOST and is_running(state.pid):
                os.kill(state.pid, signal.SIGKILL)  # nothing else ends it
        return found

    def _lost(self) -> None:
        """The store is gone. That is how it is at the end; a rank that waits then will wait for ever."""
        self.stop()
        if not _until(lambda: record.open() is None, self.deadline.total_seconds()):
            self._host_is_lost()
            os._exit(EXIT_CODE)


def all_states(board: Board, size: int) -> tuple[dict[int, State], list[Board]]:
    """The states of all ranks, and their boards: a rank with another address is in another world if nothing else says that
    it belongs to this one.
    """
    states, boards = board.states(), [board]
    if known_world():
        return states, boards
    for other in board.others():
        theirs = {rank: state for rank, state in other.states().items() if not state.ended and state.is_alive()}
        if theirs and not set(theirs) & set(states) and all(state.size == size for state in theirs.values()):
            states |= theirs
            boards.append(other)
    return states, boards


def raised(error: BaseException) -> str:
    """How a rank ended that raised an error."""
    first = next(iter(str(error).splitlines()), "")
    return f"{RAISED} {type(error).__name__}{f': {first}' if first else ''}"


def foreign_stack(state: State) -> list[str]:
    """The stack of a process of this host that does not answer, by faulthandler; an empty one for other hosts."""
    if state.host != HOST:
        return []
    with contextlib.suppress(OSError):
        path = Path(f"/proc/{state.pid}/fd/{state.stack_file}")
        os.kill(state.pid, SIGNAL)
        _until(lambda: path.stat().st_size > 0, 0.5)
        time.sleep(0.05)  # it may be in the middle of it
        return _lines(path.read_text())
    return []


def _lines(text: str) -> list[str]:
    """The main thread's lines in faulthandler's words, the innermost last."""
    lines = text.rpartition("(most recent call first):\n")[2].splitlines()
    found = []
    for line in lines:
        before, _, after = line.strip().partition('", line ')
        number, _, function = after.partition(" in ")
        file = before.removeprefix('File "')
        if number and not path_is_hidden(file):
            found.append(f"{file}:{number} in {function}")
    return found[::-1]


def _until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits until something is so, or for that long."""
    end = time.monotonic() + seconds
    while not (so := is_so()) and time.monotonic() < end:
        time.sleep(0.02)
    return so

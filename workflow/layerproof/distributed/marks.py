"""Marks: the steps that this process has begun and ended, such as a barrier or a collective. It does not import torch."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

KEPT = 64
"""Steps that are kept; older ones count, but are forgotten."""
HIDDEN = ("torch", "torch_xla", "multiprocessing", "contextlib", "functools", "runpy", "threading", __package__)
"""Packages whose lines are not the ones that a user looks for."""


@dataclass
class Step:
    """A step in which ranks wait for each other. `number` counts the steps of the same group, from 0."""

    name: str
    detail: str  # what has to be the same on all ranks: dtype, shape, operation, root
    group: str
    number: int
    where: str
    began: float  # seconds since the epoch
    ended: float | None = None
    thread: int = 0

    @property
    def what(self) -> str:
        return f"{self.name}({self.detail})" if self.detail else self.name

    @property
    def key(self) -> tuple[str, int]:
        """The same for all ranks that come to this step."""
        return self.group, self.number

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"

    def at_its_end(self) -> Step:
        """The same step once it has ended."""
        return replace(self, ended=self.ended or time.time())


def longest_open(steps: Iterable[Step]) -> Step | None:
    """The step that has lasted longest of those that have not ended."""
    return min((step for step in steps if step.ended is None), key=lambda step: step.began, default=None)


@dataclass
class Record:
    """The steps of this process, the latest last."""

    steps: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT))
    counts: Counter[str] = field(default_factory=Counter)
    """How many steps of each group this process has begun."""
    groups: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The ranks that have to come to the steps of each group."""
    on_step: Callable[[Step], None] | None = None
    """Called with each step that begins."""

    @contextlib.contextmanager
    def step(self, name: str, group: str, members: Sequence[int], detail: str = "") -> Iterator[Step]:
        """A step that lasts as long as the block."""
        step = Step(name, detail, group, self.counts[group], caller(), time.time(), thread=threading.get_ident())
        self.groups[group] = tuple(members)
        self.steps.append(step)
        self.counts[group] += 1
        if self.on_step:
            self.on_step(step)
        try:
            yield step
        finally:
            step.ended = time.time()

    @contextlib.contextmanager
    def again(self, step: Step) -> Iterator[None]:
        """The wait for a step that was begun before, without waiting for its end."""
        step.began, step.ended, step.thread = time.time(), None, threading.get_ident()
        try:
            yield
        finally:
            step.ended = time.time()

    def open(self) -> Step | None:
        return longest_open(list(self.steps))

    def clear(self) -> None:
        self.steps.clear()
        self.counts.clear()
        self.groups.clear()
        self.on_step = None


record = Record()
os.register_at_fork(after_in_child=record.clear)  # a child has done none of its parent's steps


def caller() -> str:
    """The line outside torch and this package that is running, as `file:line`."""
    frame = sys._getframe(1)
    while frame.f_back and is_hidden(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def stack(thread: int) -> list[str]:
    """The lines that a thread of this process is at, the innermost last, without those of torch and this package."""
    frame, lines = sys._current_frames().get(thread), []
    while frame:
        if not is_hidden(frame.f_globals.get("__name__", "")):
            lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines[::-1]


def path_is_hidden(file: str) -> bool:
    """Whether a file belongs to this package or to one of HIDDEN."""
    path = Path(file)
    return path.is_relative_to(Path(__file__).parent) or not {*path.parts, path.stem}.isdisjoint(HIDDEN)


@functools.cache
def is_hidden(module: str) -> bool:
    """Whether a module is one whose lines are not what a user looks for."""
    return any(module == name or module.startswith(f"{name}.") for name in HIDDEN)

"""Marks: which steps of its initialisation each rank has reached. Imports no torch."""

from __future__ import annotations

import socket
from collections.abc import Callable

on_mark: Callable[[str], None] | None = None
"""Called with each step that this rank reaches, in a process whose parent wants to know."""


def mark(rank: int, step: str) -> None:
    """Writes to the log, and tells `on_mark`, that a rank has reached a step."""
    print(f"rank {rank}: {step}\n", end="", flush=True)  # in one write, because ranks share a log
    if on_mark is not None:
        on_mark(step)


def free_port() -> int:
    """A port of this host on which nobody listens right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

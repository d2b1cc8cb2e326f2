"""Marks: the steps of initialisation that each rank has reached. This module does not import torch."""

from __future__ import annotations

import socket
from collections.abc import Callable

on_mark: Callable[[str], None] | None = None
"""Called with each step that this rank reaches; set it in a process whose parent follows the steps."""


def mark(rank: int, step: str) -> None:
    """Writes to the log that a rank has reached a step, and calls `on_mark`."""
    print(f"rank {rank}: {step}\n", end="", flush=True)  # one write, because ranks share a log
    if on_mark is not None:
        on_mark(step)


def free_port() -> int:
    """Returns a TCP port of this host that is free right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

"""Runs a program on ranks that are forked on this host: `python -m layerproof.launch.fork COUNT FILE ARGUMENTS`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from layerproof.launch import rank
from layerproof.launch.variables import of_fork
from layerproof.rerun import children
from layerproof.rerun.preload import import_packages


def run(count: int, arguments: Sequence[str]) -> int:
    """Returns 0, or the exit code of the rank that failed first, in a shell's terms. It ends the others."""
    import_packages(("torch",))
    ranks = [children.start(lambda _: rank.run(arguments), own) for own in of_fork(count)]
    code, deadline = 0, None
    try:
        running: dict[Any, children.ForkedChild] = {child.ended: child for child in ranks}
        while running:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not (ended := wait(list(running), left)):
                break
            for one in ended:
                this = running.pop(one).exit_code()
                code = code or (this if this >= 0 else 128 - this)
            if code and deadline is None:
                deadline = time.monotonic() + rank.GRACE
    finally:
        for child in ranks:
            child.end()
    return code


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]), sys.argv[2:]))

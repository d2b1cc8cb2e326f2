"""The process groups of a job, and what explains it when its ranks hang.

This package depends only on torch and imports no other part of Layerproof: copy the folder into a project of your own, and
call `watch()` in every rank before `init_process_group`.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from typing import Any

DEADLINE = "LAYERPROOF_WATCH_DEADLINE"
"""The variable with the seconds that a rank may be in one step."""
CHECK = "LAYERPROOF_WATCH_CHECK_COLLECTIVES"
"""The variable that, if it is set, has ranks compare each collective before it runs."""
ADDRESS = "LAYERPROOF_WATCH_STORE"
"""The variable with HOST:PORT of the store that the launcher hosts."""
WORLD = "LAYERPROOF_WATCH_WORLD"
"""The variable with a name that all ranks of one world have, and no others."""
HOOKED = "layerproof_watch"
"""The name of the copy of this package that `layerproof watch` loads into a program (hook/sitecustomize.py)."""
MESH = "LAYERPROOF_MESH"
"""The variable with the sizes of the axes that the ranks are spread over, such as `dp=2,tp=4`."""


def watch(deadline: timedelta | None = None, check_collectives: bool = False) -> None:
    """Watches the process groups of this process from now on; idempotent (see `watching.watch`)."""
    from . import watching

    watching.watch(deadline, check_collectives)


def progress() -> None:
    """Says that this rank is getting on, so that no rank that waits for it gives up before another deadline has passed."""
    if watching := _watching():
        watching.progress()


def ended(error: BaseException | None = None) -> None:
    """Says that this rank has ended, for launchers that do not end Python as a program does: that is noticed."""
    if watching := _watching():
        watching.ended(error)


def rests(is_so: bool) -> None:
    """Says that this rank has done what it was asked for, and comes to no step until it is asked for more; or that it goes
    on.
    """
    if watching := _watching():
        watching.rests(is_so)


def _watching() -> Any:
    """The module that watches this process: that of `layerproof watch`, which loads the folder under a name of its own, or
    this copy's; None if nothing does.
    """
    return sys.modules.get(f"{HOOKED}.watching") or sys.modules.get(f"{__name__}.watching")

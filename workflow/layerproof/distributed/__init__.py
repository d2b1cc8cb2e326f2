"""The process groups of a job, and what explains it when its ranks hang.

This package depends only on torch and imports no other part of Layerproof: copy the folder into a project of your own, and
call `watch()` in every rank before `init_process_group`.
"""

from __future__ import annotations

import sys
from datetime import timedelta

DEADLINE = "LAYERPROOF_WATCH_DEADLINE"
"""The variable with the seconds that a rank may be in one step."""
CHECK = "LAYERPROOF_WATCH_CHECK_COLLECTIVES"
"""The variable that, if it is set, has ranks compare each collective before it runs."""
ADDRESS = "LAYERPROOF_WATCH_STORE"
"""The variable with HOST:PORT of the store that the launcher hosts."""
WORLD = "LAYERPROOF_WATCH_WORLD"
"""The variable with a name that all ranks of one world have, and no others."""


def watch(deadline: timedelta | None = None, check_collectives: bool = False) -> None:
    """Watches the process groups of this process from now on; idempotent (see `watching.watch`)."""
    from . import watching

    watching.watch(deadline, check_collectives)


def progress() -> None:
    """Says that this rank is getting on, so that no rank that waits for it gives up before another deadline has passed."""
    from . import watching

    watching.progress()


def ended(error: BaseException | None = None) -> None:
    """Says that this rank has ended, for launchers that do not end Python as a program does: that is noticed."""
    if f"{__name__}.watching" in sys.modules:
        from . import watching

        watching.ended(error)

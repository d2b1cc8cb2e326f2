"""Who runs the workflow in a folder: each call notes its process, so that the lock of one that was killed can be told from
the lock of one that is at work.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import psutil

from layerproof.errors import UserError
from layerproof.files import read_json, write_json

NOTES = Path(".layerproof/running")
"""A note for each call of snakemake in this folder that has not ended, or that was killed."""
LOCKS = Path(".snakemake/locks")
"""Where Snakemake keeps the lock of a folder: a file for what a run reads, and one for what it writes."""
CLOCK_S = 1.0
"""How far apart the start of a process may be by two readings of the same clock."""


@dataclass(frozen=True)
class Owner:
    """A process that runs the workflow. `started` is in seconds since 1970, as the kernel has it."""

    host: str
    process: int
    started: float

    def is_here(self) -> bool:
        return self.host == platform.node()

    def is_alive(self) -> bool:
        """Whether the process is still the one that wrote the note; another may have its number by now."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.process)
            is_same = abs(process.create_time() - self.started) < CLOCK_S
            # A zombie was killed, and its parent has not asked for it yet.
            return is_same and process.status() != psutil.STATUS_ZOMBIE
        return False

    def described(self) -> str:
        return (
            f"process {self.process} on {self.host}, started {datetime.fromtimestamp(self.started):%Y-%m-%d %H:%M:%S}"
        )


def note_this_process() -> None:
    """Notes that this process runs the workflow in this folder, until it ends."""
    own = Owner(platform.node(), os.getpid(), psutil.Process().create_time())
    path = NOTES / f"{own.host}-{own.process}.json"
    write_json(path, asdict(own))
    atexit.register(path.unlink, missing_ok=True)


@contextlib.contextmanager
def hold_folder() -> Iterator[None]:
    """Keeps other calls of `layerproof run` out of this folder, from before Snakemake locks it. The kernel lets go of it
    when the process ends, however it does.

    Raises:
        UserError: if another one holds it.
    """
    NOTES.mkdir(parents=True, exist_ok=True)
    with open(NOTES / "held", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(is_taken(at_work())) from None
        yield


def at_work() -> Owner | None:
    """The process of this host that runs the workflow in this folder, by the notes."""
    return next((owner for _, owner in owners() if owner.is_here() and owner.is_alive()), None)


def is_taken(owner: Owner | None) -> str:
    """The error of a call that meets another run; `owner` is None if that has left no note yet."""
    if owner is None:
        return "another run works in this folder. Wait until it ends, or stop it."
    return (
        f"another run works in this folder ({owner.described()}). Wait until it ends, or stop it: kill {owner.process}"
    )


def owners() -> Iterator[tuple[Path, Owner]]:
    """Yields the notes that can be read."""
    for path in sorted(NOTES.glob("*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):
            yield path, Owner(**read_json(path))


def is_locked() -> bool:
    return any(LOCKS.glob("*.lock"))


def owner_of_lock() -> Owner:
    """The call that locked this folder: of those with a note, the last that wrote it before the lock was there. Later ones
    met the lock.
    """
    locked = min(path.stat().st_mtime_ns for path in LOCKS.glob("*.lock"))
    written = [(path.stat().st_mtime_ns, owner) for path, owner in owners()]
    return max(written, key=lambda one: (one[0] <= locked, one[0]))[1]


def forget_killed() -> None:
    """Removes the notes of processes of this host that have ended."""
    for path, owner in owners():
        if owner.is_here() and not owner.is_alive():
            path.unlink(missing_ok=True)

"""SHA-256 digests of results, each computed once.

A file of several gigabytes is an input of a dozen jobs. So whoever reads one first leaves a note of its digest in
`.layerproof/digests/`, with the file's inode, size and times. The note counts as long as all of these are the same: whatever
writes to a file gives it another time, and whatever replaces it another inode.
"""

import contextlib
import hashlib
import os
import time
from io import BufferedIOBase
from pathlib import Path

from layerproof.files import canonical_json, read_json, write_note

NOTES = Path(".layerproof/digests")
TICK_NS = 20_000_000
"""The clock of a file system may stand still for as long, so a younger file can change without another time."""


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hex; reads the file only if no note says it.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return sha256_of(file, path)


def sha256_of(file: BufferedIOBase, path: Path) -> str:
    """Works like `sha256`, for a file that is open at its start. `path` is relative if the file is a result."""
    while time.time_ns() - os.fstat(file.fileno()).st_mtime_ns < TICK_NS and _note(path):
        time.sleep(TICK_NS / 4e9)
    return _known_or_read(file, path)


def sha256_of_new(path: Path) -> str:
    """Works like `sha256` for an output that this process has just written, and does not wait for the file system's clock:
    it gives the file a time between two ticks of that clock, so whatever writes to the file next gives it another.
    """
    now = time.time_ns()
    with open(path, "rb") as file:
        with contextlib.suppress(OSError):
            os.utime(path, ns=(now, now))
        exact = os.fstat(file.fileno()).st_mtime_ns == now
        return _known_or_read(file, path) if exact else sha256_of(file, path)


def _known_or_read(file: BufferedIOBase, path: Path) -> str:
    identity = _identity(os.fstat(file.fileno()))
    known = _read(path)
    if known[1:] == identity:
        return known[0]
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if identity == _identity(os.fstat(file.fileno())):
        _write(path, [digest, *identity])
    return digest


def keep_after_touch(path: Path) -> None:
    """Keeps a note although Snakemake gave the output a new time, as it does with every output when its job has ended.

    To be called by Snakemake's own process right then: later nobody could tell this from an edit.
    """
    known = _read(path)
    with contextlib.suppress(OSError):
        identity = _identity(path.stat())
        if known and known[1:3] == identity[:2]:
            _write(path, [known[0], *identity])


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _note(path: Path) -> Path | None:
    """Where the note of a file is; None for files elsewhere, which are not ours."""
    return None if path.is_absolute() or ".." in path.parts else NOTES / f"{path}.json"


def _read(path: Path) -> list:
    note = _note(path)
    with contextlib.suppress(OSError, ValueError):
        if note and isinstance(found := read_json(note), list) and len(found) == 5:
            return found
    return []


def _write(path: Path, known: list) -> None:
    note = _note(path)
    with contextlib.suppress(OSError):  # without it the file is read once more
        if note:
            write_note(note, canonical_json(known).encode())

"""Pruning: a stage that passes keeps its outputs and the statistics of all its taps, in a smaller file.

A pruned file begins with one line of text in the user block, which HDF5 ignores. The line states the digest and size of
the original file and the digest of everything after the block. Records treat the pruned file as the original, so no job
reruns because of pruning. When a job needs the dropped tensors, the planner has the original file built again.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from layerproof.digests import sha256, sha256_of
from layerproof.errors import UserError
from layerproof.files import sha256_from_here

BLOCK_BYTES = 512  # smallest user block that HDF5 allows
MAGIC = b"layerproof trimmed"


@dataclass(frozen=True)
class Pruned:
    """A pruned file: digest and size in bytes of the original, and the digest of the pruned file's own content."""

    path: Path
    original: str
    original_bytes: int
    own: str

    def is_undamaged(self) -> bool:
        """Whether the content after the user block still has the recorded digest."""
        return _digest_after_block(self.path) == self.own


def read(path: Path) -> Pruned | None:
    """Returns the facts about a pruned file, or None if the file is not pruned.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return _parsed(path, file.read(BLOCK_BYTES))


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hex; for a pruned file, that of the original.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:  # open once: another process may prune the file right now
        pruned = _parsed(path, file.read(BLOCK_BYTES))
        file.seek(0)
        return sha256_of(file, path) if pruned is None else pruned.original


def prune(path: Path) -> Pruned:
    """Drops all tensors of a stage's file except its outputs; statistics and modification time stay.

    Raises:
        StageError: if the file is damaged or the disk is full; the file then stays unchanged.
    """
    from layerproof.tensors import hdf5

    already = read(path)
    if already is not None:
        return already
    status, original = path.stat(), sha256(path)
    with hdf5.replacing_or_saying_why(path) as temporary:
        hdf5.write_pruned(path, temporary, BLOCK_BYTES)
        own = _digest_after_block(temporary)
        with open(temporary, "r+b") as file:
            file.write(b"%s %s %d %s" % (MAGIC, original.encode(), status.st_size, own.encode()))
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
    return Pruned(path, original, status.st_size, own)


def original_bytes(path: Path) -> int:
    """Returns the size in bytes of a file with all its taps; for a pruned file, the size of the original.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        pruned = _parsed(path, file.read(BLOCK_BYTES))
        return os.fstat(file.fileno()).st_size if pruned is None else pruned.original_bytes


def require_intact(paths: Iterable[Path]) -> None:
    """Checks that no file is pruned, for a job that reads all tensors.

    When Snakemake starts, the planner predicts which jobs need all tensors. If it missed a job, this removes the pruned
    files, so the next call of Snakemake builds them again.

    Raises:
        UserError: if a file is pruned; it was removed.
    """
    pruned = [path for path in paths if path.exists() and read(path)]
    for path in pruned:
        path.unlink()
    if pruned:
        names = ", ".join(map(str, pruned))
        raise UserError(
            f"{names}: contained only outputs (compare.taps: auto), but all taps are needed, so it was removed. Run again."
        )


def _parsed(path: Path, block: bytes) -> Pruned | None:
    words = block.removeprefix(MAGIC).rstrip(b"\0").decode(errors="replace").split()
    if not block.startswith(MAGIC) or len(words) != 3 or not words[1].isdigit():
        return None
    return Pruned(path, words[0], int(words[1]), words[2])


def _digest_after_block(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(BLOCK_BYTES)
        return sha256_from_here(file)

"""Stages that pass keep their outputs and the statistics of all taps: files of tensors that stand for whole ones.

A trimmed file begins with a line of text, in a block that HDF5 leaves to its users: the digest and the size of the file that
it was, and the digest of what follows the block. To records it is the file that it was, so no job has a reason to run
again; a job that needs the tensors has the whole file made again (`records.Stamps`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from layerproof.errors import UserError
from layerproof.files import sha256, sha256_from_here

BLOCK_BYTES = 512  # the least that HDF5 allows for a user's block
MAGIC = b"layerproof trimmed"


@dataclass(frozen=True)
class Trimmed:
    """A trimmed file: digest and bytes of the file that it stands for, and the digest of its own tensors."""

    path: Path
    whole: str
    whole_bytes: int
    own: str

    def is_undamaged(self) -> bool:
        """Whether its tensors are those that were left."""
        return _digest_after_block(self.path) == self.own


def read(path: Path) -> Trimmed | None:
    """What a file stands for if it is trimmed.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return _parsed(path, file.read(BLOCK_BYTES))


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hex; of a trimmed one that of the file that it was.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:  # once, because it may be trimmed just now
        trimmed = _parsed(path, file.read(BLOCK_BYTES))
        file.seek(0)
        return sha256_from_here(file) if trimmed is None else trimmed.whole


def trim(path: Path) -> Trimmed:
    """Leaves of a stage's file its outputs and all statistics; its time of modification stays.

    Raises:
        StageError: if the file is damaged, or the disk full; it is left as it is.
    """
    from layerproof.tensors import hdf5

    already = read(path)
    if already is not None:
        return already
    status, whole = path.stat(), sha256(path)
    with hdf5.replacing_or_saying_why(path) as temporary:
        hdf5.write_trimmed(path, temporary, BLOCK_BYTES)
        own = _digest_after_block(temporary)
        with open(temporary, "r+b") as file:
            file.write(b"%s %s %d %s" % (MAGIC, whole.encode(), status.st_size, own.encode()))
        os.utime(temporary, ns=(status.st_atime_ns, status.st_mtime_ns))
    return Trimmed(path, whole, status.st_size, own)


def whole_bytes(path: Path) -> int:
    """What a file takes with all its taps, also where it was trimmed.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        trimmed = _parsed(path, file.read(BLOCK_BYTES))
        return os.fstat(file.fileno()).st_size if trimmed is None else trimmed.whole_bytes


def require_whole(paths: Iterable[Path]) -> None:
    """For a job that reads all tensors. Which jobs will is foreseen when snakemake starts; should that have missed one, the
    next call makes the files again.

    Raises:
        UserError: if a file is trimmed, after it was removed.
    """
    trimmed = [path for path in paths if path.exists() and read(path)]
    for path in trimmed:
        path.unlink()
    if trimmed:
        names = ", ".join(map(str, trimmed))
        raise UserError(
            f"{names}: held only outputs (compare.taps: auto) and was removed: all taps are needed again. Run again."
        )


def _parsed(path: Path, block: bytes) -> Trimmed | None:
    words = block.removeprefix(MAGIC).rstrip(b"\0").decode(errors="replace").split()
    if not block.startswith(MAGIC) or len(words) != 3 or not words[1].isdigit():
        return None
    return Trimmed(path, words[0], int(words[1]), words[2])


def _digest_after_block(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(BLOCK_BYTES)
        return sha256_from_here(file)

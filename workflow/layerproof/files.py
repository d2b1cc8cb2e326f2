"""Files that are whole or not there: digests, and writing under a temporary name."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """SHA-256 of a file's content, in hex.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return sha256_from_here(file)


def sha256_from_here(file: BufferedIOBase) -> str:
    """SHA-256, in hex, of what follows in an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """SHA-256, in hex, of a JSON value in canonical form."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """JSON that is the same text for the same value: sorted keys, no spaces, no NaN.

    Raises:
        ValueError: if the value holds NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary name beside `path`; renamed to `path` when the block ends well, deleted when it does not.

    A job killed in between leaves `path` as it was, and the next one writes over the temporary file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file as a whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON as a whole or not at all.

    Raises:
        ValueError: if the value holds NaN or infinity, which JSON has no words for.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> Any:
    """The value in a JSON file; a byte order mark, as some editors write it, is passed over."""
    return json.loads(path.read_text(encoding="utf-8-sig"))


def size(count: float) -> str:
    """A number of bytes in the decimal unit that leaves one to three digits before the point."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count, _ = count / 1000, units.pop(0)
    return f"{count:.3g} {units[0]}"

"""Digests of files, and atomic writes under a temporary name."""

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from io import BufferedIOBase
from pathlib import Path
from typing import Any


def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file's content, in hex.

    Raises:
        OSError: if the file cannot be read.
    """
    with open(path, "rb") as file:
        return sha256_from_here(file)


def sha256_from_here(file: BufferedIOBase) -> str:
    """Returns the SHA-256, in hex, of the rest of an open file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(value: Any) -> str:
    """Returns the SHA-256, in hex, of a JSON value in canonical form."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def canonical_json(value: Any) -> str:
    """Formats a value as JSON that is the same text for equal values: sorted keys, no spaces, no NaN.

    Raises:
        ValueError: if the value contains NaN or infinity.
    """
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` if the block succeeds and deletes it if not.

    If the job is killed in between, `path` stays as it was, and the next job overwrites the temporary file.
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
    """Writes a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON atomically.

    Raises:
        ValueError: if the value contains NaN or infinity, which JSON cannot represent.
    """
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_note(path: Path, content: bytes) -> None:
    """Writes what only saves work: it may be lost with the machine, and several processes may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    os.replace(temporary, path)


def read_json(path: Path) -> Any:
    """Reads the value of a JSON file; skips a byte order mark, which some editors write."""
    return json.loads(path.read_text(encoding="utf-8-sig"))


def size(count: float) -> str:
    """Formats bytes in the decimal unit that leaves one to three digits before the decimal point."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count, _ = count / 1000, units.pop(0)
    return f"{count:.3g} {units[0]}"

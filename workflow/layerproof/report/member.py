"""A file of an archive, before it is packed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO


@dataclass(frozen=True)
class Member:
    """A file to be archived: its content, or where that is; its SHA-256 in hex and its size; the path that the run knew
    it by.
    """

    content: Path | bytes
    sha256: str
    bytes: int
    path: str

    @classmethod
    def of(cls, content: bytes, path: str) -> Member:
        return cls(content, hashlib.sha256(content).hexdigest(), len(content), path)

    def open(self) -> IO[bytes]:
        return BytesIO(self.content) if isinstance(self.content, bytes) else open(self.content, "rb")

"""The result of a check of a host, and helpers that checks share."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

OK, WARN, FAIL = "ok", "warn", "fail"
NOT_INSTALLED = "is not installed"


@dataclass(frozen=True)
class Check:
    """What a check looked at, its status (`ok`, `warn` or `fail`), the result in words, and a remedy unless ok."""

    name: str
    status: str
    text: str
    remedy: str | None = None


def why_not_writable(path: Path) -> str | None:
    """Why no file can be written into a directory that exists or would be created; None if one can."""
    try:
        with tempfile.TemporaryFile(dir=existing_parent(path)):
            return None
    except OSError as error:
        return error.strerror or str(error)


def existing_parent(path: Path) -> Path:
    """The path, or its nearest existing parent."""
    path = path.absolute()
    return next(parent for parent in (path, *path.parents) if parent.exists())


def run_tool(*command: str) -> tuple[int | None, str]:
    """Exit code and output of a driver's tool; None and the reason if it cannot run or does not end."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except FileNotFoundError:
        return None, NOT_INSTALLED
    except OSError as error:
        return None, f"cannot run ({error.strerror})"
    except subprocess.TimeoutExpired:
        return None, "does not answer within a minute"
    return done.returncode, done.stdout if done.returncode == 0 else f"{done.stdout}{done.stderr}"


def lines(checks: Iterable[Check]) -> Iterator[str]:
    """Yields the checks as lines for a person to read."""
    for check in checks:
        yield f"{check.status:4} {check.name}: {check.text}{f'. {check.remedy}' if check.remedy else ''}"

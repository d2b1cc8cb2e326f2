"""Programs that stand for others on PATH."""

from pathlib import Path


def write_program(path: Path, script: str) -> None:
    """Writes a shell script that can be called, and the folder that it lies in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)

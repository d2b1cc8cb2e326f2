"""Environments of commands, and of packages that do not go into that of the tests."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import warm_server
from configs import QUICK
from layerproof.files import sha256
from layerproof.warm import VARIABLE

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "layerproof-tests"
"""What tests install for themselves and keep."""


def environment() -> dict[str, str]:
    """That of a command, without what a test of this process set up for itself.

    Its port is taken, its rank another's, its compiler quick.
    """
    own = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "PJRT_DEVICE", *QUICK)
    return {name: value for name, value in os.environ.items() if name not in own}


def hurried() -> dict[str, str]:
    """Variables with which XLA compiles quickly and jobs start warm, for a command of which neither is tested."""
    return QUICK | {VARIABLE: warm_server.server()}


def install(pinned: Path) -> Path:
    """The folder of programs of an environment with these pinned packages, which is made once for their versions."""
    environment = CACHE / f"{pinned.stem}-{sha256(pinned)[:16]}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(CACHE / f"{pinned.stem}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (environment / "done").exists():
            shutil.rmtree(environment, ignore_errors=True)
            subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, environment], check=True)
            subprocess.run(
                ["uv", "pip", "install", "--quiet", "--python", environment, "--require-hashes", "-r", pinned],
                check=True,
            )
            (environment / "done").touch()
    return environment / "bin"

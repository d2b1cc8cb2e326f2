"""One rank of a program, in a process that torchrun, srun or Ray started, or that was forked."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from layerproof.failures import end_with
from layerproof.launch.variables import of_slurm

GRACE = 5.0
"""Seconds that the other ranks have to end, and to say why, once one has failed."""


def run(arguments: Sequence[str]) -> None:
    """Runs a file, or `-m` and a module, with its arguments, as Python would.

    Raises:
        SystemExit: if the program does.
    """
    is_module = arguments[0] == "-m"
    name, *rest = arguments[1:] if is_module else arguments
    sys.argv = [name, *rest]
    if is_module:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(name).resolve().parent))
        runpy.run_path(name, run_name="__main__")


def _hosts(nodes: str) -> list[str]:
    shown = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return shown.stdout.split()


if __name__ == "__main__":
    end_with(os.getppid())  # a launcher that is killed cannot end its ranks
    if "RANK" not in os.environ:
        os.environ.update(of_slurm(os.environ, _hosts(os.environ["SLURM_STEP_NODELIST"])))
    run(sys.argv[2:] if sys.argv[1] == "--" else sys.argv[1:])

"""Runs a program whose ranks agree on each process group before torch creates it (distributed.ledger)."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from layerproof import distributed
from layerproof.errors import UserError

HOOK = Path(distributed.__file__).parent / "hook"


def run(command: Sequence[str], deadline: float | None) -> int:
    """Runs a command and returns its exit code. Every Python that it starts on this host is watched.

    `deadline` is how many seconds ranks may be apart when they create a group; None for torch's own half an hour.

    Raises:
        UserError: if the command does not exist or cannot be run.
    """
    behind = os.environ.get("PYTHONPATH")
    variables = {"PYTHONPATH": os.pathsep.join([str(HOOK), *([behind] if behind else [])])}
    if deadline is not None:
        variables[distributed.DEADLINE] = f"{deadline:g}"
    try:
        process = subprocess.Popen(command, env=os.environ | variables)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}. Write the command behind -- as you would type it.") from None
    while True:
        with contextlib.suppress(KeyboardInterrupt):  # which the command gets, too, and may take its time to end
            return process.wait()

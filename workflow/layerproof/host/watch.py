"""Runs a program whose ranks say why they hang, and agree on each process group before torch creates it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from layerproof import distributed
from layerproof.errors import UserError

HOOK = Path(distributed.__file__).parent / "hook"
LOOK = 0.5
"""Seconds between two looks for ranks that have come."""


def run(
    command: Sequence[str],
    deadline: float | None,
    check_collectives: bool = False,
    more: Mapping[str, str] | None = None,
) -> int:
    """Runs a command and returns its exit code. Every Python that it starts on this host is watched.

    `deadline` is how many seconds a rank may be in one step of torch.distributed; None for as long as torch waits. `more`
    are further variables of its environment. What the ranks found is printed when the command has ended.

    Raises:
        UserError: if the command does not exist or cannot be run.
    """
    from layerproof.distributed.launcher import Attendant

    attendant = Attendant()
    behind = os.environ.get("PYTHONPATH")
    variables = {
        "PYTHONPATH": os.pathsep.join([str(HOOK), *([behind] if behind else [])]),
        **attendant.variables(),
        **(more or {}),
    }
    if deadline is not None:
        variables[distributed.DEADLINE] = f"{deadline:g}"
    if check_collectives:
        variables[distributed.CHECK] = "1"
    if "RAY_ADDRESS" in os.environ:
        print(_for_a_cluster(variables | attendant.variables(socket.getfqdn())), file=sys.stderr, flush=True)
    try:
        process = subprocess.Popen(command, env=os.environ | variables)
    except OSError as error:
        raise UserError(f"{command[0]}: {error.strerror}. Write the command behind -- as you would type it.") from None
    with os.fdopen(os.pidfd_open(process.pid), "rb") as ended:
        while process.poll() is None:
            with contextlib.suppress(KeyboardInterrupt):  # which the command gets, too, and may take its time to end
                attendant.look(LOOK, [ended])
    if process.returncode:
        attendant.look()
        for report in attendant.reports():
            print(f"\n{report.text}", end="", file=sys.stderr, flush=True)
    return process.returncode


def _for_a_cluster(variables: Mapping[str, str]) -> str:
    """What a program has to add for workers that do not inherit its environment."""
    added = json.dumps({"env_vars": dict(variables)})
    return (
        "layerproof: the workers of the Ray cluster at RAY_ADDRESS do not have the environment of this command. They are "
        f"watched if their hosts have the same folders and the program says ray.init(runtime_env={added})"
    )

"""Hands a job to a process that the jobs of one call of snakemake share (worker.py), in place of running it.

Imports little: of a job that has nothing to do this is most of what it takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import itertools
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

GOLDEN = ("weights", "tokens", "predict", "golden")
"""Verbs that share a process because they have use for transformers; the others share one that does not import it."""
PORT = ("port", "force", "bisect")
"""Verbs that run a port. Those of one kind of stage share a process, and what they ran counts for each of them: a port may
keep something in its first job that the next one uses, such as a compiled graph or a table. An idle process of
another kind ends when a job comes, since it may hold the device.
"""
ALONE = ("diagnose",)
"""Verbs with a process of their own, as entries of the dictionary of faults are registered when its module is imported."""
DIGITS = 12
"""Of the digests that name environments and kinds."""


def submit(folder: Path, argv: Sequence[str]) -> int:
    """Has a command line run by a server, and returns its exit code.

    `folder` is where the servers' sockets are; its name ends with the number of the process with which the servers end. Of
    a job whose process dies the error is left as `jobs.run_apart` leaves it, or told.
    """
    side = "golden" if argv[0] in GOLDEN else "port" if argv[0] in PORT else "other"
    environment = _digest(sorted(os.environ.items()))
    kind = _kind(argv) if side == "port" else _digest(None)  # before the server waits for it
    apart, finished, died = False, 0, -signal.SIGKILL  # of the server, if it says nothing
    try:
        connected = _connected(folder / f"{side}-{environment}")
    except (OSError, AttributeError) as error:  # such as a name too long for a socket, or a Python without pidfd_open
        print(f"This job does not share a process with others: {folder}: {error}", flush=True)
        from layerproof import cli

        return cli.run(argv)
    with connected as server, contextlib.suppress(ConnectionError):
        socket.send_fds(server, [kind.encode()], [sys.stdout.fileno(), sys.stderr.fileno()])
        server.sendall(json.dumps({"argv": list(argv), "directory": os.getcwd()}).encode() + b"\n")
        for line in server.makefile():
            word, _, number = line.strip().partition(" ")
            if word == "exit":
                return int(number)
            apart |= word == "apart"
            finished += word == "finished"
            died = int(number) if word == "died" else died
    from layerproof import cli, jobs

    if apart:
        return cli.run(argv, lambda tasks, leave_error: jobs.blame(tasks, leave_error, finished, died))
    print(f"error: {jobs.how_it_ended(died)} Run it again.", file=sys.stderr)
    return 1


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:DIGITS]


def _kind(argv: Sequence[str]) -> str:
    """Stages of one kind have weights of the same names, but for numbers, dtypes and shapes."""
    files = argv[argv.index("--weights") + 1 :] if "--weights" in argv else ()
    weights = set()
    for file in itertools.takewhile(lambda argument: not argument.startswith("--"), files):
        with contextlib.suppress(OSError, ValueError):  # the job says what is wrong
            for name, tensor in json.loads(Path(file).read_text()).get("tensors", {}).items():
                weights.add((re.sub(r"\d+", "", name), tensor["dtype"], *tensor["shape"]))
    return _digest(sorted(weights, key=str))


def _connected(address: Path) -> socket.socket:
    """A connection to the server at `address`, which is started if there is none."""
    address.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if address.parent.lstat().st_uid != os.getuid():
        raise PermissionError("the folder is somebody else's")
    client = socket.socket(socket.AF_UNIX)
    with open(address.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            client.connect(str(address))
        except (FileNotFoundError, ConnectionRefusedError):
            address.unlink(missing_ok=True)
            from layerproof.worker import start_server

            start_server(address)
            client.connect(str(address))
    return client

"""Hands a job to a process that the jobs of one call of snakemake share (worker.py), in place of running it.

Imports little: of a job that has nothing to do this is most of what it takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

GOLDEN = ("weights", "tokens", "predict", "golden")
"""Verbs that share a process because they have use for transformers; the others share one that does not import it."""
ALONE = ("port", "force", "bisect", "diagnose")
"""Verbs that run a user's code, or entries that are registered as their module is imported, each in a process of its own:
what such code does or keeps the first time, the job after it in the same process would neither do nor record.
"""


def submit(folder: Path, argv: Sequence[str]) -> int:
    """Has a command line run by a server, and returns its exit code.

    `folder` is where the servers' sockets are; its name ends with the number of the process with which the servers end. Of
    a job whose process dies the error is left as `jobs.run_apart` leaves it, or told.
    """
    side = "golden" if argv[:1] and argv[0] in GOLDEN else "other"
    environment = hashlib.sha256(json.dumps(sorted(os.environ.items())).encode()).hexdigest()[:12]
    apart, finished, died = False, 0, -signal.SIGKILL  # of the server, if it says nothing
    try:
        connected = _connected(folder / f"{side}-{environment}")
    except (OSError, AttributeError) as error:  # such as a name too long for a socket, or a Python without pidfd_open
        print(f"This job does not share a process with others: {folder}: {error}", flush=True)
        from layerproof import cli

        return cli.run(argv)
    with connected as server, contextlib.suppress(ConnectionError):
        socket.send_fds(server, [b"\n"], [sys.stdout.fileno(), sys.stderr.fileno()])
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

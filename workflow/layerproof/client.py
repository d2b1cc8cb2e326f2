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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SIDES = {
    **dict.fromkeys(("weights", "tokens", "predict", "golden"), "golden"),
    **dict.fromkeys(("port", "force", "bisect"), "port"),
    "diagnose": "diagnose",
}
"""Verbs that share a process: because they have use for transformers, because they run a port, because they have the
dictionary of faults. The others share one that imports none of this.
"""
BY_KIND = ("port", "diagnose")
"""Sides of which only stages of one kind share a process, and what they ran counts for each of them: a port may keep
something in its first job that the next one uses, such as a compiled graph or a table; and faults are registered when the
dictionary is imported.
"""
DIGITS = 12
"""Of the digests that name environments and kinds."""
PLUGINS = ("libneuronxla", "libtpu", "torch_xla_cuda_plugin")
"""Packages with which torch_xla may take another device than the CPU by itself."""
HOST, DEVICE = b"h", b"d"
"""Whether the process of a job holds a device, so that an idle one of another kind has to end before it."""


def submit(folder: Path, argv: Sequence[str]) -> int:
    """Has a command line run by a server, and returns its exit code.

    `folder` is where the servers' sockets are; its name ends with the number of the process with which the servers end. Of
    a job whose process dies the error is left as `jobs.run_apart` leaves it, or told.
    """
    side = side_of(argv[0])
    environment = _digest(sorted(os.environ.items()))
    kind = _kind(argv) if side in BY_KIND else _digest(None)  # before the server waits for it
    apart, finished, died = False, 0, -signal.SIGKILL  # of the server, if it says nothing
    try:
        connected = _connected(folder / f"{side}-{environment}")
    except (OSError, AttributeError) as error:  # such as a name too long for a socket, or a Python without pidfd_open
        print(f"This job does not share a process with others: {folder}: {error}", flush=True)
        from layerproof import cli

        return cli.run(argv)
    with connected as server, contextlib.suppress(ConnectionError):
        socket.send_fds(
            server, [kind.encode(), HOST if _is_on_host(argv) else DEVICE], [sys.stdout.fileno(), sys.stderr.fileno()]
        )
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


def side_of(verb: str) -> str:
    """The side whose server runs a verb."""
    return SIDES.get(verb, "other")


def _is_on_host(argv: Sequence[str]) -> bool:
    """Whether a job is known to hold no device: a port on XLA:CPU."""
    spec = json.loads(argv[argv.index("--spec") + 1]) if "--spec" in argv else {}
    device = spec.get("device")
    if device == "auto":
        device = os.environ.get("PJRT_DEVICE") or ("CPU" if not any(map(find_spec, PLUGINS)) else None)
    return side_of(argv[0]) == "port" and device == "CPU"


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

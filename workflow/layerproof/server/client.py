"""Hands a job to a process that the jobs of one call of snakemake share (worker.py), in place of running it.

Imports next to nothing, because of most jobs of a small model this is the longest part: what Python's `socket`, `json`,
`hashlib` and `pathlib` bring with them takes three times as long as its own start.
"""

from __future__ import annotations

import _socket
import fcntl
import os
import struct
import sys
import zlib

from layerproof.devices import is_cpu
from layerproof.server.protocol import BY_KIND, DEVICE, DIGITS, HOST, side_of

NO_DIGITS = dict.fromkeys(map(ord, "0123456789"))


def submit(folder: str, argv: list[str]) -> int:
    """Has a command line run by a server, and returns its exit code.

    `folder` is where the servers' sockets are; its name ends with the number of the process with which the servers end. Of
    a job whose process dies the error is left as `jobs.run_apart` leaves it, or told. Where no server can be had the job is
    run here.
    """
    code = _submitted(folder, argv)
    if code is None:
        from layerproof import cli

        return cli.run(argv)
    return code


def submit_in_turn(folder: str, lines: list[str]) -> int:
    """Has the command lines of rules run by servers, `python -m layerproof VERB ... > LOG 2>&1`, one after the other until
    one fails, and returns its exit code. Where no server can be had each is run in a process of its own.
    """
    import shlex

    for line in lines:
        *command, _, name, _ = shlex.split(line)
        with open(name, "wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        sys.argv = command[2:]  # what records name
        code = _submitted(folder, command[3:])
        sys.stdout.flush()
        if code is None:
            import subprocess

            alone = {key: value for key, value in os.environ.items() if key != "LAYERPROOF_WORKERS"}
            code = subprocess.run(["bash", "-c", line], env=alone).returncode
        if code:
            return code
    return 0


def _submitted(folder: str, argv: list[str]) -> int | None:
    """`submit`, but None where no server can be had."""
    side = side_of(argv[0])
    kind = _kind(argv) if side in BY_KIND else _checksum(None)  # before the server waits for it
    try:
        server = _connected(_address(folder, side))
    except (OSError, AttributeError) as error:  # such as a name too long for a socket, or a Python without pidfd_open
        print(f"This job does not share a process with others: {folder}: {error}", flush=True)
        return None
    said: list[tuple[str, int]] = []
    try:
        _hand_over(server, kind.encode() + (HOST if _is_on_host(argv) else DEVICE), argv)
        with open(server.detach()) as lines:
            for line in lines:
                word, _, number = line.strip().partition(" ")
                said.append((word, int(number or 0)))
                if word == "exit":
                    return said[-1][1]
    except ConnectionError:
        pass
    words = [word for word, _ in said]
    if "begun" not in words:  # the server ended before: with snakemake, or by what it imported
        return None if os.path.exists(f"/proc/{folder.rpartition('-')[2]}") else 1
    import signal

    from layerproof import cli
    from layerproof.failures import how_it_ended
    from layerproof.rerun import jobs

    died = dict(said).get("died", -signal.SIGKILL)  # of the server, if it says nothing
    if "apart" in words:
        finished = words.count("finished")
        return cli.run(argv, lambda tasks, leave_error: jobs.blame(tasks, leave_error, finished, died))
    print(f"error: {how_it_ended(died)} Run it again.", file=sys.stderr)
    return 1


def _is_on_host(argv: list[str]) -> bool:
    """Whether a job is known to hold no device: a port on XLA:CPU."""
    if side_of(argv[0]) != "port" or "--spec" not in argv:
        return False
    import json

    return is_cpu(json.loads(argv[argv.index("--spec") + 1]).get("device"))


def _address(folder: str, side: str) -> str:
    """The socket of the server that runs a side's jobs in an environment like this one's."""
    # How deep in shells it is depends on how bash starts it.
    return f"{folder}/{side}-{_checksum(sorted(item for item in os.environ.items() if item[0] != 'SHLVL'))}"


def _checksum(value: object) -> str:
    return f"{zlib.crc32(os.fsencode(repr(value))):0{DIGITS}x}"


def _kind(argv: list[str]) -> str:
    """Stages of one kind have weights of the same names, but for numbers, dtypes and shapes."""
    import json

    weights = set()
    for name in argv[argv.index("--weights") + 1 :] if "--weights" in argv else ():
        if name.startswith("--"):
            break
        try:
            with open(name, encoding="utf-8") as file:
                tensors = json.load(file).get("tensors", {})
        except (OSError, ValueError):  # the job says what is wrong
            continue
        weights |= {(name.translate(NO_DIGITS), one["dtype"], *one["shape"]) for name, one in tensors.items()}
    return _checksum(sorted(weights, key=str))


def _connected(address: str, packages: tuple[str, ...] = ()) -> _socket.socket:
    """A connection to the server at `address`, which is started if there is none, and then imports `packages` first."""
    folder = os.path.dirname(address)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if os.lstat(folder).st_uid != os.getuid():
        raise PermissionError("the folder is somebody else's")
    client = _socket.socket(_socket.AF_UNIX)
    with open(f"{folder}/lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            client.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            if os.path.lexists(address):
                os.unlink(address)
            from layerproof.server.worker import start_server

            start_server(address, packages)
            client.connect(address)
    return client


def _hand_over(server: _socket.socket, what: bytes, argv: list[str]) -> None:
    """Sends what the server has to know with this process's outputs, and to the runner the directory and command line."""
    outputs = struct.pack("2i", sys.stdout.fileno(), sys.stderr.fileno())
    server.sendmsg([what], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, outputs)])
    job = os.fsencode("\0".join([os.getcwd(), *argv]))
    server.sendall(b"%d\n%s" % (len(job), job))


def main() -> None:
    """`python -m layerproof.server.client` starts the server of ports on the host before its first job: it imports what they
    need while others run.
    """
    import contextlib

    from layerproof.rerun.preload import NEEDED

    with contextlib.suppress(OSError, AttributeError):  # the first job says it
        _connected(_address(os.environ["LAYERPROOF_WORKERS"], "port"), NEEDED).close()


if __name__ == "__main__":
    main()

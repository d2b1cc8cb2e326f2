"""Starts Snakemake and the jobs of a workflow from a process that has imported the large packages already.

A job spends five seconds on imports and, with a tiny model, less than one on its work. So tests of what runs and what comes
of it put a program called `python` first on PATH: it hands `python -m layerproof ...` and `python -m snakemake ...` to this
server, which forks a process for it, with the caller's folder, variables, and input and output. That process imports
layerproof anew, from the workflow's own copy. Anything else that `python` is called with runs as it always does.

Tests of starting and dying do without. Who kills the program that waits kills the process with it.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

PACKAGES = (
    "torch_xla",
    "h5py",
    "numba",
    "transformers.modeling_utils",
    "accelerate",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
    "numba.core.registry",
    "safetensors.torch",
    "snakemake.cli",
)
"""None of them may start a thread or a device by its import."""
PYTHON = f"""#!{sys.executable} -IS
import array, json, os, socket, sys
if sys.argv[1:2] != ["-m"] or sys.argv[2] not in ("layerproof", "snakemake"):
    os.execv({sys.executable!r}, [{sys.executable!r}, *sys.argv[1:]])
with socket.socket(socket.AF_UNIX) as server:
    server.connect({{address!r}})
    message = json.dumps({{{{"argv": sys.argv[2:], "folder": os.getcwd(), "environment": dict(os.environ)}}}}).encode()
    socket.send_fds(server, [len(message).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(message)
    code = server.recv(1)
sys.exit(code[0] if code else 137)  # a process that was killed says nothing
"""


@contextlib.contextmanager
def warm_python(folder: Path) -> Iterator[Path]:
    """A folder for PATH with the program `python`, whose server lives as long as the block."""
    address = folder / "server"
    program = folder / "bin/python"
    program.parent.mkdir()
    program.write_text(PYTHON.format(address=str(address)))
    program.chmod(0o755)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"}  # as jobs with --cores 1 have them
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, __file__, str(number)], stdin=subprocess.PIPE, env=environment, pass_fds=[number]
        )
    try:
        yield program.parent
    finally:
        assert server.stdin is not None
        server.stdin.close()
        server.wait()


def serve(listener: socket.socket) -> None:
    """Forks a process for each job, until standard input ends, as it does when the tests end in whatever way."""
    for name in PACKAGES:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listener.close()
            run(client)
        client.close()


def run(client: socket.socket) -> None:
    """Runs a job in this process, and ends it."""
    head, files, _, _ = socket.recv_fds(client, 8, 3)
    with client.makefile("rb") as stream:
        job = json.loads(stream.read(int.from_bytes(head, "big")))
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The process dies with the one that waits for it.
    fcntl.fcntl(client, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(client, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(client, fcntl.F_SETFL, os.O_ASYNC)
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    sys.path[0:1] = ["", *filter(None, job["environment"].get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = job["argv"]
    logging.getLogger().handlers.clear()  # of the packages
    code = 1
    try:
        runpy.run_module(job["argv"][0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    client.sendall(bytes([code]))
    os._exit(code)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))

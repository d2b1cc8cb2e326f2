"""`server.py NUMBER PID` imports the large packages and forks a process for each job that comes through the socket with this
file number, until process PID has ended. It imports nothing of layerproof: each job does so anew.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

PACKAGES = (
    "torch_xla",
    "h5py",
    "numba.core.registry",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.masking_utils",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "accelerate",
    "safetensors.torch",
    "matplotlib.figure",
    "matplotlib.backends.backend_svg",
)
"""What jobs import that takes long. One that is not installed is left to the jobs that need it."""

OF_A_SHELL = {"_", "SHLVL", "PWD", "OLDPWD"}
"""Variables in which the environments of equal jobs differ."""


@dataclass(frozen=True)
class Request:
    """A job: the arguments of its Python, its folder and its variables."""

    argv: list[str]
    folder: str
    environment: dict[str, str]


ACCEPTED = b"+"
Serves = Callable[[Request], bool]


def main() -> None:
    listener, parent = map(int, sys.argv[1:])
    started_with = dict(os.environ)

    def serves(job: Request) -> bool:
        """Whether a Python that starts for this job would import the packages as this process did."""
        same = _without(job.environment, OF_A_SHELL) == _without(started_with, OF_A_SHELL)
        return same and job.argv[:2] == ["-m", "layerproof"]

    serve(socket.socket(fileno=listener), parent, PACKAGES, serves)


def _without(variables: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if name not in names}


def serve(listener: socket.socket, parent: int, packages: Iterable[str], serves: Serves) -> None:
    """Imports packages and runs jobs until process `parent` has ended. Returns after the imports if a forked process could
    not use what they have started. Clients wait until then.
    """
    until = os.pidfd_open(parent)
    before = dict(os.environ)
    for name in packages:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    with contextlib.suppress(Exception):
        _first_kernel()
    if _threads() > 1 or _devices():
        return
    by_imports = {name: value for name, value in os.environ.items() if before.get(name) != value}
    gc.freeze()  # or looking through them would copy their memory in each process
    _answer(listener, until, serves, by_imports)


def _first_kernel() -> None:
    """Compiles a function, which imports half of numba and starts LLVM."""
    import numba

    numba.njit(lambda: 0)()


def _threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _devices() -> list[str]:
    """The devices that this process has opened beside its input and output, but those that every process may share."""
    links = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir() if int(file.name) > 2]
    return [link for link in links if link.startswith("/dev/") and link not in ("/dev/null", "/dev/urandom")]


def _answer(listener: socket.socket, until: int, serves: Serves, by_imports: Mapping[str, str]) -> None:
    """Forks a process for each client, tells the client how it ended, and kills it if the client ends before."""
    processes: dict[socket.socket, int] = {}
    while until not in (ready := select.select([listener, until, *processes, *processes.values()], [], [])[0]):
        for client, process in list(processes.items()):
            if process in ready:
                with contextlib.suppress(OSError):
                    client.sendall(str(_exit_code(process)).encode())
                client.close()
                os.close(process)
                del processes[client]
            elif client in ready:
                signal.pidfd_send_signal(process, signal.SIGKILL)
        if listener in ready:
            client, _ = listener.accept()
            process = None
            with contextlib.suppress(OSError, ValueError, TypeError):  # of a client that has ended
                process = _forked(client, serves, by_imports)
            if process is None:
                client.close()
            else:
                processes[client] = process


def _forked(client: socket.socket, serves: Serves, by_imports: Mapping[str, str]) -> int | None:
    """Reads what a client asks for, and forks a process that does it, unless it is not served."""
    head, files, _, _ = socket.recv_fds(client, 8, 3)
    try:
        with client.makefile("rb") as stream:
            job = Request(**json.loads(stream.read(int.from_bytes(head, "big"))))
        if not serves(job):
            return None
        client.sendall(ACCEPTED)
        server = os.getpid()
        process = os.fork()
        if process == 0:
            _run(job, files, by_imports, server)
        return os.pidfd_open(process)
    finally:
        for file in files:
            os.close(file)


def _run(job: Request, files: Sequence[int], by_imports: Mapping[str, str], server: int) -> NoReturn:
    """Runs a module in this process, as `python -m` does, and ends it."""
    code = 1
    try:
        _end_with(server)
        for number, file in enumerate(files):
            os.dup2(file, number)
        os.chdir(job.folder)
        os.environ.clear()
        os.environ.update({**job.environment, **by_imports})
        libraries = job.environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [job.folder, *(path for path in libraries if path and path not in sys.path)]
        _, module, *arguments = job.argv
        sys.argv = [module, *arguments]
        logging.getLogger().handlers.clear()  # of the packages
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        else:
            code = ended.code or 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, as `failures.end_with` does, which a server cannot import."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def _exit_code(process: int) -> int:
    """Of a process that has ended; minus the signal that killed it."""
    ended = os.waitid(os.P_PIDFD, process, os.WEXITED)
    assert ended is not None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


if __name__ == "__main__":
    main()

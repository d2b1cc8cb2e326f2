"""Lets the jobs of one call of snakemake share processes, so that imports are had once.

Under snakemake `python -m layerproof VERB` is a client. It hands its command line, directory and output to a server, which
the first job starts if the call did not, and waits; the server hands them to a runner, one that is idle or a new one, and a
runner takes the next job when it has done this one. There is a server for each side of `protocol.SIDES`. Of ports on the
host there is a runner for each kind of stage, which the server forks when it has imported what they have in common.

Where it matters a job is as alone as in a process of its own: a runner that dies takes only its own job with it, and the
client learns how it died; the runner of a client that is killed is killed; after an error that is not of our own making, and
when source that a runner has loaded was edited, the next job gets a fresh one. All of them end with snakemake.

Clients import next to nothing, so that a job that has nothing to do takes no time.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from layerproof.rerun.preload import NEEDED, PACKAGES, import_packages
from layerproof.server.protocol import BY_KIND, DEVICE, DIGITS, HOST, side_of

if TYPE_CHECKING:
    from io import TextIOWrapper

    from layerproof.errors import StageError
    from layerproof.rerun import jobs


FILES = 3
"""A client's connection, standard output and standard error."""

PATIENCE = 5
"""Seconds that a client may take between connecting and handing over its job, and an idle runner to end."""

IMPORTED = "imported"


def start_server(address: str, packages: Sequence[str] = ()) -> None:
    """Starts a server whose socket is at `address`; it is there for clients at once, and first imports `packages`.

    Raises:
        OSError: if there can be no such socket, or the process with which the server is to end cannot be seen from here.
    """
    owner = int(Path(address).parent.name.rpartition("-")[2])
    with contextlib.ExitStack() as files:
        # Opened here: the server starts in a while, when the owner may have ended, and another may have its number.
        end = files.enter_context(os.fdopen(os.pidfd_open(owner), "rb"))
        log = files.enter_context(open(Path(address).parent / "log", "ab"))
        listening = files.enter_context(socket.socket(socket.AF_UNIX))
        listening.bind(address)
        listening.listen()
        subprocess.Popen(  # which no terminal interrupts
            [*_command(listening, "serve", owner), str(end.fileno()), *packages],
            pass_fds=[listening.fileno(), end.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def _command(inherited: socket.socket, task: str, process: int) -> list[str]:
    return [sys.executable, "-m", "layerproof.server.worker", str(inherited.fileno()), task, str(process)]


@dataclass
class _Runner:
    """A process that runs jobs of one kind, what can be read when it has ended, the socket to it, the client whose job it
    runs, and which PACKAGES it has imported. What it started may keep the socket open.
    """

    process: int
    ended: IO[bytes]
    control: socket.socket
    kind: bytes
    client: socket.socket | None = None
    packages: tuple[str, ...] = ()


def serve(listening: socket.socket, end: int, packages: Sequence[str] = ()) -> socket.socket | None:
    """Imports packages, if there are any, and hands jobs to runners until the process of the pidfd `end` ends. In a runner,
    returns the socket over which it is given jobs.
    """
    os.set_inheritable(end, False)  # or each runner would have it
    runners: list[_Runner] = []
    try:
        if packages:
            import_packages(tuple(packages))
        while True:
            poll = select.poll()
            poll.register(listening, select.POLLIN)
            poll.register(end, select.POLLIN)
            for runner in runners:
                poll.register(runner.control, select.POLLIN)
                poll.register(runner.ended, select.POLLIN)
                if runner.client is not None:
                    poll.register(runner.client, select.POLLRDHUP)
            ready = {number for number, _ in poll.poll()}
            if end in ready:
                for runner in runners:
                    if runner.client is not None:  # its job did not fail: nobody waits for it any more
                        _tell(runner.client, b"exit 1")
                _clear(Path(listening.getsockname()))
                return None
            for runner in list(runners):
                if runner.control.fileno() in ready:
                    alive = _relay(runner)
                else:
                    left = runner.client is not None and runner.client.fileno() in ready
                    alive = not left and runner.ended.fileno() not in ready
                if not alive:
                    runners.remove(runner)
                    _end(runner)
            if listening.fileno() in ready:
                control = _accept(listening, runners)
                if control is not None:
                    os.close(end)
                    return control
    finally:
        for runner in runners:
            _end(runner)


def _has_packages(runners: Sequence[_Runner]) -> bool:
    """Whether a runner can be forked with the packages that it needs, or another has imported, imported here.

    They are imported here when no runner is at work: until it is done nobody is heard, and one that ends its process ends
    this one.
    """
    from layerproof.rerun.recorder import are_unchanged

    names = next((runner.packages for runner in runners if runner.packages), NEEDED)
    is_idle = all(runner.client is None for runner in runners)
    if not (is_idle or all(name in sys.modules for name in names)):
        return False
    loaded = import_packages(names)
    return loaded is not None and are_unchanged(loaded)


def _fork(
    listening: socket.socket,
    runners: list[_Runner],
    client: socket.socket,
    outputs: list[int],
    kind: bytes,
    place: bytes,
) -> _Runner | socket.socket:
    """A new runner; in the runner itself its socket, after it has closed what is the server's, or started from nothing.

    Raises:
        OSError: if there can be no more processes or files.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    has_packages = place == HOST and _has_packages(runners)
    server, process = os.getpid(), os.fork()
    with contextlib.suppress(OSError):  # here and there, whoever is first: a group of its own, to be ended as one
        os.setpgid(process, process)
    if process == 0:
        of_others = [file for one in runners for file in (one.control, one.ended, one.client) if file is not None]
        runners.clear()  # or they would be ended here, too
        for file in (listening, client, ours, *of_others):
            file.close()
        for output in outputs:
            os.close(output)
        if not has_packages:
            theirs.set_inheritable(True)
            os.execv(sys.executable, _command(theirs, "run", server))
        return theirs
    theirs.close()
    return _Runner(process, os.fdopen(os.pidfd_open(process), "rb"), ours, kind)


def _clear(address: Path) -> None:
    """Removes a server's socket, and with the last one of its folder the folder."""
    with contextlib.suppress(FileNotFoundError):  # another server that ends just now was faster
        address.unlink()
        if not any(path.is_socket() for path in address.parent.iterdir()):
            shutil.rmtree(address.parent, ignore_errors=True)


def _accept(listening: socket.socket, runners: list[_Runner]) -> socket.socket | None:
    """Hands one client's job to a runner of its kind; if it needs the device, idle ones of another kind are ended. In a
    runner that is forked for it, returns the runner's own socket.
    """
    client, _ = listening.accept()
    client.settimeout(PATIENCE)
    try:
        message, outputs, *_ = socket.recv_fds(client, DIGITS + 1, 2)
    except TimeoutError:  # it was stopped just now, and others wait
        outputs = []
    if len(outputs) != 2:
        client.close()
        return None
    client.settimeout(None)
    kind, place = message[:DIGITS], message[DIGITS:]
    idle = [runner for runner in runners if runner.client is None]
    for other in [runner for runner in idle if runner.kind != kind] if place == DEVICE else []:
        runners.remove(other)
        _end(other)
    runner = next((runner for runner in idle if runner.kind == kind), None)
    if runner is None:
        try:
            forked = _fork(listening, runners, client, outputs, kind, place)
        except OSError:  # the client runs its job by itself; the others go on
            traceback.print_exc()
            client.close()
            for output in outputs:
                os.close(output)
            return None
        if isinstance(forked, socket.socket):
            return forked
        runner = forked
        runners.append(runner)
    runner.client = client
    _tell(client, b"begun")
    with contextlib.suppress(ConnectionError):  # died while it was idle: its end is seen next
        socket.send_fds(runner.control, [b"\n"], [client.fileno(), *outputs])
    for output in outputs:
        os.close(output)
    return None


def _relay(runner: _Runner) -> bool:
    """Passes on to the client what a runner says; whether the runner is still there."""
    try:
        message = runner.control.recv(4096)
    except ConnectionResetError:  # it ended before it took its job
        return False
    word, *packages = message.decode().split() or [""]
    if word == IMPORTED:
        runner.packages = tuple(packages)
    elif message and runner.client is not None:
        _tell(runner.client, message)
        if message.startswith(b"exit"):
            runner.client.close()
            runner.client = None
    return bool(message)


def _tell(client: socket.socket, message: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # its hanging up is seen next
        client.sendall(message + b"\n")


def _end(runner: _Runner) -> None:
    """Ends a runner and what it started, and tells its client, if that is, how it died."""
    runner.control.close()  # by which an idle one ends, and clears up
    if runner.client is None:
        select.select([runner.ended], [], [], PATIENCE)
    runner.ended.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(runner.process, signal.SIGKILL)
    _, status = os.waitpid(runner.process, 0)
    if runner.client is not None:
        _tell(runner.client, f"died {os.waitstatus_to_exitcode(status)}".encode())
        runner.client.close()


def run_jobs(control: socket.socket, server: int) -> None:
    """Runs one job after the other for the process `server`."""
    from layerproof import cli
    from layerproof.failures import end_with
    from layerproof.rerun import jobs, recorder
    from layerproof.rerun.recorder import are_unchanged, sources

    end_with(server)
    for stream in (sys.stdout, sys.stderr):
        cast("TextIOWrapper", stream).reconfigure(line_buffering=True)  # what was printed before a crash is in the log
    beginning = _command(control, "run", server), dict(os.environ)
    loaded: dict[str, float] = {}
    failed = False

    def apart(tasks: Sequence[tuple[jobs.Job, jobs.Work]], leave_error: jobs.LeaveError) -> None:
        def leave(job: jobs.Job, error: StageError) -> None:
            nonlocal failed
            failed |= error.__cause__ is not None  # what is of our own making leaves nothing behind
            leave_error(job, error)

        control.send(b"apart")
        jobs.run_here(tasks, leave, lambda: control.send(b"finished"))

    control.set_inheritable(False)  # or what a job starts would keep it open
    while control.recv(1, socket.MSG_PEEK):
        recorder.STARTED = started = time.time()
        if failed or not are_unchanged(loaded):
            control.set_inheritable(True)
            os.execve(sys.executable, *beginning)  # the job waits meanwhile
        _, files, *_ = socket.recv_fds(control, 1, FILES)
        with socket.socket(fileno=files[0]) as client, client.makefile("rb") as sent:
            directory, *argv = os.fsdecode(sent.read(int(sent.readline()))).split("\0")
        sys.argv = ["layerproof", *argv]
        os.chdir(directory)
        with _printing_to(files[1:]):
            code = _exit_code(functools.partial(cli.run, argv, apart))
        if side_of(argv[0]) in BY_KIND:
            jobs.keep_what_ran()
        loaded = sources() | loaded
        failed |= code != 0 or any(written >= started for written in loaded.values())  # maybe after it was loaded
        gc.collect()  # a model that refers to itself would stay beside the next one
        gc.freeze()  # what is left are modules, which take longer to look through than most jobs do
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # other processes want it
        control.send(" ".join([IMPORTED, *(name for name in PACKAGES if name in sys.modules)]).encode())
        control.send(f"exit {code}".encode())


@contextlib.contextmanager
def _printing_to(files: Sequence[int]) -> Iterator[None]:
    """Standard output and error to these files, which are closed after it."""
    before = os.dup(1), os.dup(2)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, file in enumerate(before, start=1):
            os.dup2(file, number)
            os.close(file)


def _exit_code(run: Callable[[], int]) -> int:
    """The exit code that a process would have which did only this."""
    try:
        return run()
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except Exception:
        traceback.print_exc()
        return 1


def main() -> None:
    """`python -m layerproof.server.worker SOCKET serve OWNER END [PACKAGE...]` and `... SOCKET run SERVER`; SOCKET and END
    are numbers of open files, OWNER is there to be read in a list of processes.
    """
    faulthandler.enable()  # a crash leaves the Python stack in the log
    number, task, process, *others = sys.argv[1:]
    control: socket.socket | None = socket.socket(fileno=int(number))
    server = int(process)
    if task == "serve":
        server = os.getpid()
        end, *packages = others
        control = serve(control, int(end), packages)
    if control is not None:
        run_jobs(control, server)


if __name__ == "__main__":
    main()

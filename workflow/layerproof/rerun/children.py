"""Child processes of a job: forked, ended with their parent, and watched until they end.

A port, its compiler or its driver may abort, exit, or be killed for the memory that it takes. What a child did is known
from the messages that it sent and from how it ended.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, cast

from layerproof.failures import end_with


@dataclass
class Child:
    """A child process. `messages` receives what it sends; `ended` can be read once it has ended: what it started in turn may
    keep its end of the pipe open.
    """

    process: BaseProcess
    messages: Connection
    ended: IO[bytes]

    def exit_code(self) -> int:
        """Waits until the process has ended. Returns its exit code, or minus the signal that killed it."""
        self.process.join()
        return self.process.exitcode or 0

    def received(self) -> Iterator[Any]:
        """What the process sends, until it has ended."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.messages in wait([self.messages, self.ended.fileno()]):
                yield self.messages.recv()

    def end(self) -> None:
        """Kills the process if it still runs, and closes what belongs to it."""
        self.process.kill()
        self.process.join()
        self.messages.close()
        self.ended.close()


def start(function: Callable[[Connection], None], environment: Mapping[str, str] | None = None) -> Child:
    """Forks a process that calls `function` with the connection to its parent, with these variables set, and then ends with
    exit code 0, whatever threads or devices are left in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_run, args=(function, sender, dict(environment or {}), os.getpid()))
    process.start()
    sender.close()
    return Child(process, receiver, os.fdopen(os.pidfd_open(cast("int", process.pid)), "rb"))


def _run(
    function: Callable[[Connection], None], to_parent: Connection, environment: Mapping[str, str], parent: int
) -> None:
    end_with(parent)
    os.environ.update(environment)
    try:
        function(to_parent)
    except KeyboardInterrupt:  # multiprocessing would end with exit code 1
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

"""Child processes of a job: started, ended with their parent, and watched until they end.

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
from typing import IO, Any, Protocol, cast

from layerproof.failures import end_with


class Child(Protocol):
    """A process that was started for a job. `messages` goes to it and receives what it sends; `ended` can be read once it
    has ended: what it started in turn may keep its end of the pipe open.
    """

    @property
    def messages(self) -> Connection: ...

    @property
    def ended(self) -> HasFileno: ...

    def exit_code(self) -> int | None:
        """Waits until the process has ended. Returns its exit code, or minus the signal that killed it; None if only its
        launcher knows.
        """
        ...

    def end(self) -> None:
        """Kills the process if it still runs, and closes what belongs to it."""
        ...


class HasFileno(Protocol):
    def fileno(self) -> int: ...


Work = Callable[[Connection], None]
"""What a child does, with the connection to its parent."""


@dataclass
class ForkedChild:
    """A child of this process."""

    process: BaseProcess
    messages: Connection
    ended: IO[bytes]

    def exit_code(self) -> int:
        self.process.join()
        return self.process.exitcode or 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.messages.close()
        self.ended.close()


def received(child: Child) -> Iterator[Any]:
    """What a process sends, until it has ended."""
    with contextlib.suppress(EOFError, ConnectionResetError):
        while child.messages in wait([child.messages, child.ended.fileno()]):
            yield child.messages.recv()


def start(work: Work, environment: Mapping[str, str]) -> ForkedChild:
    """Forks a process that does the work with these variables set. It then ends with exit code 0, whatever threads or
    devices are left in it.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    fork = multiprocessing.get_context("fork")
    own, of_child = fork.Pipe()
    process = fork.Process(target=_run, args=(work, of_child, dict(environment), os.getpid()))
    process.start()
    of_child.close()
    return ForkedChild(process, own, os.fdopen(os.pidfd_open(cast("int", process.pid)), "rb"))


def _run(work: Work, to_parent: Connection, environment: Mapping[str, str], parent: int) -> None:
    end_with(parent)
    os.environ.update(environment)
    try:
        work(to_parent)
    except KeyboardInterrupt:  # multiprocessing would end with exit code 1
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

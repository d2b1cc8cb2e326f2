"""A child process is watched until it ends, and ends with its parent. Real processes are started and killed."""

import faulthandler
import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import wait

import psutil
import pytest

from configs import REPOSITORY
from layerproof.rerun import children


@pytest.fixture
def start():
    """Starts children that end with the test."""
    started = []

    def start(function, environment=None):
        started.append(children.start(function, environment or {}))
        return started[-1]

    yield start
    for child in started:
        child.end()


def received(child):
    """All that a child sends until it has ended."""
    messages = []
    while child.messages in wait([child.messages, child.ended.fileno()], timeout=30):
        try:
            messages.append(child.messages.recv())
        except EOFError:
            return messages
    return messages


def test_a_child_sends_messages_and_exits(start):
    def work(to_parent):
        to_parent.send(("pid", os.getpid(), os.getppid()))
        to_parent.send({"x": [1.5] * 10_000})

    child = start(work)
    assert received(child) == [("pid", child.process.pid, os.getpid()), {"x": [1.5] * 10_000}]
    assert child.exit_code() == 0


@pytest.mark.parametrize(
    ("end", "code"),
    [
        (lambda: None, 0),
        (lambda: sys.exit(3), 3),
        (lambda: sys.exit(), 0),
        (lambda: os._exit(4), 4),
        (lambda: (faulthandler.disable(), os.abort()), -signal.SIGABRT),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), -signal.SIGKILL),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), -signal.SIGTERM),
    ],
    ids=["return", "exit", "exit without a code", "exit at once", "abort", "kill", "terminate"],
)
def test_how_a_child_ended_is_known_with_what_it_sent_before(start, end, code):
    def work(to_parent):
        to_parent.send("at work")
        end()

    child = start(work)
    assert received(child) == ["at work"]
    assert child.exit_code() == code


def test_an_exception_is_printed_and_ends_a_child_with_1(start, capfd):
    def work(to_parent):
        raise RuntimeError("a mistake of ours")

    child = start(work)
    assert received(child) == [] and child.exit_code() == 1
    assert "RuntimeError: a mistake of ours" in capfd.readouterr().err


def test_a_child_has_the_variables_that_it_is_given_and_the_parent_has_not(start):
    child = start(
        lambda to_parent: to_parent.send((os.environ["OF_CHILD"], os.environ["PATH"])),
        {"OF_CHILD": "3"},
    )
    assert received(child) == [("3", os.environ["PATH"])]
    assert "OF_CHILD" not in os.environ


def test_a_child_ends_though_threads_are_left_in_it(start):
    child = start(lambda to_parent: threading.Thread(target=time.sleep, args=(600,)).start())
    assert wait([child.ended.fileno()], timeout=30) and child.exit_code() == 0


def test_what_a_child_printed_comes_after_what_its_parent_did_and_only_once(tmp_path):
    script = """
import sys
from layerproof.rerun import children
print("parent")
child = children.start(lambda to_parent: print("child"), {})
child.exit_code()
child.end()
print("parent again")
"""
    assert python(tmp_path, script).stdout == "parent\nchild\nparent again\n"


def test_the_end_of_a_child_is_seen_though_another_process_holds_its_files_open(start):
    def work(to_parent):
        pid = os.fork()
        if pid == 0:
            time.sleep(600)
        to_parent.send(pid)
        os.kill(os.getpid(), signal.SIGKILL)

    child = start(work)
    (orphan,) = received(child)
    try:
        assert child.exit_code() == -signal.SIGKILL and psutil.pid_exists(orphan)
    finally:
        os.kill(orphan, signal.SIGKILL)


def test_a_child_that_is_no_longer_wanted_is_killed(start):
    child = start(lambda to_parent: time.sleep(600))
    assert not wait([child.ended.fileno()], timeout=0)
    process = psutil.Process(child.process.pid)
    child.end()
    assert not process.is_running() and child.messages.closed and child.ended.closed
    child.end()


def python(directory, script):
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_child_ends_with_its_parent(tmp_path, depth):
    """Also one that a child started, as the ranks of a job are: their job runs in a child."""
    script = f"""
import os, signal, time
from layerproof.rerun import children

def work(to_parent, depth={depth}):
    print(os.getpid(), flush=True)
    if depth > 1:
        own = children.start(lambda to_parent: work(to_parent, depth - 1), {{}})
    else:
        to_parent.send(None)
    time.sleep(600)

child = children.start(work, {{}})
time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        stdout=subprocess.PIPE,
        text=True,
    )
    started = [psutil.Process(int(process.stdout.readline())) for _ in range(depth)]
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(started, timeout=10)
    assert not alive

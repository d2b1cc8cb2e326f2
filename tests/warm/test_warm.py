"""A job that starts warm differs in nothing from one whose Python starts anew. Real processes."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs import REPOSITORY
from layerproof import warm
from layerproof.warm.server import PACKAGES
from programs import write_program

CLIENT = REPOSITORY / "workflow/layerproof/warm/client.py"
SERVER = """
import sys
sys.path[:0] = [sys.argv.pop(), sys.argv.pop()]
import server
server.PACKAGES = ("large",)
server.main()
"""
JOB = """
import large, os, sys
print("variables", os.environ.get("OF_THE_JOB"), os.environ.get("BY_THE_IMPORT"))
print("folder", os.getcwd(), "arguments", sys.argv[1:], "parent", os.getppid(), "imported in", large.PROCESS)
sys.stdout.flush()
"""
SLEEP = "import time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"


@pytest.fixture
def start(tmp_path):
    """Starts a server that imports `large`, for jobs of a module `layerproof`."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "work").mkdir()
    (tmp_path / "warm").mkdir()
    servers = []

    def start(large="", job=""):
        (tmp_path / "lib/large.py").write_text(f"import os\nPROCESS = os.getpid()\n{large}")
        (tmp_path / "work/layerproof.py").write_text(JOB + job)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(tmp_path / "warm/socket"))
            listener.listen()
            number = listener.fileno()
            command = [sys.executable, "-P", "-c", SERVER, number, os.getpid(), CLIENT.parent, tmp_path / "lib"]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            servers.append(subprocess.Popen(list(map(str, command)), env=environment, pass_fds=[number]))
        return servers[-1]

    yield start
    for server in servers:
        server.kill()
        server.wait()


def client(tmp_path, *arguments, preexec_fn=None, **variables):
    """A client, with what the process that runs its job printed, on standard output and error."""
    command = [sys.executable, "-IS", CLIENT, tmp_path / "warm", os.getpid(), "-m", "layerproof", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    files = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    folder = tmp_path / "work"
    return subprocess.Popen(
        list(map(str, command)), cwd=folder, env=environment, text=True, preexec_fn=preexec_fn, **files
    )


def finished(process):
    told, errors = process.communicate(timeout=60)
    return process.returncode, told, errors


def test_a_job_has_the_arguments_folder_and_variables_of_its_client(start, tmp_path):
    server = start(large="os.environ['BY_THE_IMPORT'] = 'kept'\n")
    code, told, errors = finished(client(tmp_path, "port", "--job"))
    assert (code, errors) == (0, "")
    assert told.splitlines() == [
        "variables None kept",
        f"folder {tmp_path / 'work'} arguments ['port', '--job'] parent {server.pid} imported in {server.pid}",
    ]


def test_each_job_imports_its_own_code_anew(start, tmp_path):
    start()
    assert finished(client(tmp_path))[0] == 0
    (tmp_path / "work/layerproof.py").write_text("print('changed, and longer than it was')")
    assert "changed" in finished(client(tmp_path))[1]


@pytest.mark.parametrize(
    ("ends", "code", "error"),
    [
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('in one line')", 1, "in one line\n"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("os.kill(os.getpid(), 9)", 137, "The process of this job was killed by signal 9."),
        ("os.abort()", 134, "The process of this job was killed by signal 6."),
    ],
)
def test_a_client_ends_as_its_job_does(start, tmp_path, ends, code, error):
    start(job=f"{ends}\n")
    ended_with, _, errors = finished(client(tmp_path))
    assert ended_with == code and error in errors


@pytest.mark.parametrize("variables", [{"OF_THE_JOB": "1"}, {"OMP_NUM_THREADS": "2"}])
def test_a_job_with_other_variables_starts_its_own_python(start, tmp_path, variables):
    server = start()
    process = client(tmp_path, **variables, PYTHONPATH=str(tmp_path / "lib"))
    _, told, _ = finished(process)
    assert f"imported in {process.pid}" in told and server.poll() is None


@pytest.mark.parametrize(
    "large",
    [
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
        "device = open('/dev/zero')\n",
    ],
    ids=["a thread", "a device"],
)
def test_jobs_start_their_own_python_if_importing_left_what_no_fork_can_use(start, tmp_path, large):
    assert start(large).wait(60) == 0
    process = client(tmp_path, PYTHONPATH=str(tmp_path / "lib"))
    assert f"imported in {process.pid}" in finished(process)[1]


def test_who_kills_the_client_kills_the_job_and_others_go_on(start, tmp_path):
    server = start(job=SLEEP)
    one, other = client(tmp_path), client(tmp_path)
    jobs = [psutil.Process(_pid(process)) for process in (one, other)]
    one.kill()
    jobs[0].wait(10)
    assert jobs[1].is_running() and other.poll() is None
    other.terminate()
    jobs[1].wait(10)
    assert finished(other)[0] == -signal.SIGTERM and server.poll() is None


def test_an_interrupt_ends_client_and_job_without_a_traceback(start, tmp_path):
    start(job=SLEEP)
    process = client(tmp_path, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))
    job = psutil.Process(_pid(process))
    process.send_signal(signal.SIGINT)
    code, _, errors = finished(process)
    assert (code, errors) == (-signal.SIGINT, "")
    job.wait(10)


def test_who_kills_the_server_kills_its_jobs(start, tmp_path):
    server = start(job=SLEEP)
    process = client(tmp_path)
    job = psutil.Process(_pid(process))
    server.kill()
    server.wait()
    assert finished(process)[0] == 137
    with contextlib.suppress(psutil.NoSuchProcess):
        job.wait(10)


def _pid(process):
    lines = [process.stdout.readline() for _ in range(3)]
    return int(lines[-1])


def test_a_client_that_ends_while_the_server_imports_leaves_no_job(start, tmp_path):
    server = start(large="import time\ntime.sleep(2)\n", job=SLEEP)
    process = client(tmp_path)
    time.sleep(0.5)
    process.kill()
    process.wait()
    (tmp_path / "work/layerproof.py").write_text("print('next')")
    assert finished(client(tmp_path))[1] == "next\n"
    psutil.wait_procs(psutil.Process(server.pid).children(), timeout=10)
    assert not psutil.Process(server.pid).children()


def test_a_client_that_says_nothing_does_not_stop_the_others(start, tmp_path):
    start()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(tmp_path / "warm/socket"))
    assert finished(client(tmp_path))[0] == 0


@pytest.mark.slow
def test_the_first_job_with_one_thread_starts_a_server_that_ends_with_snakemake(tmp_path):
    """With the packages themselves, none of which may start a thread or open a device."""
    (tmp_path / "work").mkdir()
    (tmp_path / "warm").mkdir()
    (tmp_path / "work/layerproof.py").write_text("import os, sys\nprint(os.getpid(), 'torch' in sys.modules)")
    with subprocess.Popen(["sleep", "600"]) as snakemake:
        command = [sys.executable, "-IS", CLIENT, tmp_path / "warm", snakemake.pid, "-m", "layerproof"]
        options = {"cwd": tmp_path / "work", "stdout": subprocess.PIPE, "text": True}

        def job(threads):
            environment = os.environ | {"OMP_NUM_THREADS": threads, "USE_TORCH_XLA": "0"}
            process = subprocess.Popen(list(map(str, command)), env=environment, **options)
            own, imported = process.communicate(timeout=120)[0].split()
            return int(own) == process.pid, imported

        assert job("2") == (True, "False")
        assert job("1") == (False, "True"), "the job waits for the server that it starts"
        assert job("1") == (False, "True")
        assert job("2") == (True, "False")
        started = psutil.process_iter(["cmdline"])
        servers = [one for one in started if (one.info["cmdline"] or [])[-1:] == [str(snakemake.pid)]]
        assert len(servers) == 1
        snakemake.kill()
    psutil.wait_procs(servers, timeout=30)
    assert not servers[0].is_running()


def test_the_prefix_of_commands(monkeypatch, tmp_path):
    monkeypatch.delenv(warm.VARIABLE, raising=False)
    prefix = warm.shell_prefix(own_server=True)
    folder = Path(re.search(r"client\.py (\S+)", prefix)[1])
    assert folder.stat().st_mode & 0o777 == 0o700, "no other user may hand over jobs"
    folder.rmdir()
    assert warm.shell_prefix(own_server=False) == ""
    monkeypatch.setenv(warm.VARIABLE, "off")
    assert warm.shell_prefix(own_server=True) == ""
    monkeypatch.setenv(warm.VARIABLE, str(tmp_path / "it's here"))
    prefix = f"set -eu; {warm.shell_prefix(own_server=False)}"
    shown = "import sys; print(sys.argv, file=sys.stderr)"
    (tmp_path / "layerproof.py").write_text(shown)
    for arguments, told, code in (
        (f"-c '{shown}' 'a b'", "['-c', 'a b']\n", 0),
        ("-m layerproof 'a b'", f"['{tmp_path}/layerproof.py', 'a b']\n", 0),
        ("-c 'raise SystemExit(3)'", "", 3),
        ("--version > version", "", 0),
    ):
        done = subprocess.run(
            ["bash", "-c", prefix + f"python {arguments}"], cwd=tmp_path, capture_output=True, text=True
        )
        assert (done.stderr, done.returncode) == (told, code)


def test_only_jobs_of_layerproof_are_handed_over(monkeypatch, tmp_path):
    """A rule of another workflow, which has this one as a module, may use another Python."""
    other = tmp_path / "bin/python"
    write_program(other, 'echo "$@"')
    monkeypatch.setenv("PATH", f"{other.parent}:{os.environ['PATH']}")
    monkeypatch.setenv(warm.VARIABLE, str(tmp_path))
    for command, by_client in (("python script.py", False), ("python", False), ("python -m layerproof port", True)):
        done = subprocess.run(
            ["bash", "-c", f"set -eu; {warm.shell_prefix(own_server=False)}{command}"], capture_output=True, text=True
        )
        assert ("client.py" in done.stdout) == by_client, done


def test_the_packages_are_those_that_jobs_import():
    import importlib.util

    assert all(importlib.util.find_spec(name) for name in PACKAGES)

"""Jobs that share processes are as alone as in processes of their own; real processes are started and killed."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from layerproof.rerun.records import Record
from layerproof.server import client

REPOSITORY = Path(__file__).resolve().parents[2]

# The verbs of these tests, in place of the library's. `golden` and `port` may run a few tasks apart, as the library's do.
VERBS = """
    import argparse, contextlib, functools, os, secrets, signal, sys, time
    from pathlib import Path
    from layerproof.rerun import jobs
    from layerproof.errors import StageError
    from layerproof.files import write_text

    WORD = "hello"
    LIFE = secrets.token_hex(8)  # not the number of the process, which may begin anew under it

    def tell(*words):
        print(WORD, LIFE, os.getcwd(), *words)

    def run(argv, apart=jobs.run_apart):
        verb, *rest = argv
        parser = argparse.ArgumentParser()
        parser.add_argument("rest", nargs="*")
        parser.add_argument("--weights", nargs="*")
        parser.add_argument("--spec")
        rest = parser.parse_args(rest).rest
        if verb in ("golden", "port") and rest:
            apart([task(name) for name in rest], leave_error)
            return 0
        if verb == "error":
            return 1
        if verb == "wait" or rest == ["wait"]:
            print(LIFE, os.getpid(), flush=True)
            time.sleep(60)
        if verb == "die":
            print("last words")
            os.kill(os.getpid(), int(rest[0]))
        if verb == "orphan":
            child = os.fork()
            if child == 0:
                time.sleep(600)
            write_text(Path("child"), str(child))
            os.kill(os.getpid(), signal.SIGKILL)
        if verb == "crash":
            raise RuntimeError("a mistake of ours")
        if verb in ("bisect", "predict"):
            rest = ["torch_xla" in sys.modules]
        if verb == "bisect":
            with contextlib.suppress(RuntimeError):
                import torch_xla
        if verb == "leak":
            os.environ["LEAKED"], sys.argv = "yes", []
            os.chdir("/")
        tell(*rest, os.environ.get("LEAKED", "clean"))
        return 0

    def task(name):
        output = Path(f"{name}.out").absolute()
        job = jobs.Job("port", {"stage": name}, "new", (), (output,), output.with_suffix(".json"))
        return job, functools.partial(work, name, output)

    def work(name, output):
        if name == "waits":
            print("waiting", flush=True)
            time.sleep(60)
        if name == "aborts":
            os.abort()
        if name == "fails":
            raise RuntimeError("no kernel")
        if name == "lacks":
            raise StageError("no such tensor")
        if name.startswith("uses"):
            table()
        write_text(output, f"made by {LIFE}")

    @functools.cache
    def table():
        return 1

    def leave_error(job, error):
        write_text(job.outputs[0], f"{type(error).__name__}: {error}")
"""

INSTEAD = """
    def run(*arguments):
        import verbs
        return verbs.run(*arguments)
"""


class Shared:
    """Processes that jobs share, until `owner` ends."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "verbs.py").write_text(textwrap.dedent(VERBS))
        # The library as it is, but for its verbs.
        shutil.copytree(REPOSITORY / "workflow/layerproof", directory / "layerproof")
        (directory / "layerproof/cli.py").write_text(textwrap.dedent(INSTEAD))
        for source in directory.rglob("*.py"):
            os.utime(source, (1e9, 1e9))
        self.owner = subprocess.Popen(["sleep", "600"])

    def prepare(self) -> None:
        """As the workflow does where a port will run."""
        assert self._start("layerproof.server.client").wait(60) == 0

    def start(self, *argv: str, **environment: str) -> subprocess.Popen:
        return self._start("layerproof", *argv, **environment)

    def _start(self, module: str, *argv: str, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", module, *argv],
            cwd=self.directory,
            env=os.environ
            | {"PYTHONPATH": str(self.directory)}
            | {"LAYERPROOF_WORKERS": str(self.directory / f"shared-{self.owner.pid}")}
            | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, *argv: str, **environment: str) -> tuple[int, str, str]:
        process = self.start(*argv, **environment)
        output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def life(self, *argv: str, **environment: str) -> str:
        """In which life of a process a job ran that tells it."""
        code, output, errors = self.run(*argv, **environment)
        assert code == 0, errors
        return output.split()[1]

    def processes(self) -> list[psutil.Process]:
        """Servers of this owner, each with its runners, which may have its command line."""
        commands = {process: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline", "ppid"])}
        ours = [process for process, command in commands.items() if {"serve", str(self.owner.pid)} <= set(command)]
        numbers = {process.pid for process in ours}
        servers = [process for process in ours if process.info["ppid"] not in numbers]
        return [found for server in servers for found in (server, *server.children())]


@pytest.fixture
def shared(tmp_path):
    shared = Shared(tmp_path)
    yield shared
    processes = shared.processes()
    shared.owner.kill()
    shared.owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive, "processes outlive the one that they belong to"
    assert not list(tmp_path.glob("shared-*")), "or leave something"


def test_jobs_of_a_side_share_a_process_and_those_of_others_do_not(shared):
    golden = {shared.life("golden"), shared.life("weights"), shared.life("golden")}
    other = {shared.life("compare"), shared.life("report")}
    assert len(golden) == len(other) == 1 and golden != other
    assert {shared.life("golden", CUDA_VISIBLE_DEVICES="1")} != golden
    assert {shared.life("golden", SHLVL="7")} == golden, "as in a job of several stages"


@pytest.fixture
def weights(shared):
    """Arguments of jobs of stages, by name."""

    def write(name, *tensors):
        file = shared.directory / f"{name}.json"
        entries = {tensor: {"parameter": tensor, "dtype": "BF16", "shape": shape} for tensor, shape in tensors}
        file.write_text(json.dumps({"stage": name, "tensors": entries}))
        return str(file)

    def of_layer(number, hidden=64):
        return (f"layers.{number}.q.weight", [64, hidden]), (f"layers.{number}.experts.{number}.up.weight", [96, 64])

    layers = of_layer(3), of_layer(4), of_layer(5, hidden=32)
    files = {"third": layers[0], "fourth": layers[1], "wide": layers[2], "norm": [("norm.weight", [64])]}
    return {name: ("--weights", write(name, *tensors)) for name, tensors in files.items()}


def test_ports_share_a_process_by_the_kind_of_their_stage(shared, weights):
    lives = [shared.life(verb, *weights[name]) for verb in ("port", "force") for name in ("third", "fourth")]
    assert len(set(lives)) == 1
    assert client._kind(["port", *weights["third"]]) == client._kind(["port", *weights["fourth"]])
    kinds = {client._kind(["port", *weights[name]]) for name in ("third", "wide", "norm")}
    assert len(kinds) == 3 and {len(kind) for kind in kinds} == {client.DIGITS}
    assert shared.life("port", *weights["norm"]) != lives[0]


def test_jobs_that_look_for_known_mistakes_share_a_process_by_kind_too(shared, weights):
    third, fourth, norm, port = (
        shared.life(verb, *weights[name])
        for verb, name in (("diagnose", "third"), ("diagnose", "fourth"), ("diagnose", "norm"), ("port", "third"))
    )
    assert third == fourth and len({third, norm, port}) == 3


@pytest.mark.parametrize(
    ("device", "platform", "ended"),
    [
        *(("NEURON", "CPU", True), ("auto", "NEURON", True), ("auto", "CPU", False), ("CPU", "NEURON", False)),
        *(("auto", "", False), ("auto", "installed", True)),
    ],
)
def test_an_idle_port_that_may_hold_the_device_is_ended_before_one_of_another_kind_begins(
    shared, weights, device, platform, ended
):
    more = "--spec", json.dumps({"device": device})
    if platform == "installed":
        (shared.directory / "libneuronxla.py").touch()
        platform = ""
    waiting = shared.start("force", "wait", *weights["norm"], *more, PJRT_DEVICE=platform)
    waiting.stdout.readline()
    shared.life("port", *weights["third"], *more, PJRT_DEVICE=platform)
    _, busy, idle = shared.processes()
    shared.life("port", *weights["wide"], *more, PJRT_DEVICE=platform)
    if ended:
        idle.wait(10)
    assert busy.is_running() and idle.is_running() != ended and len(shared.processes()) == 4 - ended
    waiting.kill()


def test_what_a_port_left_in_memory_counts_for_the_jobs_after_it(shared, weights):
    """A table that the first one made, say; but not for those before it, nor for those of another side."""

    def ran_table(verb, name):
        assert shared.run(verb, name, *weights["third"])[0] == 0
        return any("::table" in entry for entry in Record.read(shared.directory / f"{name}.json").code)

    assert [ran_table("port", name) for name in ("first", "uses", "second")] == [False, True, True]
    assert [ran_table("golden", name) for name in ("uses too", "third")] == [True, False]


def test_a_process_that_cannot_start_takes_no_other_job_with_it(shared):
    """As one that begins while a file of the library is half edited."""
    source = shared.directory / "layerproof/cli.py"
    waiting = shared.start("wait")
    waiting.stdout.readline()
    whole = source.read_text()
    source.write_text("def run(")
    assert shared.run("compare")[0] == 1
    source.write_text(whole)
    assert waiting.poll() is None and shared.life("compare")
    waiting.kill()


def test_what_a_job_started_ends_with_it(shared):
    """And before that its end is seen, though what it started holds all its files open."""
    code, _, errors = shared.run("orphan")
    assert code == 1 and "killed by SIGKILL" in errors
    child = int((shared.directory / "child").read_text())
    _, alive = psutil.wait_procs([psutil.Process(child)] if psutil.pid_exists(child) else [], timeout=10)
    assert not alive


def test_a_job_prints_to_its_own_log_and_works_in_its_own_directory(shared):
    first, second = shared.run("compare", "first"), shared.run("compare", "second")
    for (code, output, errors), word in ((first, "first"), (second, "second")):
        hello, _, directory, *rest = output.split()
        assert (code, hello, directory, rest, errors) == (0, "hello", str(shared.directory), [word, "clean"], "")


@pytest.mark.parametrize(
    ("verb", "device", "prepared"),
    [("bisect", "CPU", "True"), ("bisect", "NEURON", "False"), ("predict", "CPU", "False")],
)
def test_only_ports_on_the_host_start_with_packages(shared, weights, verb, device, prepared):
    """For what is imported may hold a device, and then only one process can use it."""
    first, second = (
        shared.run(verb, "--spec", json.dumps({"device": device}), *weights[kind])[1] for kind in ("third", "norm")
    )
    assert first.split()[-2] == second.split()[-2] == prepared


def test_packages_of_ports_on_the_host_are_imported_before_the_first_one_if_that_is_asked_for(shared, weights):
    shared.prepare()
    (server,) = shared.processes()
    deadline = time.monotonic() + 60
    while not any("_XLAC" in mapped.path for mapped in server.memory_maps()) and time.monotonic() < deadline:
        time.sleep(0.1)
    spec = "--spec", json.dumps({"device": "CPU"})
    assert shared.run("bisect", *spec, *weights["norm"])[1].split()[-2] == "True"
    assert len(shared.processes()) == 2 and server in shared.processes(), "a runner that this server forked"
    shared.prepare()
    assert len(shared.processes()) == 2


def test_a_server_that_still_imports_ends_with_snakemake(shared):
    (shared.directory / "torch_xla.py").write_text("import time; time.sleep(2)")
    shared.prepare()
    assert shared.processes()


def test_a_server_that_still_starts_ends_with_snakemake(shared):
    """Which has then ended before the server could look for it."""
    (shared.directory / "sitecustomize.py").write_text("import sys, time; time.sleep('serve' in sys.orig_argv)")
    shared.prepare()
    assert shared.processes()


@pytest.mark.parametrize("text", ["raise RuntimeError('no such device')", "import os; os.abort()"])
def test_a_package_that_cannot_be_imported_is_left_to_the_job(shared, weights, text):
    """Also if it ends the process that imports it: then the job is one of its own, and what that process said is kept."""
    (shared.directory / "torch_xla.py").write_text(text)
    shared.prepare()
    spec = "--spec", json.dumps({"device": "CPU"})
    waiting = shared.start("force", "wait", *spec, *weights["wide"])
    waiting.stdout.readline()
    for kind in ("third", "norm"):
        code, output, _ = shared.run("bisect", *spec, *weights[kind])
        assert (code, output.split()[-2:-1]) == ((-signal.SIGABRT, []) if "abort" in text else (0, ["False"]))
    assert waiting.poll() is None
    waiting.kill()
    if "abort" in text:
        (folder,) = shared.directory.glob("shared-*")
        assert "torch_xla.py" in (folder / "log").read_text()
        shutil.rmtree(folder)


def test_packages_are_not_imported_while_another_job_runs(shared, weights):
    """Or its end would not be heard."""
    waiting = shared.start("force", "wait", "--spec", json.dumps({"device": "NEURON"}), *weights["third"])
    waiting.stdout.readline()
    spec = "--spec", json.dumps({"device": "CPU"})
    assert shared.run("bisect", *spec, *weights["norm"])[1].split()[-2] == "False"
    waiting.kill()


def test_jobs_at_the_same_time_do_not_share(shared):
    waiting = shared.start("wait")
    life, _ = waiting.stdout.readline().split()
    assert shared.life("compare") != life
    waiting.kill()


@pytest.mark.parametrize("verb", ["error", "crash"])
def test_after_an_error_the_next_job_starts_afresh(shared, verb):
    before = shared.life("leak")
    assert shared.life("compare") == before
    code, _, errors = shared.run(verb)
    assert code == 1 and ("RuntimeError: a mistake of ours" in errors) == (verb == "crash")
    code, output, _ = shared.run("compare")
    assert code == 0 and output.split()[-1] == "clean"


def test_an_edit_of_what_is_loaded_is_seen(shared):
    assert shared.run("compare")[1].startswith("hello")
    source = shared.directory / "verbs.py"
    source.write_text(source.read_text().replace('WORD = "hello"', 'WORD = "goodbye"'))
    assert shared.run("compare")[1].startswith("goodbye")
    # Written while a process was there that may have loaded it or not.
    assert shared.run("compare")[1].startswith("goodbye")


@pytest.mark.parametrize("name", [signal.SIGSEGV, signal.SIGKILL])
def test_a_process_that_dies_takes_its_own_job_and_no_other(shared, name):
    shared.life("compare")
    code, output, errors = shared.run("die", str(int(name)))
    assert code == 1 and output == "last words\n" and f"killed by {name.name}" in errors
    assert shared.life("compare")


def test_stages_whose_process_dies_leave_an_error(shared):
    code, _, errors = shared.run("golden", "first", "aborts", "third")
    assert code == 0, errors
    assert (shared.directory / "first.out").read_text().startswith("made by")
    assert "StageError: The process of the job was killed by SIGABRT" in (shared.directory / "aborts.out").read_text()
    assert (shared.directory / "third.out").read_text().startswith("StageMissing: no input, because an earlier stage")
    assert "SIGABRT" in Record.read(shared.directory / "aborts.json").error
    assert "Fatal Python error: Aborted" in errors  # and where


def test_a_stage_that_fails_leaves_an_error_and_the_next_job_starts_afresh(shared):
    shared.run("golden", "first", "fails", "third")
    assert "RuntimeError at verbs.py:" in (shared.directory / "fails.out").read_text()
    shared.run("golden", "fourth")
    made_by = [(shared.directory / f"{name}.out").read_text() for name in ("first", "third", "fourth")]
    assert made_by[0] == made_by[1] != made_by[2]


def test_a_stage_that_lacks_something_costs_no_fresh_start(shared):
    shared.run("golden", "first", "lacks")
    shared.run("golden", "second")
    assert (shared.directory / "lacks.out").read_text() == "StageError: no such tensor"
    assert (shared.directory / "first.out").read_text() == (shared.directory / "second.out").read_text()


def test_a_job_that_is_killed_stops(shared):
    client = shared.start("wait")
    _, process = client.stdout.readline().split()
    client.kill()
    _, alive = psutil.wait_procs([psutil.Process(int(process))], timeout=10)
    assert not alive and shared.life("compare")


def test_a_killed_server_ends_its_jobs_and_is_replaced(shared):
    client = shared.start("wait")
    client.stdout.readline()
    server, runner = shared.processes()
    server.kill()
    _, errors = client.communicate(timeout=60)
    assert client.returncode == 1 and "killed by SIGKILL" in errors
    _, alive = psutil.wait_procs([runner], timeout=10)
    assert not alive and shared.life("compare")


def test_a_job_that_waits_for_its_server_ends_with_snakemake(shared, weights):
    """It does not run by itself beside those of the next call."""
    (shared.directory / "torch_xla.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(3)")
    spec = "--spec", json.dumps({"device": "CPU"})
    waiting = [shared.start("port", name, *spec, *weights["third"]) for name in ("one", "two")]
    log = shared.directory / f"shared-{shared.owner.pid}/log"
    while not (log.exists() and "importing" in log.read_text()):
        assert all(one.poll() is None for one in waiting)
    shared.owner.kill()
    shared.owner.wait()
    assert [one.wait(60) for one in waiting] == [1, 1]
    assert not (shared.directory / "two.out").exists()


def test_a_stage_whose_snakemake_is_gone_leaves_no_error(shared):
    waiting = shared.start("golden", "waits")
    while "waiting" not in waiting.stdout.readline():
        pass
    shared.owner.kill()
    shared.owner.wait()
    waiting.communicate(timeout=60)
    assert waiting.returncode == 1 and not (shared.directory / "waits.out").exists()


def test_a_record_states_the_peak_of_its_own_job(shared):
    """Not of a larger one that ran in the same process before."""
    source = shared.directory / "verbs.py"
    source.write_text(
        source.read_text().replace(
            '    if name == "fails":',
            '    if name == "large":\n        bytearray(200_000_000)\n    if name == "fails":',
        )
    )
    os.utime(source, (1e9, 1e9))
    shared.run("golden", "large", "small")
    shared.run("golden", "another")
    large, small, another = (
        json.loads((shared.directory / f"{name}.json").read_text())["run"]["peak_rss_bytes"]
        for name in ("large", "small", "another")
    )
    assert large > 200e6 and max(small, another) < large - 150e6


@pytest.mark.parametrize("folder", ["x" * 100 + "-1", "another-99999999"], ids=["name too long", "no such process"])
def test_where_no_server_can_be_a_job_runs_by_itself(shared, folder):
    code, output, _ = shared.run("compare", LAYERPROOF_WORKERS=str(shared.directory / folder))
    assert code == 0 and "does not share a process" in output and "hello" in output


def test_a_client_imports_nothing_that_takes_time(shared):
    shared.life("compare", PYTHONPROFILEIMPORTTIME="1")
    code, _, errors = shared.run("compare", PYTHONPROFILEIMPORTTIME="1")
    imported = {line.rsplit("|", 1)[1].strip() for line in errors.splitlines() if "|" in line}
    assert code == 0 and "layerproof.server.client" in imported
    assert not imported & {
        "layerproof.server.worker",
        "layerproof.rerun.jobs",
        "argparse",
        "subprocess",
        "ast",
        "numpy",
    }


def test_command_lines_run_in_turn_until_one_fails(shared):
    """Each as the job that it would be, with a log of its own."""
    jobs = {"one": "compare 'a b'", "log of two": "golden", "three": "compare", "four": "error", "five": "compare"}
    lines = [f"python -m layerproof {words} > {shlex.quote(name)} 2>&1" for name, words in jobs.items()]
    assert shared.run("in-turn", *lines) == (1, "", "")
    one, two, three = ((shared.directory / name).read_text().split() for name in list(jobs)[:3])
    assert one[3:] == ["a", "b", "clean"] and one[1] == three[1] != two[1], "by the process of its own side"
    assert not (shared.directory / "five").exists()


def test_command_lines_run_in_turn_where_no_server_can_be(shared):
    """Each once, as a process of its own: what one leaves in memory is not for the next."""
    names = [f"stage{number}" for number in range(4)]
    lines = [f"python -m layerproof port {name} > {name}.log 2>&1" for name in names]
    folder = str(shared.directory / ("x" * 100 + f"-{shared.owner.pid}"))
    assert shared.run("in-turn", *lines, LAYERPROOF_WORKERS=folder)[0] == 0
    assert all("runs because it has not run before" in (shared.directory / f"{name}.log").read_text() for name in names)
    assert len({(shared.directory / f"{name}.out").read_text() for name in names}) == len(names)


def test_command_lines_run_in_turn_by_hand(tmp_path):
    lines = ["echo one > one", "echo two > two && exit 3", "echo three > three"]
    outcome = subprocess.run(
        [sys.executable, "-m", "layerproof", "in-turn", *lines],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
    )
    assert outcome.returncode == 3 and {path.name for path in tmp_path.iterdir()} == {"one", "two"}


def test_a_job_whose_process_dies_says_so_in_its_own_log(shared):
    verbs = ("compare", "golden aborts", "die 9")
    lines = [f"python -m layerproof {words} > {words.split()[0]}.log 2>&1" for words in verbs]
    assert shared.run("in-turn", *lines) == (1, "", "")
    assert "killed by SIGKILL" in (shared.directory / "die.log").read_text()
    assert "SIGKILL" not in (shared.directory / "compare.log").read_text()
    command = Record.read(shared.directory / "aborts.json").run["command"]
    assert command == "python -m layerproof golden aborts", "that of the stage alone"

"""A job runs when it must and only then, and leaves a record or none."""

import contextlib
import dataclasses
import importlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from configs import REPOSITORY
from layerproof import known_errors
from layerproof.errors import StageError, StageMissing, UserError
from layerproof.failures import LONGEST_REASON
from layerproof.files import sha256, write_text
from layerproof.rerun import jobs
from layerproof.rerun.job import RECORDS, Job
from layerproof.rerun.jobs import Task
from layerproof.rerun.planner import Planner
from layerproof.rerun.recorder import cached
from layerproof.rerun.records import Record, describe_output

HEAVY = {"torch", "transformers", "h5py", "numpy", "numba", "matplotlib", "safetensors", "jinja2", "pydantic"}


def job_of(stage="layer_000", **changes):
    fields = {
        "settings": {},
        "arguments": {},
        "versions": {},
        "token": "new",
        "why": "it has not run before",
        "plan": "new",
    }
    return Job(f"port/{stage}", **fields | changes)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch, caplog):
    """Where records are written, as relative to the current directory."""
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO)


@pytest.fixture
def task(tmp_path):
    """A task with no work yet."""
    (tmp_path / "input").write_text("input")
    job = job_of(settings={"compare": {"limit": 1.5}}, arguments={"fed_by": []}, versions={"torch": "2.9.0"})
    return Task(job, inputs=(tmp_path / "input",), outputs=(tmp_path / "results/output",), work=lambda: None)


class Work:
    """Writes the output and counts its calls; raises if it is told to."""

    def __init__(self, task, error=None):
        self.task, self.error, self.calls = task, error, 0

    def __call__(self):
        self.calls += 1
        if self.error:
            raise self.error
        for path in self.task.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("output")
        return {"fact": self.calls}


def run(task, work, leave_error=None, **options):
    """Runs the task with this work."""
    jobs.run(dataclasses.replace(task, work=work), leave_error, **options)
    return work


def leave_error(task, error):
    task.outputs[0].parent.mkdir(parents=True, exist_ok=True)
    task.outputs[0].write_text(f"error: {error}")


def identity(path):
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_a_job_is_read_as_it_was_written(tmp_path):
    settings = {"model": {"checkpoint": "models/small"}, "compare": {"limit": 1.5}}
    job = job_of(settings=settings, arguments={"fed_by": ["embed"]}, versions={"torch": "2.9.0"})
    job.write(tmp_path / "jobs/port/layer_000.json")
    read = Job.read(tmp_path / "jobs/port/layer_000.json")
    assert read == job
    assert (read.stage, read.record) == ("layer_000", Path("results/records/port/layer_000.json"))
    assert (read.config.compare.limit, read.checkpoint) == (1.5, tmp_path / "models/small")
    with pytest.raises(AttributeError, match=r"Compare\.taps is not among this job's settings"):
        read.config.compare.taps  # noqa: B018 (reading it is what is tested)
    assert dataclasses.replace(job, name="chain/all/norm").stage == "norm"
    assert dataclasses.replace(job, name="report").record == Path("results/records/report.json")


def test_first_run_leaves_output_and_record(task, tmp_path, caplog):
    run(task, Work(task))
    assert task.job.record == RECORDS / "port/layer_000.json"
    record = Record.read(tmp_path / "results/records/port/layer_000.json")
    assert (record.job, record.error) == (task.job, None)
    assert set(record.inputs) == {str(task.inputs[0])} and set(record.outputs) == {str(task.outputs[0])}
    assert record.run["fact"] == 1 and record.run["wall_s"] >= 0 and record.run["packages"]["numpy"]
    assert "tests/rerun/test_jobs.py::Work.__call__" in record.code
    begin, end = caplog.messages
    assert begin == "port/layer_000: runs because it has not run before"
    assert re.fullmatch(r"port/layer_000: done after \d+\.\d s, peak memory [\d.]+ [kMG]B", end)


def test_current_job_does_nothing(task, caplog):
    run(task, Work(task))
    before = identity(task.outputs[0]), identity(task.job.record)
    caplog.clear()
    assert run(task, Work(task)).calls == 0
    assert (identity(task.outputs[0]), identity(task.job.record)) == before
    assert caplog.messages == ["port/layer_000: up to date"]


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ({"settings": {"compare": {"limit": 2.0}}}, "its settings changed (compare.limit)"),
        ({"arguments": {"fed_by": ["embed"]}}, "its settings changed (fed_by)"),
        ({"versions": {"torch": "2.10.0"}}, "its settings changed (torch)"),
        ({"token": "other", "why": "a rerun was requested"}, "a rerun was requested"),
    ],
)
def test_job_that_was_asked_for_differently_runs(task, caplog, field, why):
    run(task, Work(task))
    caplog.clear()
    other = dataclasses.replace(task, job=dataclasses.replace(task.job, **field))
    assert run(other, Work(task)).calls == 1
    assert caplog.messages[0] == f"port/layer_000: runs because {why}"
    assert Record.read(task.job.record).job == other.job
    assert run(other, Work(task)).calls == 0


def test_a_job_that_was_planned_again_decides_by_content(task):
    """Snakemake starts it, because its job file is another one."""
    run(task, Work(task))
    planned = dataclasses.replace(
        task, job=dataclasses.replace(task.job, plan="other", why="its inputs changed (input)")
    )
    assert run(planned, Work(task)).calls == 0
    task.inputs[0].write_text("changed")
    assert run(planned, Work(task)).calls == 1


def test_a_job_that_is_run_by_hand_runs_in_any_case(task, caplog):
    run(task, Work(task))
    caplog.clear()
    assert run(task, Work(task), force=True).calls == 1
    assert caplog.messages[0] == "port/layer_000: runs because it was run by hand"
    assert run(task, Work(task)).calls == 0


def test_a_long_job_says_that_it_still_runs(task, caplog, monkeypatch):
    monkeypatch.setattr(jobs, "HEARTBEAT_S", 0.02)
    run(task, lambda: time.sleep(0.2))
    assert caplog.messages[1] == "port/layer_000: still running after 0 s"
    assert "done after" in caplog.messages[-1]
    told = len(caplog.messages)
    time.sleep(0.1)
    assert len(caplog.messages) == told


def test_changed_input_is_recorded_as_it_was_before_the_work(task):
    class Changing(Work):
        def __call__(self):
            self.task.inputs[0].write_text("changed during the work")
            return super().__call__()

    run(task, Changing(task))
    assert run(task, Work(task)).calls == 1, "what was written while the job read it is a change"


def test_damaged_output_runs_again(task):
    run(task, Work(task))
    task.outputs[0].write_text("autput")
    run(task, Work(task))
    assert task.outputs[0].read_text() == "output"


def test_error_becomes_a_result_and_is_tried_again(task, capsys, caplog):
    run(task, Work(task, StageError("no such head")), leave_error)
    assert task.outputs[0].read_text() == "error: no such head"
    assert "port/layer_000: ended as an error after" in caplog.messages[-1]
    record = Record.read(task.job.record)
    assert record.error == "no such head"
    assert set(record.outputs) == {str(task.outputs[0])}
    planner = Planner(RECORDS, RECORDS / "jobs", lambda name: False)
    assert planner.why(task.job) == ("it failed before", True)
    captured = capsys.readouterr()
    assert "error: no such head" in captured.err and "Traceback" not in captured.err
    work = run(task, Work(task), leave_error)
    assert work.calls == 1 and task.outputs[0].read_text() == "output"
    assert Record.read(task.job.record).error is None


def test_where_no_error_can_be_left_an_exception_leaves_no_new_record(task):
    run(task, Work(task))
    before = Record.read(task.job.record)
    task.inputs[0].write_text("changed")
    with pytest.raises(StageError, match="no such head"):
        run(task, Work(task, StageError("no such head")))
    assert Record.read(task.job.record) in (None, before)
    assert run(task, Work(task)).calls == 1


def test_an_interruption_is_no_result(task):
    with pytest.raises(KeyboardInterrupt):
        run(task, Work(task, KeyboardInterrupt()), leave_error)
    assert not task.job.record.exists() and not task.outputs[0].exists()


def seen_error(task, error):
    errors = []

    def keep(of, error):
        assert of.job == task.job
        errors.append(error)
        leave_error(of, error)

    run(task, error if callable(error) else Work(task, error), keep)
    return errors[0]


def test_kind_of_error_is_kept(task):
    missing = StageMissing("no input")
    assert seen_error(task, missing) is missing
    user = seen_error(task, UserError("config.yaml: wrong"))
    assert type(user) is StageError and str(user) == "config.yaml: wrong"


def test_error_names_file_and_line_of_the_users_code(task, tmp_path, monkeypatch, capsys):
    """Not the line in an installed package that raised it."""
    (tmp_path / "user_port.py").write_text(
        textwrap.dedent("""
            import yaml

            def build():
                return yaml.safe_load("[")
        """)
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import user_port

    error = seen_error(task, user_port.build)
    assert str(error).startswith("ParserError at user_port.py:5: while parsing")
    assert "\n" not in str(error)
    assert "Traceback" in capsys.readouterr().err


def test_error_without_a_message(task):
    assert str(seen_error(task, IndexError())).endswith(": no message")


def test_what_a_process_does_once_belongs_to_the_code_of_each_job(task, tmp_path, monkeypatch):
    """Also what no other code names, such as a method that is found by its name."""
    (tmp_path / "set_up.py").write_text(
        textwrap.dedent("""
            class Device:
                def open(self):
                    return "opened"

            CALLS = []

            def start():
                CALLS.append("start")
                return getattr(Device(), "op" + "en")()
        """)
    )
    os.utime(tmp_path / "set_up.py", (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    import set_up

    start = cached(set_up.start)
    other = dataclasses.replace(task, job=job_of("layer_001"), outputs=(tmp_path / "results/other",))
    for one in (task, other):
        run(one, lambda one=one: write_text(one.outputs[0], start()))
        assert any(entry.endswith("set_up.py::Device.open") for entry in Record.read(one.job.record).code)
    assert set_up.CALLS == ["start"] and other.outputs[0].read_text() == "opened"


@pytest.mark.parametrize("independent", [True, False])
def test_what_a_job_left_in_memory_counts_for_those_after_it(tmp_path, monkeypatch, independent):
    """A table that the first one made, say; but not for those before it, nor where each job starts from nothing."""
    monkeypatch.setattr(jobs, "_ran", {})
    monkeypatch.setattr(jobs, "_kept", {})
    name = f"tables_{independent}"
    (tmp_path / f"{name}.py").write_text("import functools\n\n@functools.cache\ndef table():\n    return 1\n")
    os.utime(tmp_path / f"{name}.py", (1e9, 1e9))
    monkeypatch.syspath_prepend(str(tmp_path))
    tables = importlib.import_module(name)

    def task_of(stage, use):
        output = tmp_path / f"{stage}.out"

        def work():
            use()
            write_text(output, "made")

        return Task(job_of(stage), (), (output,), work)

    tasks = [task_of("layer_000", dict), task_of("layer_001", tables.table), task_of("layer_002", dict)]
    jobs.run_all(tasks, independent=independent)
    ran = [any("::table" in entry for entry in Record.read(task.job.record).code) for task in tasks]
    assert ran == [False, True, independent]


def test_what_a_job_prints_goes_into_its_log(tmp_path):
    """Also what a program prints that it starts."""
    log = tmp_path / "logs/job.log"
    for append, expected in ((False, "first\n"), (True, "first\nsecond\n"), (False, "third\n")):
        with jobs.printing_to(log, append):
            os.system(f"echo {expected.split()[-1]} >&2")
        assert log.read_text() == expected
    with jobs.printing_to(None):
        os.system("echo nowhere")
    assert log.read_text() == "third\n"


def start_python(directory, *arguments, **options):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        text=True,
        **options,
    )


def python(directory, *arguments):
    """Runs Python with the library. Not with pipes, which what it leaves behind would keep open."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = start_python(directory, *arguments, stdout=output, stderr=errors)
        try:
            code = process.wait(timeout=30)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read(), errors.read())


KILLED = """
import os, signal, sys
from pathlib import Path
from layerproof.rerun import jobs
from layerproof.rerun.job import Job

def work():
    output.write_text(sys.argv[1])
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

root = Path.cwd()
output = root / "results/output"
jobs.run(jobs.Task(Job.read(Path("job.json")), (root / "input",), (output,), work))
"""


def test_job_killed_between_work_and_record_runs_again(task, tmp_path):
    (tmp_path / "script.py").write_text(KILLED)
    task.job.write(tmp_path / "job.json")
    run(task, Work(task))
    task.inputs[0].write_text("changed")

    def call(text):
        return python(tmp_path, "script.py", text).returncode

    assert call("killed") == -signal.SIGKILL
    assert task.outputs[0].read_text() == "killed"
    task.inputs[0].write_text("input")  # even as it was: the record of then says nothing of the output now
    assert call("whole") == 0
    assert task.outputs[0].read_text() == "whole"
    assert call("not again") == 0
    assert task.outputs[0].read_text() == "whole"


INPUT = "layer_000.json"
VERBS = [
    ("weights", (), {}),
    ("tokens", ("files",), {}),
    ("golden", ("weights", "tokens", "config"), {"with_taps": True}),
    ("import-golden", ("exported", "weights", "tokens", "config"), {"with_taps": True}),
    ("port", ("weights", "tokens", "config"), {"fed_by": []}),
    ("chain", ("weights", "tokens", "config"), {}),
    ("captured", ("captured", "tokens"), {}),
    ("compare", ("golden", "noise", "port", "tokens"), {}),
    ("compare-chain", ("golden", "port", "comparisons", "tokens"), {"chain": "0", "stages": ["layer_000"]}),
    ("bisect", ("golden", "noise", "weights", "tokens", "config"), {"stages": ["layer_000"], "left_out": []}),
    ("teacher-force", ("comparison", "golden", "weights", "tokens", "config"), {"fed_by": []}),
    (
        "diagnose",
        ("comparison", "golden", "noise", "port", "forced", "weights", "tokens", "config"),
        {"fed_by": [], "related": [], "sibling": [], "sibling_fed_by": []},
    ),
    ("plot-stage", ("comparison",), {}),
    ("predict", ("weights", "tokens", "config"), {}),
    ("preflight", ("prediction",), {}),
    ("audit", ("weights", "golden", "port", "prediction"), {}),
    ("prune", ("comparison", "diagnosis", "golden", "port"), {}),
    ("verdicts", ("comparisons",), {}),
    ("report", ("templates", "glossary", "causes", "verdicts", "unused", "audit", "comparisons"), {}),
]


@pytest.mark.parametrize(("verb", "files", "arguments"), VERBS, ids=[verb for verb, *_ in VERBS])
def test_current_job_imports_nothing_heavy(tmp_path, verb, files, arguments):
    (tmp_path / INPUT).write_text('{"status": "fail"}')
    outputs = ["layer_000.h5"]
    if verb in ("golden", "import-golden"):
        outputs.append("noise/layer_000.h5")
    for output in outputs:
        (tmp_path / output).parent.mkdir(exist_ok=True)
        (tmp_path / output).write_text("output")
    settings = {"model": {"checkpoint": "model"}, "parallel": {"launcher": "fork", "tp": 1, "cp": 1, "ep": 1}}
    job = job_of(arguments=arguments, settings=settings)
    job.write(tmp_path / "job.json")
    record = Record(
        job,
        inputs={INPUT: sha256(tmp_path / INPUT)} if verb not in ("weights",) else {},
        outputs={output: describe_output(Path(output)) for output in outputs},
        code={},
        error=None,
    )
    record.write(job.record)
    flags = [part for name in files for part in (f"--{name}", INPUT)]
    side = ["--side", "port"] if verb == "preflight" else []
    outcome = python(
        tmp_path, "-X", "importtime", "-m", "layerproof", verb, *outputs, *flags, *side, "--job", "job.json"
    )
    assert outcome.returncode == 0 and "port/layer_000: up to date" in outcome.stderr, outcome.stderr[-2000:]
    assert Record.read(job.record) == record
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in outcome.stderr.splitlines() if "|" in line}
    assert "layerproof" in imported and not imported & HEAVY


def test_a_command_runs_several_jobs_each_with_its_files_and_its_log(tmp_path):
    """Those of them that must run. The files may come in any order."""
    stages = ["layer_000", "layer_001", "layer_002"]
    for stage in stages:
        job_of(stage).write(tmp_path / f"jobs/{stage}.json")
        write_text(tmp_path / f"compare/{stage}.json", '{"status": "fail"}')
        write_text(tmp_path / f"diagnosis/{stage}.json", "{}")

    def files(pattern, names=stages):
        return [pattern.format(stage=stage) for stage in names]

    def call():
        return python(
            tmp_path,
            *("-m", "layerproof", "prune", *files("trimmed/{stage}.json", reversed(stages))),
            *("--comparison", *files("compare/{stage}.json"), "--diagnosis", *files("diagnosis/{stage}.json")),
            *("--golden", *files("compare/{stage}.json"), "--port", *files("compare/{stage}.json")),
            *("--job", *files("jobs/{stage}.json"), "--log", *files("logs/{stage}.log")),
        )

    outcome = call()
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
    write_text(tmp_path / "diagnosis/layer_001.json", "{ }")
    assert call().returncode == 0
    for stage in stages:
        (first, *_) = (tmp_path / f"logs/{stage}.log").read_text().splitlines()
        changed = "runs because its inputs changed (diagnosis/layer_001.json)"
        assert first.endswith(f"port/{stage}: {changed if stage == 'layer_001' else 'up to date'}")
        assert set(Record.read(job_of(stage).record).outputs) == {f"trimmed/{stage}.json"}


def test_a_job_file_that_is_lost_or_broken_is_reported_in_one_line(tmp_path):
    (tmp_path / "broken.json").write_text("{}")
    for name in ("lost.json", "broken.json"):
        outcome = python(tmp_path, "-m", "layerproof", "verdicts", "v.json", "--comparisons", "--job", name)
        assert outcome.returncode == 2
        assert outcome.stderr.startswith(f"error: {name}: is not a job file (")
        assert outcome.stderr.endswith("Run layerproof run -- -n to write it.\n") and outcome.stderr.count("\n") == 1


LAST_WORDS = {
    "abort": ("os.abort()", "killed by SIGABRT. Its log shows what it printed last."),
    "crash": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV."),
    "out of memory": ("os.kill(os.getpid(), 9)", "killed by SIGKILL (out of memory, or killed by hand)."),
    "exit at once": ("os._exit(0)", "ended with exit code 0 before its output was written."),
    "exit": ("sys.exit('no device')", "SystemExit at code.py:2: no device"),
    "interrupt": ("raise KeyboardInterrupt", "killed by SIGINT."),
    "recursion": ("f = lambda: f(); f()", "RecursionError at code.py:2: "),
    "message of several lines": (
        "raise RuntimeError('no kernel for\\n  this shape')",
        "RuntimeError at code.py:2: no kernel for this shape",
    ),
    "long message": ("raise ValueError('x' * 9999)", "ValueError at code.py:2: " + "x" * LONGEST_REASON),
    "message that cannot be read": (
        "raise type('E', (Exception,), {'__str__': lambda self: 1 / 0})",
        "E at code.py:2: its message cannot be read",
    ),
}

APART = """
import logging, os, sys, runpy
from pathlib import Path
from layerproof.rerun import jobs
from layerproof.rerun.job import Job
from layerproof.files import write_text

def task(name, before, works):
    output = Path(f"{name}.out")
    job = Job(f"port/{name}", {}, {"stage": name}, {}, "new", "it has not run before", "new")
    target = output.absolute()
    def work():
        print("at work", name, flush=True)
        if not works:
            runpy.run_path("code.py")["break_it"]()
        write_text(target, "new")
    return jobs.Task(job, tuple(before), (output,), work, Path(f"{name}.log") if logs else None)

def leave_error(task, error):
    write_text(task.outputs[0], f"{type(error).__name__}: {error}")

logging.basicConfig(level=logging.INFO)
logs, independent, tasks = "logs" in sys.argv[1], "independent" in sys.argv[1], []
for name in sys.argv[2:]:
    before = tasks[-1].outputs if tasks and not independent else ()
    tasks.append(task(name.rstrip("!"), before, not name.endswith("!")))
jobs.run_in_subprocess(tasks, leave_error, independent)
"""


def write_code(directory, code):
    (directory / "code.py").write_text(f"def break_it():\n    {code}\nimport os, sys, time\n")


def run_apart(directory, code, *names, logs=False):
    """Runs tasks in a subprocess; the code of those whose name ends with ! is `code`."""
    write_code(directory, code)
    return python(directory, "-c", APART, "logs" if logs else "terminal", *names)


def test_independent_tasks_after_one_whose_process_ends_run_in_another(tmp_path):
    write_code(tmp_path, "os.abort()")
    outcome = python(tmp_path, "-c", APART, "logs independent", "first", "second!", "third", "fourth!", "fifth")
    assert outcome.returncode == 0, outcome.stderr
    assert [(tmp_path / f"{name}.out").read_text() for name in ("first", "third", "fifth")] == ["new"] * 3
    for name in ("second", "fourth"):
        assert "killed by SIGABRT" in (tmp_path / f"{name}.out").read_text()
        assert "Fatal Python error: Aborted" in (tmp_path / f"{name}.log").read_text()


def test_what_ends_a_job_is_in_its_log(tmp_path, capfd):
    """As well as on the terminal, where the command says it."""

    def fails():
        raise UserError("prompts.txt: contains no prompt")

    task = jobs.Task(Job("tokens", {}, {}, {}, "new", "", "new"), (), (tmp_path / "out",), fails, tmp_path / "log")
    with capfd.disabled(), pytest.raises(UserError):
        jobs.run_all([task])
    assert "error: prompts.txt: contains no prompt" in (tmp_path / "log").read_text()


def record_of(name):
    return Record.read(RECORDS / f"port/{name}.json")


@pytest.mark.parametrize(("code", "reason"), LAST_WORDS.values(), ids=LAST_WORDS)
def test_code_that_ends_the_process_leaves_an_error(tmp_path, code, reason):
    """Also where a run before left a good output: that one must not be taken for this one's."""
    for name in ("first", "second", "third"):
        (tmp_path / f"{name}.out").write_text("old")
    outcome = run_apart(tmp_path, code, "first", "second!", "third")
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "first.out").read_text() == "new"
    assert (tmp_path / "second.out").read_text().startswith("StageError: ")
    assert reason in (tmp_path / "second.out").read_text()
    record = record_of("second")
    assert reason in record.error and record.job.arguments == {"stage": "second"}
    if record.error.startswith("The process of the job"):
        assert (
            (tmp_path / "third.out").read_text().startswith("StageMissing: no input, because an earlier stage failed")
        )
        assert reason.partition(".")[0] in record_of("third").error
    else:
        assert (tmp_path / "third.out").read_text() == "new"
    # put right, what failed and what follows run, and the rest does not
    outcome = run_apart(tmp_path, code, "first", "second", "third")
    assert [line for line in outcome.stdout.splitlines() if "at work" in line] == ["at work second", "at work third"]
    assert "port/first: up to date" in outcome.stderr
    assert (tmp_path / "third.out").read_text() == "new"


def test_the_end_of_a_process_is_seen_though_another_holds_its_files_open(tmp_path):
    """A port may start processes that outlive it."""
    try:
        outcome = run_apart(tmp_path, "os.fork() or time.sleep(600); os._exit(3)", "first!", "second")
        assert outcome.returncode == 0, outcome.stderr
        assert "ended with exit code 3" in (tmp_path / "first.out").read_text()
        assert (tmp_path / "second.out").read_text().startswith("StageMissing: ")
    finally:
        end_processes_in(tmp_path)


def end_processes_in(directory):
    """Ends the processes that run in this directory, which a test left."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(directory) and process.pid != os.getpid():
                process.kill()


def test_each_job_prints_to_its_own_log(tmp_path):
    """Also what a program prints that it starts, what Python says of a crash, and what became of it."""
    code = "os.system('echo from a program'); print('last words', flush=True); os.abort()"
    outcome = run_apart(tmp_path, code, "first", "second!", "third", logs=True)
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, "", "")
    first, second, third = ((tmp_path / f"{name}.log").read_text() for name in ("first", "second", "third"))
    assert "at work first" in first and "port/first: done after" in first and "second" not in first
    assert "from a program\nlast words\nFatal Python error: Aborted" in second
    assert (
        "error: The process of the job was killed by SIGABRT." in second and "port/second: ended as an error" in second
    )
    assert "at work" not in third and "error: no input, because an earlier stage failed" in third


def test_an_error_says_what_the_log_tells_of_it(tmp_path):
    code = "print('RuntimeError: XLA device not found', flush=True); os.abort()"
    run_apart(tmp_path, code, "first!", "second", logs=True)
    before, _, meaning = record_of("first").error.partition("Its log shows what it printed last: ")
    assert before == "The process of the job was killed by SIGABRT. " and meaning == known_errors.explained(code)
    assert "XLA device" not in record_of("second").error


def test_a_job_that_changes_the_directory_writes_where_it_should(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    outcome = run_apart(tmp_path, "os.chdir('elsewhere')", "first!", "second")
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "first.out").read_text() == (tmp_path / "second.out").read_text() == "new"
    assert not list((tmp_path / "elsewhere").iterdir())
    assert record_of("first").outputs["first.out"]["size"] == 3


def test_a_job_ends_with_the_process_that_waits_for_it(tmp_path):
    """Else one that snakemake killed would go on writing beside the one that replaced it."""
    write_code(tmp_path, "time.sleep(60)")
    process = start_python(tmp_path, "-c", APART, "terminal", "first!", stdout=subprocess.PIPE)
    while "at work" not in process.stdout.readline():
        assert process.poll() is None
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
    assert not (tmp_path / "first.out").exists() and not (RECORDS / "port/first.json").exists()

"""A job runs when it must and only then, and leaves a record or none."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap

import psutil
import pytest

from layerproof.errors import StageError, StageMissing, UserError
from layerproof.failures import LONGEST_REASON
from layerproof.files import sha256, write_text
from layerproof.rerun import jobs, recorder
from layerproof.rerun.jobs import Job
from layerproof.rerun.planner import Stamps
from layerproof.rerun.recorder import cached
from layerproof.rerun.records import Record, describe_output

REPOSITORY = recorder.REPOSITORY
HEAVY = {"torch", "transformers", "h5py", "numpy", "matplotlib", "safetensors", "jinja2"}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "input").write_text("input")
    return Job(
        verb="port",
        spec={"stage": "layer_000"},
        stamp="new",
        inputs=(tmp_path / "input",),
        outputs=(tmp_path / "results/output",),
        record=tmp_path / "results/records/output.json",
    )


class Work:
    """Writes the output and counts its calls; raises if it is told to."""

    def __init__(self, job, error=None):
        self.job, self.error, self.calls = job, error, 0

    def __call__(self):
        self.calls += 1
        if self.error:
            raise self.error
        for path in self.job.outputs:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("output")
        return {"fact": self.calls}


def leave_error(job):
    def leave(error):
        job.outputs[0].parent.mkdir(parents=True, exist_ok=True)
        job.outputs[0].write_text(f"error: {error}")

    return leave


def identity(path):
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def test_first_run_leaves_output_and_record(job, capsys):
    jobs.run(job, Work(job))
    record = Record.read(job.record)
    assert (record.verb, record.spec, record.stamp, record.error) == (job.verb, job.spec, job.stamp, None)
    assert set(record.inputs) == {str(job.inputs[0])} and set(record.outputs) == {str(job.outputs[0])}
    assert record.run["fact"] == 1 and record.run["wall_s"] >= 0 and record.run["packages"]["numpy"]
    assert "tests/rerun/test_jobs.py::Work.__call__" in record.code
    assert "runs because it has not run before" in capsys.readouterr().out


def test_current_job_does_nothing(job, capsys):
    jobs.run(job, Work(job))
    before = identity(job.outputs[0]), identity(job.record)
    work = Work(job)
    jobs.run(job, work)
    assert work.calls == 0
    assert (identity(job.outputs[0]), identity(job.record)) == before
    assert f"{job.outputs[0]}: up to date" in capsys.readouterr().out


@pytest.mark.parametrize("field", [{"spec": {"stage": "layer_001"}}, {"stamp": "other"}])
def test_job_that_was_asked_for_differently_runs(job, field):
    jobs.run(job, Work(job))
    work = Work(job)
    jobs.run(Job(**vars(job) | field), work)
    assert work.calls == 1


def test_changed_input_is_recorded_as_it_was_before_the_work(job):
    class Changing(Work):
        def __call__(self):
            self.job.inputs[0].write_text("changed during the work")
            return super().__call__()

    jobs.run(job, Changing(job))
    work = Work(job)
    jobs.run(job, work)
    assert work.calls == 1, "what was written while the job read it is a change"


def test_damaged_output_runs_again(job):
    jobs.run(job, Work(job))
    job.outputs[0].write_text("autput")
    jobs.run(job, Work(job))
    assert job.outputs[0].read_text() == "output"


def test_error_becomes_a_result_and_is_tried_again(job, capsys):
    jobs.run(job, Work(job, StageError("no such head")), leave_error(job))
    assert job.outputs[0].read_text() == "error: no such head"
    record = Record.read(job.record)
    assert record.error == "no such head"
    assert set(record.outputs) == {str(job.outputs[0])}
    folder = job.record.parent
    assert Stamps(folder, folder / "stamps", folder / "seen", lambda job: False).value("output") != job.stamp
    captured = capsys.readouterr()
    assert "error: no such head" in captured.err and "Traceback" not in captured.err
    work = Work(job)
    jobs.run(job, work, leave_error(job))
    assert work.calls == 1 and job.outputs[0].read_text() == "output"
    assert Record.read(job.record).error is None


def test_without_on_error_an_exception_leaves_no_new_record(job):
    jobs.run(job, Work(job))
    before = Record.read(job.record)
    job.inputs[0].write_text("changed")
    with pytest.raises(StageError, match="no such head"):
        jobs.run(job, Work(job, StageError("no such head")))
    assert Record.read(job.record) in (None, before)
    work = Work(job)
    jobs.run(job, work)
    assert work.calls == 1


def test_an_interruption_is_no_result(job):
    with pytest.raises(KeyboardInterrupt):
        jobs.run(job, Work(job, KeyboardInterrupt()), leave_error(job))
    assert not job.record.exists() and not job.outputs[0].exists()


def seen_error(job, error):
    errors = []

    def keep(error):
        errors.append(error)
        leave_error(job)(error)

    jobs.run(job, error if callable(error) else Work(job, error), keep)
    return errors[0]


def test_kind_of_error_is_kept(job):
    missing = StageMissing("no input")
    assert seen_error(job, missing) is missing
    user = seen_error(job, UserError("config.yaml: wrong"))
    assert type(user) is StageError and str(user) == "config.yaml: wrong"


def test_error_names_file_and_line_of_the_users_code(job, tmp_path, monkeypatch, capsys):
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

    error = seen_error(job, user_port.build)
    assert str(error).startswith("ParserError at user_port.py:5: while parsing")
    assert "\n" not in str(error)
    assert "Traceback" in capsys.readouterr().err


def test_error_without_a_message(job):
    assert str(seen_error(job, IndexError())).endswith(": no message")


def test_what_a_process_does_once_belongs_to_the_code_of_each_job(job, tmp_path, monkeypatch):
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
    other = dataclasses.replace(job, outputs=(tmp_path / "results/other",), record=tmp_path / "other.json")
    for one in (job, other):
        jobs.run(one, lambda one=one: write_text(one.outputs[0], start()))
        assert any(entry.endswith("set_up.py::Device.open") for entry in Record.read(one.record).code)
    assert set_up.CALLS == ["start"] and other.outputs[0].read_text() == "opened"


def layerproof(directory, *arguments, options=()):
    return subprocess.run(
        [sys.executable, *options, "-m", "layerproof", *map(str, arguments)],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
    )


def test_job_killed_between_work_and_record_runs_again(job, tmp_path):
    script = """
        import os, signal, sys
        from pathlib import Path
        from layerproof.rerun import jobs
        from layerproof.rerun.jobs import Job

        root = Path(sys.argv[1])
        job = Job("port", {"stage": "layer_000"}, "new", (root / "input",), (root / "results/output",),
                  root / "results/records/output.json")

        def work():
            job.outputs[0].write_text(sys.argv[2])
            if sys.argv[2] == "killed":
                os.kill(os.getpid(), signal.SIGKILL)

        jobs.run(job, work)
    """
    (tmp_path / "script.py").write_text(textwrap.dedent(script))
    jobs.run(job, Work(job))
    job.inputs[0].write_text("changed")

    def call(text):
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")}
        return subprocess.run([sys.executable, "script.py", str(tmp_path), text], cwd=tmp_path, env=environment)

    assert call("killed").returncode == -signal.SIGKILL
    assert job.outputs[0].read_text() == "killed"
    job.inputs[0].write_text("input")  # even as it was: the record of then says nothing of the output now
    assert call("whole").returncode == 0
    assert job.outputs[0].read_text() == "whole"
    assert call("not again").returncode == 0
    assert job.outputs[0].read_text() == "whole"


@pytest.mark.parametrize(
    ("verb", "files"),
    [
        ("golden", ("weights", "tokens", "config")),
        ("port", ("weights", "tokens", "config")),
        ("compare", ("golden", "noise", "port", "tokens")),
        ("plot-stage", ("comparisons",)),
        ("predict", ("weights", "tokens", "config")),
        ("audit", ("weights", "golden", "port", "prediction")),
        ("report", ("template", "verdicts", "unused", "audit", "comparisons")),
    ],
)
def test_current_job_imports_nothing_heavy(tmp_path, verb, files):
    (tmp_path / "layer_000.json").write_text("{}")
    outputs = ["layer_000.h5", "noise.h5"] if verb == "golden" else ["layer_000.h5"]
    for output in outputs:
        (tmp_path / output).write_text("output")
    spec = {"stage": "layer_000", "compared": [], "checkpoint_dir": "model"}
    Record(
        verb=verb,
        spec=spec,
        stamp="new",
        inputs={"layer_000.json": sha256(tmp_path / "layer_000.json")},
        outputs={output: describe_output(tmp_path / output) for output in outputs},
        code={},
        error=None,
    ).write(tmp_path / "record.json")
    flags = [part for name in files for part in (f"--{name}", "layer_000.json")]
    arguments = (verb, *outputs, *flags, "--spec", json.dumps(spec), "--record", "record.json")
    outcome = layerproof(tmp_path, *arguments, options=("-X", "importtime"))
    assert outcome.returncode == 0 and ": up to date" in outcome.stdout, outcome.stderr[-2000:]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in outcome.stderr.splitlines() if "|" in line}
    assert "layerproof" in imported and not imported & HEAVY


LAST_WORDS = {
    "abort": ("os.abort()", "killed by SIGABRT. Its log has what it printed last."),
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
import os, sys, runpy
from pathlib import Path
from layerproof.rerun import jobs
from layerproof.files import write_text

def task(name, before, works):
    output = Path(f"{name}.out")
    job = jobs.Job("port", {"stage": name}, "new", tuple(before), (output,), Path(f"{name}.json"))
    target = output.absolute()
    def work():
        print("at work", name, flush=True)
        if not works:
            runpy.run_path("code.py")["break_it"]()
        write_text(target, "new")
    return job, work

tasks = []
for name in sys.argv[1:]:
    before = tasks[-1][0].outputs if tasks else ()
    tasks.append(task(name.rstrip("!"), before, not name.endswith("!")))
jobs.run_apart(tasks, lambda job, error: write_text(job.outputs[0], f"{type(error).__name__}: {error}"))
"""


def run_apart(directory, code, *names):
    """Runs jobs in a process apart; the code of those whose name ends with ! is `code`."""
    (directory / "code.py").write_text(f"def break_it():\n    {code}\nimport os, sys\n")
    return subprocess.run(
        [sys.executable, "-c", APART, *names],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
    )


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
    record = Record.read(tmp_path / "second.json")
    assert reason in record.error and record.spec == {"stage": "second"}
    if "process of the job" in reason:
        assert (tmp_path / "third.out").read_text().startswith("StageMissing: no input")
    # put right, what failed and what follows run, and the rest does not
    outcome = run_apart(tmp_path, code, "first", "second", "third")
    assert [line for line in outcome.stdout.splitlines() if "at work" in line] == ["at work second", "at work third"]
    assert (tmp_path / "third.out").read_text() == "new"


def test_a_job_that_changes_the_directory_writes_where_it_should(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    outcome = run_apart(tmp_path, "os.chdir('elsewhere')", "first!", "second")
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "first.out").read_text() == (tmp_path / "second.out").read_text() == "new"
    assert not list((tmp_path / "elsewhere").iterdir())
    assert Record.read(tmp_path / "first.json").outputs["first.out"]["size"] == 3


def test_a_job_ends_with_the_process_that_waits_for_it(tmp_path):
    """Else one that snakemake killed would go on writing beside the one that replaced it."""
    (tmp_path / "code.py").write_text("import time\ndef break_it():\n    time.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-c", APART, "first!"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        stdout=subprocess.PIPE,
        text=True,
    )
    while "at work" not in process.stdout.readline():
        assert process.poll() is None
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs([child], timeout=10)
    assert not alive
    assert not (tmp_path / "first.out").exists() and not (tmp_path / "first.json").exists()

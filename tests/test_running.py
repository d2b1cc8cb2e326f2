"""Whose lock it is: that of a run at work, or of one that was killed."""

import platform
import subprocess
import sys
from dataclasses import asdict

import psutil
import pytest

from layerproof import project, running
from layerproof.errors import UserError
from layerproof.files import write_json


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / running.LOCKS).mkdir(parents=True)
    (tmp_path / running.LOCKS / "0.input.lock").touch()
    return tmp_path


def note(host=None, process=None, started=None):
    own = psutil.Process()
    owner = running.Owner(host or platform.node(), process or own.pid, started or own.create_time())
    write_json(running.NOTES / f"{owner.host}-{owner.process}.json", asdict(owner))
    return owner


def ended():
    """A process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        started = psutil.Process(process.pid).create_time()
    return {"process": process.pid, "started": started}


def test_the_lock_of_a_run_that_was_killed_is_removed(folder, capsys):
    owner = note(**ended())
    project._free_folder()
    assert not running.is_locked() and not list(running.owners())
    assert f"The run before was killed (process {owner.process} on " in capsys.readouterr().out


def test_a_run_at_work_keeps_its_folder():
    note(**ended())
    owner = note()
    with pytest.raises(UserError, match=f"another run works in this folder \\(process {owner.process} .*kill"):
        project._free_folder()
    assert running.is_locked()


def test_another_process_with_the_number_of_a_killed_run_is_not_the_run():
    note(started=psutil.Process().create_time() - 1000)
    project._free_folder()
    assert not running.is_locked()


def test_a_killed_run_whose_parent_has_not_asked_for_it_is_not_at_work():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    note(process=process.pid, started=psutil.Process(process.pid).create_time())
    process.kill()
    while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
        pass
    project._free_folder()
    assert not running.is_locked()
    process.wait()


def test_two_runs_that_begin_together_do_not_both_go_on(folder):
    code = "from layerproof import running\nwith running.hold_folder():\n    print('held', flush=True)\n    input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout and first.stdout.readline() == "held\n"
        with pytest.raises(UserError, match="another run works in this folder"), running.hold_folder():
            pass
        first.kill()
    with running.hold_folder():
        pass


def test_of_another_host_nobody_can_tell():
    note(host="elsewhere", **ended())
    with pytest.raises(UserError, match=r"locked by process .* on elsewhere.*--unlock"):
        project._free_folder()
    assert running.is_locked()


def test_a_lock_without_a_note_is_left():
    with pytest.raises(UserError, match=r"left no note.*--unlock"):
        project._free_folder()
    assert running.is_locked()


def test_a_process_notes_itself_until_it_ends(folder):
    code = "from layerproof import running; running.note_this_process(); print(*running.NOTES.iterdir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() and not list(running.NOTES.glob("*.json"))

"""`layerproof watch` reaches the ranks of a program that knows nothing of it."""

import os
import subprocess
import sys

import pytest

from configs import REPOSITORY

CROSSED = """
import torch.distributed as dist
from torch.distributed import new_group

dist.init_process_group("gloo")
for members in ([0], [1]) if dist.get_rank() == 0 or {healthy} else ([1], [0]):
    new_group(members)
print("all groups are there")
"""
LINE = CROSSED[: CROSSED.index("new_group(members)")].count("\n") + 1
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def watched(*command, flags=(), **variables):
    start = [sys.executable, "-m", "layerproof", "watch", *flags, "--", *command]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")} | variables
    return subprocess.run(start, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_ranks_of_torchrun_that_create_groups_in_another_order_are_told(tmp_path):
    (tmp_path / "crossed.py").write_text(CROSSED.format(healthy=False))
    ended = watched(*TORCHRUN, str(tmp_path / "crossed.py"), flags=("--deadline", "60"))
    assert ended.returncode == 1 and "all groups are there" not in ended.stdout
    at = f"at {tmp_path}/crossed.py:{LINE}"
    assert (
        f"group 0 is not the same on all ranks: rank 0 creates new_group([0]) {at}; rank 1 creates new_group([1]) {at}."
        in ended.stderr
    )


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_told_after_the_deadline(tmp_path):
    program = CROSSED.format(healthy=True).replace(
        "for members", "if dist.get_rank() == 0:\n    new_group()\nfor members"
    )
    (tmp_path / "skipped.py").write_text(program.replace("([0], [1]) if", "() if"))
    ended = watched(*TORCHRUN, str(tmp_path / "skipped.py"), flags=("--deadline", "2"))
    assert ended.returncode == 1
    last = ended.stderr[ended.stderr.rindex("layerproof: ") :]
    assert "has not come to" in " ".join(last.split()) or "has ended" in last, last


@pytest.mark.slow
def test_a_healthy_program_runs_as_without_it(tmp_path):
    (tmp_path / "healthy.py").write_text(CROSSED.format(healthy=True))
    ended = watched(*TORCHRUN, str(tmp_path / "healthy.py"))
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("all groups are there") == 2


def test_what_python_does_when_it_starts_is_not_lost(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.behind = True\n")
    ended = watched(sys.executable, "-c", "import sys; print(sys.behind, sys.argv)", PYTHONPATH=own(tmp_path))
    assert (ended.returncode, ended.stdout) == (0, "True ['-c']\n")


def own(folder):
    return os.pathsep.join([str(folder), str(REPOSITORY / "workflow")])


def test_the_exit_code_is_that_of_the_program():
    assert watched(sys.executable, "-c", "import sys; sys.exit(7)").returncode == 7


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ((), "error: watch: there is no program behind --."),
        (("no-such-program",), "error: no-such-program: No such file"),
    ],
    ids=["nothing", "no such program"],
)
def test_what_cannot_be_run_is_told(command, told):
    ended = watched(*command)
    assert ended.returncode == 2 and ended.stderr.startswith(told) and ended.stderr.count("\n") == 1

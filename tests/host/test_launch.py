"""The program of examples/launchers under each launcher, with a rank that is killed in the middle."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from configs import REPOSITORY
from layerproof.launch.variables import of_slurm

EXAMPLE = REPOSITORY / "examples/launchers"


def launched(out, *program, flags=(), config=EXAMPLE / "config.yaml", **variables):
    start = [sys.executable, "-m", "layerproof", "launch", "--config", str(config), *flags, "--"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow"), "OMP_NUM_THREADS": "1"} | variables
    command = [*start, str(EXAMPLE / "train_step.py"), str(out), *program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The loss and the weights of one rank."""
    folder = tmp_path_factory.mktemp("alone")
    config = (EXAMPLE / "config.yaml").read_text().replace("tp: 2", "tp: 1").replace("dp: 2", "dp: 1")
    (folder / "config.yaml").write_text(config)
    ended = launched(folder, config=folder / "config.yaml")
    assert ended.returncode == 0, ended.stderr
    return json.loads((folder / "loss.json").read_text())["loss"], load_file(folder / "rank-0.safetensors")


def check_trained(out, alone):
    """Whatever the mesh is, the step is that of one rank."""
    loss, weights = alone
    made = json.loads((out / "loss.json").read_text())
    assert made["mesh"] == {"dp": 2, "tp": 2} and made["loss"] == pytest.approx(loss, rel=1e-6)
    parts = [load_file(out / f"rank-{rank}.safetensors") for rank in range(4)]
    for name, dim in {"0.weight": 0, "0.bias": 0, "2.weight": 1}.items():
        for copy in (parts[:2], parts[2:]):
            torch.testing.assert_close(torch.cat([part[name] for part in copy], dim), weights[name], rtol=0, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["fork", "torchrun", "ray"])
def test_a_killed_rank_is_named_and_the_program_runs_again(launcher, alone, tmp_path):
    ended = launched(tmp_path, "--dies", "2", flags=("--launcher", launcher), TMPDIR="/tmp")
    assert ended.returncode == 0, ended.stderr
    said = " ".join(ended.stderr.split())
    assert "layerproof: Rank 2 ended without an error of Python: it was killed, or called os._exit" in said, (
        ended.stderr
    )
    assert "layerproof: runs the program again, for time 1 of 1" in said
    check_trained(tmp_path, alone)


def test_a_program_that_fails_as_often_as_it_is_tried_has_its_exit_code(tmp_path):
    (tmp_path / "config.yaml").write_text("inputs:\n  prompts: none.txt\nparallel:\n  tp: 2\n  retries: 1\n")
    (tmp_path / "fails.py").write_text("import os, sys; print('rank', os.environ['RANK']); sys.exit(7)")
    start = [sys.executable, "-m", "layerproof", "launch", "--", "fails.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")}
    ended = subprocess.run(start, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 7 and ended.stderr.count("runs the program again") == 1
    assert sorted(ended.stdout.split()) == sorted(["rank", "0", "rank", "1"] * 2)


RAISES = """
import torch.distributed as dist

dist.init_process_group("gloo")
if dist.get_rank() == 1:
    raise ValueError("no data")
dist.barrier()
"""


@pytest.mark.slow
def test_the_error_of_a_forked_rank_is_named_and_not_what_follows_from_it(tmp_path):
    """Children of multiprocessing tell no hook of theirs."""
    (tmp_path / "config.yaml").write_text("inputs:\n  prompts: none.txt\nparallel:\n  tp: 2\n")
    (tmp_path / "raises.py").write_text(RAISES)
    start = [sys.executable, "-m", "layerproof", "launch", "--", "raises.py"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")}
    ended = subprocess.run(start, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 1
    assert "layerproof: Rank 1 raised ValueError: no data" in ended.stderr, ended.stderr


def test_a_task_of_slurm_has_the_variables_of_torchrun():
    task = {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "2",
        "SLURM_PROCID": "6",
        "SLURM_STEP_NUM_TASKS": "9",
        "SLURM_LOCALID": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_TASKS_PER_NODE": "4(x2),1",
    }
    assert of_slurm(task, ["a1", "a2", "a3"]) == {
        "RANK": "6",
        "WORLD_SIZE": "9",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
        "MASTER_ADDR": "a1",
        "MASTER_PORT": str(10000 + 41 * 31 + 2),
    }
    assert of_slurm(task | {"SLURM_NODEID": "2"}, ["a1"])["LOCAL_WORLD_SIZE"] == "1"

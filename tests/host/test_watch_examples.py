"""The programs of examples/watch, which others wrote for the most part: healthy, and broken on purpose."""

import os
import subprocess
import sys

import pytest

from configs import REPOSITORY

pytestmark = pytest.mark.slow

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
PROGRAMS = {
    "accelerate_ops": (
        [*ACCELERATE],
        ["--check-collectives"],
        "testing sending tensors across devices",
        "call different collectives as their number 4: rank 0 calls broadcast(float32[2], src=0)",
    ),
    "megatron_groups": (
        [*TORCHRUN, "4"],
        [],
        "rank 3: tp 1 of 2, pp 1 of 2",
        "ranks 0, 1 and 2 create new_group([0, 1]) at megatron/core/parallel_state.py",
    ),
    "sequence_parallel": (
        [*TORCHRUN, "4"],
        [],
        "rank 2: its chunk is that of rank 2 again",
        "Rank 2 has not received what rank 0 waits for in isend(float32[4]) at yunchang/ring/utils.py",
    ),
    "tensor_parallel": (
        [*TORCHRUN, "2"],
        [],
        "rank 1: [1, 2, 3, 4, 5,",
        "Rank 0 waits in all_reduce(float32[1, 1, 32]) at transformers/distributed/tensor_parallel.py",
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_as_without_it_and_its_mistake_is_named(name):
    launcher, flags, printed, said = PROGRAMS[name]

    def run(*arguments, deadline):
        program = REPOSITORY / "examples/watch" / f"{name}.py"
        command = [
            sys.executable,
            "-m",
            "layerproof",
            "watch",
            *flags,
            *deadline,
            "--",
            *launcher,
            str(program),
            *arguments,
        ]
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow"), "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=REPOSITORY)

    healthy = run(deadline=[])
    assert healthy.returncode == 0 and printed in healthy.stdout, healthy.stderr[-3000:]
    assert "layerproof:" not in healthy.stderr
    broken = run("--broken", deadline=["--deadline", "20"])
    assert broken.returncode == 1
    last = " ".join(broken.stderr[broken.stderr.rindex("\nlayerproof: ") :].split())
    assert said in last, last

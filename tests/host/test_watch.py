"""`layerproof watch` reaches the ranks of a program that knows nothing of it."""

import json
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
    return subprocess.run(start, env=environment, capture_output=True, text=True, timeout=240)


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
    ended = watched(*TORCHRUN, str(tmp_path / "skipped.py"), flags=("--deadline", "10"))
    assert ended.returncode == 1
    last = ended.stderr[ended.stderr.rindex("layerproof: ") :]
    at = f"new_group() at {tmp_path}/skipped.py:"
    assert f"Rank 1 has left its group or ended its program without coming to {at}" in " ".join(last.split())


STUCK = """
import time
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
if dist.get_rank() == 1:
    time.sleep(600)
dist.barrier()
"""
SAID = "Rank 1 has not come to barrier at {file}:{barrier}, where rank 0 waits. Rank 1 is at {file}:{sleep} in"


def said_last(ended, file, barrier, sleep):
    last = " ".join(ended.stderr[ended.stderr.rindex("layerproof: ") :].split())
    assert SAID.format(file=file, barrier=barrier, sleep=sleep) in last, ended.stderr
    assert f"step rank 0 rank 1 init_process_group at {file}" in last, "with a table"


@pytest.mark.slow
def test_a_rank_of_torchrun_that_is_stuck_is_said_last(tmp_path):
    file = tmp_path / "stuck.py"
    file.write_text(STUCK)
    ended = watched(*TORCHRUN, str(file), flags=("--deadline", "10"))
    assert ended.returncode == 1
    said_last(ended, file, 10, 9)


@pytest.mark.slow
def test_another_shape_is_said_before_the_collective_runs(tmp_path):
    (tmp_path / "shape.py").write_text(STUCK.replace("torch.ones(4)", "torch.ones(4 + 2 * dist.get_rank())"))
    ended = watched(*TORCHRUN, str(tmp_path / "shape.py"), flags=("--check-collectives",))
    at = f"at {tmp_path}/shape.py:7"
    both = f"rank 0 calls all_reduce(float32[4], SUM) {at}; rank 1 calls all_reduce(float32[6], SUM) {at}."
    assert ended.returncode == 1 and f"collective 0 is not the same on all ranks: {both}" in ended.stderr


@pytest.mark.slow
def test_the_rank_that_is_killed_is_named_and_not_those_that_lose_it(tmp_path):
    killed = STUCK.replace("time.sleep(600)", "time.sleep(1); import os; os.kill(os.getpid(), 9)")
    (tmp_path / "killed.py").write_text(killed)
    ended = watched(*TORCHRUN, str(tmp_path / "killed.py"))
    last = " ".join(ended.stderr[ended.stderr.rindex("layerproof: ") :].split())
    assert last.startswith("layerproof: Rank 1 ended without an error of Python: it was killed, or called os._exit;")
    assert f"its last step was all_reduce(float32[4], SUM) at {tmp_path}/killed.py:7." in last


RAY = """
import os, socket, sys, time
import ray


@ray.remote(num_cpus=1, max_restarts=0)
class Worker:
    def run(self, is_stuck):
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        total = torch.ones(4)
        dist.all_reduce(total)
        if is_stuck and dist.get_rank() == 1:
            time.sleep(600)
        dist.barrier()
        return total.sum().item()


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 * 2**20)
common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
ranks = [{"env_vars": common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}} for rank in range(2)]
workers = [Worker.options(runtime_env=environment).remote() for environment in ranks]
print(ray.get([worker.run.remote("stuck" in sys.argv) for worker in workers]))
"""


@pytest.mark.slow
def test_workers_that_ray_starts_are_watched(tmp_path):
    file = tmp_path / "actors.py"
    file.write_text(RAY)
    ended = watched(sys.executable, str(file), flags=("--deadline", "120"), TMPDIR="/tmp")
    assert ended.returncode == 0 and "[8.0, 8.0]" in ended.stdout and "layerproof" not in ended.stderr, ended.stderr
    ended = watched(sys.executable, str(file), "stuck", flags=("--deadline", "20"), TMPDIR="/tmp")
    assert ended.returncode == 1
    said_last(ended, file, 17, 16)


def test_a_running_cluster_is_told_what_its_workers_need():
    ended = watched(sys.executable, "-c", "", RAY_ADDRESS="host:6379")
    assert ended.returncode == 0
    environment = json.loads(ended.stderr[ended.stderr.index("{") : ended.stderr.rindex("}") + 1])["env_vars"]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(REPOSITORY / "workflow/layerproof/distributed/hook")
    assert not environment["LAYERPROOF_WATCH_STORE"].startswith("127.0.0.1")


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

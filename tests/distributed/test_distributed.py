"""The process group in real processes, started alone and as a launcher would."""

import inspect
import json
import os
import socket
import subprocess
import sys
import textwrap

import pytest
import torch

from configs import REPOSITORY
from distributed.backends import stand_in
from layerproof.distributed import process_group as distributed
from layerproof.port import ranks
from processes import afresh

pytestmark = pytest.mark.slow

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PJRT_DEVICE")

WORK = """
    import json, os, sys, threading
    import torch
    import torch.distributed as dist
    from layerproof.distributed import process_group as distributed
    from layerproof.distributed.errors import DistributedError

    {before}
    try:
        environment = distributed.initialise("cpu")
    except DistributedError as error:
        print("error:", error)
        sys.exit(2)
    again = distributed.initialise("cpu")
    assert again == environment
    total = torch.tensor([float(environment.rank + 1)])
    dist.all_reduce(total)
    print(json.dumps({{
        "rank": environment.rank, "size": environment.world_size, "backend": environment.backend,
        "real_backend": dist.get_backend(), "device": str(environment.device), "hardware": environment.hardware,
        "group": [dist.get_rank(), dist.get_world_size()], "sum": total.item(),
        "address": os.environ["MASTER_ADDR"], "port": int(os.environ["MASTER_PORT"]),
    }}), flush=True)
    sys.stdin.readline()
    dist.destroy_process_group()
"""


def start(before="", **variables):
    """A process that joins the group, tells what it sees and stays until it is sent a line."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WORK).format(before=before)],
        env=environment | {"PYTHONPATH": str(REPOSITORY / "workflow")} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.communicate()


def told(process):
    """The marks of a process and what it sees, once it is there."""
    marks = []
    for line in process.stdout:
        if line.startswith("{"):
            return marks, json.loads(line)
        if line.startswith("rank "):  # gloo has lines of its own
            marks.append(line.strip())
    raise AssertionError("\n".join(marks) + process.stderr.read())


def finish(process):
    process.communicate("\n", timeout=60)
    return process.returncode


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_jobs_alone_do_not_collide(processes):
    processes += [start(), start()]
    seen = [told(process) for process in processes]
    for lines, facts in seen:
        assert facts["group"] == [facts["rank"], facts["size"]] == [0, 1]
        assert facts["backend"] == facts["real_backend"] == "gloo"
        assert facts["device"] == facts["hardware"] == "cpu"
        assert lines == [f"rank 0 of 1: gloo at 127.0.0.1:{facts['port']} on cpu"], "once, though called twice"
    assert seen[0][1]["port"] != seen[1][1]["port"]
    assert [finish(process) for process in processes] == [0, 0]


def test_two_ranks_form_a_group(processes):
    port = free_port()
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    processes += [start(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(2)]
    for rank, process in enumerate(processes):
        lines, facts = told(process)
        assert facts["group"] == [facts["rank"], facts["size"]] == [rank, 2]
        assert facts["sum"] == 3, "they do talk to each other"
        assert (facts["address"], facts["port"]) == ("localhost", int(port))
        assert lines == [f"rank {rank} of 2: gloo at localhost:{port} on cpu"]
    assert [finish(process) for process in processes] == [0, 0]


SHORT = "import datetime; dist.distributed_c10d.default_pg_timeout = datetime.timedelta(seconds=3)"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_missing_rank_ends_in_an_error(processes, rank):
    """With the timeout of torch, 30 minutes, cut to seconds."""
    port = free_port()
    process = start(SHORT, RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    processes.append(process)
    output, _ = process.communicate("\n", timeout=60)
    assert process.returncode == 2
    assert f"rank {rank} of 2: gloo" not in output
    assert f"error: rank {rank}: cannot form a process group at 127.0.0.1:{port} (" in output
    assert "Check MASTER_ADDR and MASTER_PORT" in output


def test_a_group_of_another_size_is_not_taken_for_the_own(processes):
    """As in a process that was forked from one that is in a group."""
    alone = "dist.init_process_group('gloo', rank=0, world_size=1, store=dist.HashStore())"
    processes.append(start(alone, RANK="1", WORLD_SIZE="2"))
    output, _ = processes[0].communicate("\n", timeout=60)
    assert processes[0].returncode == 2
    assert "rank 1 of 2: this process already belongs to a group, as rank 0 of 1. Start a new process." in output


@pytest.fixture
def environment(monkeypatch):
    """The environment without a launcher's variables; whatever is set is taken back."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    return monkeypatch


def test_default_is_a_world_of_one_on_a_free_port(environment):
    distributed._default_environment()
    assert [os.environ[name] for name in VARIABLES[:4]] == ["0", "1", "0", "127.0.0.1"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    first = os.environ.pop("MASTER_PORT")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", int(first)))
        distributed._default_environment()
        assert os.environ["MASTER_PORT"] != first


def test_environment_of_a_launcher_is_kept(environment):
    given = dict(zip(VARIABLES[:5], ["3", "8", "1", "10.0.0.1", "29501"], strict=True))
    for name, value in given.items():
        environment.setenv(name, value)
    distributed._default_environment()
    assert {name: os.environ[name] for name in given} == given


@pytest.mark.parametrize(
    ("platform", "backend", "with_device"),
    [
        ("cpu", "gloo", False),
        ("cuda", "nccl", True),
        ("xpu", "xccl", False),
        ("npu", "hccl", False),
        ("neuron", "neuron", False),
        ("xla", "xla", False),
    ],
)
def test_backend_by_platform_and_device_id_for_cuda_alone(environment, platform, backend, with_device):
    called = {}
    real = inspect.signature(distributed.dist.init_process_group)

    def init_process_group(*args, **named):
        called.update(real.bind(*args, **named).arguments)

    device = torch.device("meta", 1)
    environment.setattr(distributed, "_device", lambda *arguments: device)
    environment.setattr(distributed.dist, "is_initialized", lambda: False)
    environment.setattr(distributed.dist, "init_process_group", init_process_group)
    environment.setattr(distributed.distributed_c10d, "_get_default_store", lambda: None)
    environment.setattr(distributed, "_world", distributed._World())
    seen = distributed.initialise(platform)
    assert seen.backend == backend and seen.device == device
    expected = {
        "backend": backend,
        "init_method": "env://",
        "timeout": None,
        "device_id": device if with_device else None,
    }
    assert called == expected


def joined_twice(platform):
    def work(rank):
        stand_in(distributed.BACKENDS[platform])
        distributed._device = lambda *arguments: torch.device("cpu")
        found = []
        for _ in range(3):
            joined = distributed.initialise(platform)
            control = distributed.control_group()
            backends = distributed.dist.get_backend(), distributed.dist.get_backend(control)
            found.append((backends, distributed.of_all_ranks(rank), distributed.dist.get_process_group_ranks(control)))
            assert distributed.initialise(platform) == joined
            distributed.leave()
        return found

    return [done.value for done in ranks.run(3, work)]


@pytest.mark.parametrize("platform", ["xpu", "neuron", "npu", "cpu"])
def test_a_group_has_one_of_gloo_beside_it_and_is_left_and_joined_again(platform):
    backend = distributed.BACKENDS[platform]
    assert afresh(joined_twice, platform) == [[((backend, "gloo"), [0, 1, 2], [0, 1, 2])] * 3] * 3


def gloo_beside_xccl(with_device):
    def work(rank):
        stand_in("xccl")
        device = torch.device("xpu", 0)
        torch.accelerator.current_accelerator = lambda *arguments, **named: device
        torch.accelerator.device_count = lambda: 1
        dist = distributed.dist
        dist.init_process_group("xccl", device_id=device if with_device else None)
        try:
            dist.new_group(backend="gloo")
        except RuntimeError as error:
            return str(error)

    return [done.value for done in ranks.run(2, work)]


@pytest.mark.parametrize("with_device", [True, False])
def test_why_xccl_gets_no_device_id(with_device):
    """torch takes the group of the device for the one to split off, and finds no backend for it."""
    told = afresh(gloo_beside_xccl, with_device)
    assert all("xpu" in one for one in told) if with_device else told == [None, None]


@pytest.mark.parametrize(
    ("asked", "before", "expected"),
    [("auto", None, "CPU"), ("auto", "NEURON", "NEURON"), ("CPU", "NEURON", "CPU"), ("NEURON", None, "NEURON")],
)
def test_xla_device_by_setting_then_environment(environment, asked, before, expected):
    if before:
        environment.setenv("PJRT_DEVICE", before)
    environment.setattr(distributed, "_device", lambda *arguments: torch.device("meta"))
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 1}.items():
        environment.setattr(distributed.dist, name, lambda value=value: value)
    assert distributed.initialise("xla", asked).hardware == os.environ["PJRT_DEVICE"] == expected

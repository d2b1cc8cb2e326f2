"""The variables that a rank finds in its environment, as torchrun sets them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, repeat

from layerproof.distributed.board import free_port

FIRST_PORT, PORTS = 10000, 20000
"""Ports of which a step of Slurm has one by its number: its tasks cannot ask each other for a free one."""


def of_fork(count: int) -> Iterator[dict[str, str]]:
    """Those of each rank of a world on this host."""
    port = free_port()
    for rank in range(count):
        yield of_rank(rank, count, "127.0.0.1", port) | {
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
            "TORCHELASTIC_RUN_ID": "layerproof",  # makes torch_xla give each rank a core of its own
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }


def of_rank(rank: int, count: int, host: str, port: int) -> dict[str, str]:
    """Those by which ranks find each other: rank 0 listens at this port of its host."""
    return {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": host, "MASTER_PORT": str(port)}


def of_slurm(task: Mapping[str, str], hosts: Sequence[str]) -> dict[str, str]:
    """Those of a rank by the variables that srun gave to its task; `hosts` are those of the step, rank 0's first."""
    step = int(task["SLURM_JOB_ID"]) * 31 + int(task["SLURM_STEP_ID"])
    rank, count = int(task["SLURM_PROCID"]), int(task["SLURM_STEP_NUM_TASKS"])
    on_hosts = re.findall(r"(\d+)(?:\(x(\d+)\))?", task["SLURM_STEP_TASKS_PER_NODE"])  # such as 4(x2),3
    tasks = list(chain.from_iterable(repeat(tasks, int(times or 1)) for tasks, times in on_hosts))
    return of_rank(rank, count, hosts[0], FIRST_PORT + step % PORTS) | {
        "LOCAL_RANK": task["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[int(task["SLURM_NODEID"])],
    }

"""What `layerproof watch` costs when all is well, for each process group and each collective of four ranks over gloo."""

from __future__ import annotations

import time

from layerproof.port import ranks
from measure import Result

RANKS = 4
GROUPS = 40
COLLECTIVES = 1000
WAYS = {"plain torch": None, "watched": False, "watched, collectives compared": True}


def run() -> list[Result]:
    """Seconds of the slowest rank, side by side in the same ranks' order."""
    taken = {name: _taken(check) for name, check in WAYS.items()}
    groups, collectives = taken.pop("plain torch")
    results = []
    for name, (with_groups, with_collectives) in taken.items():
        told = f"{1e3 * groups / GROUPS:.2f} ms for a group, {1e6 * collectives / COLLECTIVES:.0f} us for an all_reduce"
        results += [
            Result(f"{name}: groups", with_groups / groups, "times plain torch", told),
            Result(f"{name}: more for each group", 1e3 * (with_groups - groups) / GROUPS, "ms", told),
            Result(f"{name}: all_reduce of 4 bytes", with_collectives / collectives, "times plain torch", told),
            Result(f"{name}: more for each", 1e6 * (with_collectives - collectives) / COLLECTIVES, "us", told),
        ]
    return results


def _taken(check: bool | None) -> tuple[float, float]:
    def work(rank: int) -> tuple[float, float]:
        import torch
        import torch.distributed as dist

        from layerproof import distributed

        if check is not None:
            distributed.watch(check_collectives=check)
        dist.init_process_group("gloo")
        one = torch.ones(1)
        dist.all_reduce(one)
        started = time.perf_counter()
        for _ in range(GROUPS):
            dist.new_group(list(range(RANKS)))
        groups = time.perf_counter() - started
        dist.barrier()
        started = time.perf_counter()
        for _ in range(COLLECTIVES):
            dist.all_reduce(one)
        return groups, time.perf_counter() - started

    values = [done.value for done in ranks.run(RANKS, work)]
    return max(groups for groups, _ in values), max(collectives for _, collectives in values)

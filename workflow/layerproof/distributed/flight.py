"""The collectives that torch's Flight Recorder has of this process: also those that C++ runs, as DDP and DTensor do."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from .groups import named
from .marks import Step, longest_open

SIZE = "TORCH_FR_BUFFER_SIZE"
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")
"""gloo's and XCCL's, and NCCL's."""
BY_FLIGHT = ", by Flight Recorder"
"""The end of the groups of its steps, which it counts in another way than marks do."""
ALIKE = ("all_reduce", "allreduce", "broadcast")
"""Collectives whose input has the same shape on all ranks."""


def switch_on() -> None:
    """Has torch record the latest collectives, if it has not begun yet."""
    os.environ.setdefault(SIZE, "256")


def steps() -> list[Step]:
    """The recorded collectives of all groups of this process. Those that are not complete have not ended."""
    names = {distributed_c10d._world.pg_names[group]: group for group in distributed_c10d._world.pg_map}
    found = []
    for dump in _dumps():
        for entry in dump.get("entries", ()):
            group = names.get(entry["process_group"][0])
            if group is not None and not entry["is_p2p"]:
                found.append(_step(entry, group))
    return found


def groups() -> dict[str, tuple[int, ...]]:
    """The ranks of all groups of this process, as steps name them here."""
    known = [named(group) for group in list(distributed_c10d._world.pg_map)]
    return {f"{name}{BY_FLIGHT}": members for name, members in known}


def open_step() -> Step | None:
    """The collective that has not been complete for longest, if there is one."""
    return longest_open(steps()) if dist.is_initialized() else None


def _step(entry: Mapping[str, Any], group: Any) -> Step:
    """One entry. It has ended when it is retired: gloo's state stays "scheduled", and `pg_status` counts messages, too."""
    shapes = [
        f"{_dtype(dtype)}{shape}" for dtype, shape in zip(entry["input_dtypes"], entry["input_sizes"], strict=True)
    ]
    name = entry["profiling_name"].rpartition(":")[2]
    began = entry["time_created_ns"] / 1e9
    return Step(
        name,
        ", ".join(shapes) if name in ALIKE else "",
        f"{named(group)[0]}{BY_FLIGHT}",
        entry["collective_seq_id"],
        "",  # which it does not have
        began,
        max(began, time.time()) if entry["retired"] else None,
    )


def _dtype(name: str) -> str:
    """torch's name of a dtype that C++ calls "Float", say."""
    return str(getattr(torch, name.lower(), name)).removeprefix("torch.")


def _dumps() -> Iterator[dict[str, Any]]:
    if SIZE not in os.environ:
        return
    for name in DUMPS:
        if dump := getattr(_distributed_c10d, name, None):
            yield pickle.loads(dump(includeCollectives=True, includeStackTraces=False, onlyActive=False))

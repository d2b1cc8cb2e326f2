"""The distributed environment of a job, initialised once, before any model object exists.

Address, port, rank and size come from the environment, as torchrun and Ray actors set them. A job started alone is a
world of one process on a free port. A group can be left and joined again in the same process.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from . import mesh, watch
from .board import address, free_port
from .errors import DistributedError

BACKENDS = {"xla": "xla", "neuron": "neuron", "cuda": "nccl", "xpu": "xccl", "npu": "hccl", "cpu": "gloo"}
"""The backend of each platform's collectives."""


@dataclass(frozen=True)
class Environment:
    """Where this process runs: its device, the collective backend, its rank and the number of ranks."""

    device: torch.device
    hardware: str
    backend: str
    rank: int
    world_size: int


@dataclass
class _World:
    """What remains of the group while this process lives. Ranks that set the group up again by `env://` would meet in what
    the group before left in the store, so each life of the group has a part of it.
    """

    store: Any = None
    address: str = ""
    lives: int = 0
    control: Any = None


_world = _World()


def initialise(platform: str, pjrt_device: str = "auto", timeout: timedelta | None = None) -> Environment:
    """Initialises torch.distributed for `platform`, one of BACKENDS; idempotent.

    `pjrt_device` names the XLA device (`CPU`, `NEURON`, `TPU`); `auto` uses $PJRT_DEVICE, or CPU if it is not set.
    `timeout` is torch's own by default. Several ranks are watched (`distributed.watch`). Each rank prints one line that
    says what it has joined.

    Raises:
        DistributedError: if the device does not exist or the process group cannot be formed.
    """
    hardware = platform
    if platform == "xla":
        if pjrt_device != "auto":
            os.environ["PJRT_DEVICE"] = pjrt_device
        hardware = os.environ.setdefault("PJRT_DEVICE", "CPU")
        if hardware == "CPU":
            _schedule_for_memory()
    _default_environment()
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except ValueError as error:
        raise DistributedError(
            f"RANK and WORLD_SIZE must be numbers ({error}). Correct the launcher's environment."
        ) from None
    device = _device(platform, hardware, rank)
    backend = BACKENDS[platform]
    if not dist.is_initialized():
        _join(backend, rank, world_size, device if platform == "cuda" else None, timeout)
        where = f"{device} ({hardware})" if hardware != str(device) else hardware
        # One write, because ranks share a log.
        print(f"rank {rank} of {world_size}: {backend} at {address()} on {where}\n", end="", flush=True)
    elif (rank, world_size) != (dist.get_rank(), dist.get_world_size()):
        there = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        raise DistributedError(
            f"rank {rank} of {world_size}: this process already belongs to a group, as {there}. Start a new process."
        )
    return Environment(device, hardware, backend, rank, world_size)


def _join(backend: str, rank: int, world_size: int, device_id: torch.device | None, timeout: timedelta | None) -> None:
    """Joins the default group. With `device_id` for XPU, gloo groups cannot be created later, so it is for CUDA alone."""
    if world_size > 1:
        watch()
    where: dict[str, Any] = {"init_method": "env://"}
    if _world.address == address():
        _world.lives += 1
        store = distributed_c10d.PrefixStore(f"life {_world.lives}", _world.store)
        where = {"store": store, "rank": rank, "world_size": world_size}
    try:
        dist.init_process_group(backend, timeout=timeout, device_id=device_id, **where)
        if "store" not in where:
            _world.store, _world.address = distributed_c10d._get_default_store(), address()
        if world_size > 1 and backend != BACKENDS["cpu"]:
            _world.control = dist.new_group(backend=BACKENDS["cpu"])
    except (RuntimeError, ValueError) as error:
        raise DistributedError(
            f"rank {rank}: cannot form a process group at {address()} ({error}). Check MASTER_ADDR and MASTER_PORT."
        ) from error


def leave() -> None:
    """Leaves the group; `initialise` joins it again. All ranks have to do the same. Does nothing without a group."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _world.control = None
    mesh.launched.cache_clear()


def world_size() -> int:
    """Returns the number of ranks in this process's group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def of_all_ranks[T](value: T) -> list[T]:
    """Gathers the value of each rank in this process's group, by rank; values must pickle and may be on any device."""
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, value, group=control_group())
    return gathered


def control_group() -> Any:
    """The group of all ranks for messages between hosts: over gloo, whatever the backend of the devices is."""
    return _world.control or dist.group.WORLD


def is_on_host(pjrt_device: str) -> bool:
    """Whether the ranks run on the host without XLA, because XLA's CPU client does not support several processes."""
    hardware = os.environ.get("PJRT_DEVICE", "CPU") if pjrt_device == "auto" else pjrt_device
    is_pretended = dist.is_initialized() and dist.get_backend() == BACKENDS["xla"]
    return hardware == "CPU" and int(os.environ.get("WORLD_SIZE", 1)) > 1 and not is_pretended


def join_fake_group() -> None:
    """Joins a fake group with the environment's rank and size, to trace this rank's graph on XLA's CPU.

    NxD does the same to compile for all ranks. The graph contains collectives, but cannot run them.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    import torch_xla.distributed.xla_backend  # noqa: F401 registers the backend
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch_xla import runtime

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    runtime.world_size = lambda: world_size  # otherwise torch_xla omits collectives, because it has one device
    runtime.global_ordinal = lambda: rank
    dist.init_process_group(BACKENDS["xla"], rank=rank, world_size=world_size, store=FakeStore())


def _schedule_for_memory() -> None:
    """Makes XLA's CPU compiler order operations so that they need less memory.

    By default it orders them for many threads and does everything possible at once, such as widening the weights of all
    experts.
    """
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}=false".strip()


def _default_environment() -> None:
    """Sets up a world of one process for jobs that no launcher started."""
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        os.environ["MASTER_PORT"] = str(free_port())


def _device(platform: str, hardware: str, rank: int) -> torch.device:
    if platform == "xla":
        try:
            import torch_xla
            import torch_xla.distributed.xla_backend  # registers the backend

            return torch_xla.device()
        except (ImportError, RuntimeError) as error:
            raise DistributedError(
                f"port.device: no XLA device for PJRT_DEVICE={hardware} ({_first_line(error)})."
            ) from error
    if platform == "cpu":
        return torch.device("cpu")
    device = torch.device(platform, int(os.environ["LOCAL_RANK"]))
    torch.get_device_module(platform).set_device(device)
    return device


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)

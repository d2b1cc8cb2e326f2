"""Puts back what code of somebody else may leave changed in a process that runs the next stage, too."""

from __future__ import annotations

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

from layerproof.threads import declared


@contextlib.contextmanager
def leaving_no_trace() -> Iterator[None]:
    """Restores the working directory, torch's defaults and threads, and random states when the block ends.

    A copy of the process that the block forked and that comes to its end here ends without a word: the job's outputs
    are for the process that was told to write them.
    """
    process = os.getpid()
    restore = [_directory(), _random(), *_numpy(), *_torch()]
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(0)
        for put_back in restore:
            put_back()


def _directory() -> Callable[[], object]:
    directory = os.getcwd()
    return lambda: os.chdir(directory)


def _random() -> Callable[[], object]:
    state = random.getstate()
    return lambda: random.setstate(state)


def _numpy() -> list[Callable[[], object]]:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return [_numpy_as_imported]
    state, errors = numpy.random.get_state(), numpy.geterr()
    return [lambda: numpy.random.set_state(state), lambda: numpy.seterr(**errors)]


def _numpy_as_imported() -> None:
    if numpy := sys.modules.get("numpy"):
        numpy.seterr(divide="warn", over="warn", under="ignore", invalid="warn")
        numpy.random.seed()


def _torch() -> list[Callable[[], object]]:
    torch = sys.modules.get("torch")
    if torch is None:
        return [_torch_as_imported]
    dtype, device, threads = torch.get_default_dtype(), _device(torch), torch.get_num_threads()
    state, grad = torch.random.get_rng_state(), torch.is_grad_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [
        lambda: torch.set_default_dtype(dtype),
        lambda: _device(torch) == device or torch.set_default_device(device or "cpu"),
        lambda: torch.set_num_threads(threads),
        lambda: torch.random.set_rng_state(state),
        lambda: torch.set_grad_enabled(grad),
        lambda: torch.use_deterministic_algorithms(deterministic),
    ]


def _device(torch: Any) -> Any:
    """The default device."""
    try:
        return torch.get_default_device()
    except AttributeError:  # torch 2.9 after set_default_device(None), which breaks transformers as well
        return None


def _torch_as_imported() -> None:
    """Importing torch takes longer than most jobs, so what the block imported gets its defaults."""
    if torch := sys.modules.get("torch"):
        torch.set_default_dtype(torch.float32)
        if _device(torch) != torch.device("cpu"):
            torch.set_default_device("cpu")
        torch.set_grad_enabled(True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(declared())
        torch.seed()

"""Decides which devices golden and port run on."""

from __future__ import annotations

import os
from pathlib import Path

PLUGINS = ("libneuronxla", "libtpu", "torch_xla_cuda_plugin")
"""Packages with which torch_xla may choose a device other than the CPU by default."""


def is_cpu(device: str | None) -> bool:
    """Whether `port.device` is known to be XLA:CPU, which forked processes may share with their parent."""
    if device != "auto":
        return device == "CPU"
    from importlib.util import find_spec

    return (os.environ.get("PJRT_DEVICE") or ("" if any(map(find_spec, PLUGINS)) else "CPU")) == "CPU"


def port_text(device: str) -> str:
    """What a port runs on, for people."""
    return "XLA:CPU" if is_cpu(device) else "XLA" if device == "auto" else f"XLA:{device}"


def golden_text(device: str) -> str:
    """What a golden runs on, for people. `auto` is a GPU if the host has one; only its jobs know whether torch sees it."""
    return ("GPU" if Path("/dev/nvidiactl").exists() else "CPU") if device == "auto" else device

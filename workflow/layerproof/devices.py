"""Decides which device a port runs on."""

from __future__ import annotations

import os

PLUGINS = ("libneuronxla", "libtpu", "torch_xla_cuda_plugin")
"""Packages with which torch_xla may choose a device other than the CPU by default."""


def is_cpu(device: str | None) -> bool:
    """Whether `port.device` is known to be XLA:CPU, which forked processes may share with their parent."""
    if device != "auto":
        return device == "CPU"
    from importlib.util import find_spec

    return (os.environ.get("PJRT_DEVICE") or ("" if any(map(find_spec, PLUGINS)) else "CPU")) == "CPU"

"""Which device a port runs on."""

from __future__ import annotations

import os

PLUGINS = ("libneuronxla", "libtpu", "torch_xla_cuda_plugin")
"""Packages with which torch_xla may take another device than the CPU by itself."""


def is_cpu(device: str | None) -> bool:
    """Whether `port.device` is known to be XLA:CPU, which processes may share with the one that forked them."""
    if device != "auto":
        return device == "CPU"
    from importlib.util import find_spec

    return (os.environ.get("PJRT_DEVICE") or ("" if any(map(find_spec, PLUGINS)) else "CPU")) == "CPU"

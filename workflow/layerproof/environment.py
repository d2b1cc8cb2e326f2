"""The software and hardware of this process, for the report."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

PACKAGES = (
    "torch",
    "torch-xla",
    "transformers",
    "accelerate",
    "safetensors",
    "tokenizers",
    "numpy",
    "numba",
    "h5py",
    "matplotlib",
    "torch-neuronx",
    "neuronx-cc",
    "libneuronxla",
    "neuronx-distributed",
    "neuronx-distributed-inference",
)
"""Packages whose versions go into a job's record."""


@functools.cache
def package_versions() -> dict[str, str]:
    """Returns the versions of installed packages that may affect numerical results."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def software(versions: Mapping[str, str]) -> dict[str, str]:
    """Returns versions by name, plus the image's digest if `versions` names the container of the job."""
    image = {"Container": versions["container"]} if "container" in versions else {}
    return {**image, "Python": platform.python_version(), **package_versions()}


def hardware() -> dict[str, str]:
    """Returns processor, cores, memory and platform of the host."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "Processor": _processor(),
        "Cores": str(os.cpu_count()),
        "Memory": f"{memory / 2**30:.1f} GiB",
        "Platform": f"{platform.system()} {platform.machine()}",
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"

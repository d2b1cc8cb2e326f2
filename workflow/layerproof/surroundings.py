"""The software and hardware of this process, as the report tells them."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from layerproof.jobs import package_versions


def software(spec: Mapping[str, Any]) -> dict[str, str]:
    """Versions by name, and the image's digest if the job runs in a container: `spec` is its settings."""
    image = {"Container": spec["container"]} if "container" in spec else {}
    return {**image, "Python": platform.python_version(), **package_versions()}


def hardware() -> dict[str, str]:
    """Processor, cores, memory and platform of the host."""
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

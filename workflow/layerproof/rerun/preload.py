"""Imports packages once, before processes that need them are forked."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib

PACKAGES = ("torch_xla", "h5py", "transformers.modeling_utils")
"""What the ranks of a port on the host need. Ranks on a device start from nothing: importing may touch the device, and
a process cannot use one that its parent touched.
"""


@functools.cache
def import_packages(names: tuple[str, ...]) -> None:
    """Imports packages in this process. One that cannot be imported is left to the process that needs it, which reports
    it.
    """
    with contextlib.suppress(Exception):
        for name in names:
            importlib.import_module(name)
    gc.freeze()  # or looking through them would copy their memory in each process

"""Imports packages once, before processes that need them are forked."""

from __future__ import annotations

import functools
import gc
import importlib
import traceback

NEEDED = ("torch_xla", "h5py")
"""What a server imports for ports on the host before it forks the first of them."""

PACKAGES = (*NEEDED, "transformers.modeling_utils")
"""What it imports for the next ones, if one had use for it, and their job for its ranks. Ports on a device start from
nothing: importing may touch it, and a process cannot use one that its parent did.
"""


@functools.cache
def import_packages(names: tuple[str, ...]) -> dict[str, float] | None:
    """Imports what processes that are forked here have use for. Returns the files of our own that are loaded after it, with
    their times, or None if a package cannot be imported, which is printed.
    """
    from layerproof.rerun.recorder import sources

    try:
        for name in names:
            importlib.import_module(name)
    except Exception:
        traceback.print_exc()
        return None
    gc.freeze()  # or looking through them would copy their memory in each runner
    return sources()

"""The threads that a job may use."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor


def declared() -> int:
    """The threads that the job's rule declares, which Snakemake puts into OMP_NUM_THREADS; one if nobody declares any."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(text)) if text.isdigit() else 1


def mapped[T, R](function: Callable[[T], R], values: Iterable[T]) -> list[R]:
    """Calls a function for each value, on the `declared` threads, and returns the results in order.

    Worth it where the function reads files, computes digests, or runs kernels, which other threads need not wait for.
    """
    items, count = list(values), declared()
    if count == 1 or len(items) < 2:
        return list(map(function, items))
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(function, items))

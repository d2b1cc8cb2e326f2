"""Processes that know nothing of the tests that ran before."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

SPAWN = multiprocessing.get_context("spawn")


def afresh(function, *arguments, context=SPAWN):
    """Calls a function in a new process, which is in no process group yet."""
    with ProcessPoolExecutor(1, context) as process:
        return process.submit(function, *arguments).result()

"""The order of tests: what waits longest comes first. What one leaves is not for the next, but for what they all need."""

import fcntl
import os
import sys

import pytest

SLOWEST_FIRST = ("slurm", "apptainer", "s3", "workflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        marks = [SLOWEST_FIRST.index(mark.name) for mark in item.iter_markers() if mark.name in SLOWEST_FIRST]
        return min(marks, default=len(SLOWEST_FIRST))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def own_path():
    """What a test imports from, a port called torch.py among it, is not for the next one."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """The default checkpoint, trained once for all processes of this run, for tests that are not about how it is made."""
    from layerproof.model import tiny

    own = tmp_path_factory.getbasetemp()
    made = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "trained"
    with open(made.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            half = made.with_suffix(".half")
            half.mkdir()
            tiny.make(half)
            half.rename(made)
    return made

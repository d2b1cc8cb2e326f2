"""The order of tests: what waits longest comes first. What one leaves is not for the next, but for what they all need."""

import os
import sys

import pytest

from configs import QUICK, REPOSITORY
from layerproof.paths import TINY_CHECKPOINT

os.environ |= QUICK
# Jobs of a workflow, and servers, share compiled modules as a user's do.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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
def trained():
    """The checkpoint that comes with Layerproof, for tests that only read it."""
    return REPOSITORY / TINY_CHECKPOINT

"""The order of tests: what waits longest comes first. And what one leaves is not for the next."""

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

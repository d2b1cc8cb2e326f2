"""The order of tests: what waits longest comes first, so that it does not wait alone at the end."""

import pytest

SLOWEST_FIRST = ("slurm", "apptainer", "s3", "workflow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        marks = [SLOWEST_FIRST.index(mark.name) for mark in item.iter_markers() if mark.name in SLOWEST_FIRST]
        return min(marks, default=len(SLOWEST_FIRST))

    items.sort(key=place)

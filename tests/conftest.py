"""The order of tests: what waits longest comes first. What one leaves is not for the next, but for what they all need."""

import fcntl
import os
import sys
from pathlib import Path

import hypothesis
import pytest

from configs import QUICK, REPOSITORY
from layerproof.paths import TINY_CHECKPOINT

os.environ |= QUICK
hypothesis.settings.register_profile("layerproof", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("layerproof")
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


@pytest.fixture(autouse=True)
def plain_new_group():
    """torch_xla replaces new_group when it is imported, and its own refuses use_local_synchronization."""
    yield
    if "torch_xla.distributed.xla_backend" in sys.modules:
        distributed = sys.modules["torch.distributed"]
        distributed.new_group = distributed.distributed_c10d.new_group


@pytest.fixture(scope="session")
def trained():
    """The checkpoint that comes with Layerproof, for tests that only read it."""
    return REPOSITORY / TINY_CHECKPOINT


@pytest.fixture(scope="session")
def golden_of(tmp_path_factory):
    """`golden_of(NAME)` is a folder with a checkpoint of models.py in model/ and its golden stages beside it, made once for
    all tests, which only read them.
    """
    base = tmp_path_factory.getbasetemp()
    everyones = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str) -> Path:
        from models import save
        from streaming import stream

        folder = everyones / f"golden-{name}"
        with open(everyones / f"golden-{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "done").exists():
                save(name, folder / "model")
                stream(folder / "model", folder)
                (folder / "done").touch()
        return folder

    return made

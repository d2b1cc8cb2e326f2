"""Pruned files: what stays in them, what they stand for, and how damage shows."""

import resource
import signal

import h5py
import numpy as np
import pytest

from layerproof.errors import StageError, UserError
from layerproof.files import sha256
from layerproof.tensors import hdf5, pruning
from layerproof.tensors.tensor import Tensor

OUT = Tensor(np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 3, 4), "float32")
CHOICE = Tensor(np.arange(6, dtype=np.int32).reshape(2, 3, 1), "int32")
VALID = np.array([[True, True, False], [True, True, True]])


@pytest.fixture
def whole(tmp_path):
    path = tmp_path / "layer_000.h5"
    groups = {
        "golden": {"attn.out": OUT, "router.choice": CHOICE, "out": OUT},
        "truth": {"attn.out": OUT, "out": OUT},
    }
    hdf5.write(path, groups, valid=VALID, attributes={"stage": "layer_000"}, documents={"held": {"w": "bfloat16"}})
    return path


def facts(path):
    """Attributes of a file and of all that is in it."""
    with h5py.File(path) as file:
        found = {"": hdf5.attributes(file)}
        file.visititems(lambda name, node: found.update({name: hdf5.attributes(node)}))
    return found


def test_outputs_statistics_and_documents_stay(whole):
    before = facts(whole)
    pruning.prune(whole)
    after = facts(whole)
    for name, entry in after.items():
        shape = entry.pop("shape", None)
        assert (shape is None) == (name not in ("golden/attn.out", "golden/router.choice", "truth/attn.out")), name
    assert after == before
    for name in ("golden/out", "truth/out"):
        kept = hdf5.read(whole, name)
        assert kept.dtype == "float32" and np.array_equal(kept.data, OUT.data)
    assert hdf5.read_document(whole, "held") == {"w": "bfloat16"}
    with hdf5.reading(whole) as file:
        assert hdf5.dtypes(file, "golden") == {"attn.out": "float32", "router.choice": "int32", "out": "float32"}


def test_a_trimmed_file_stands_for_the_whole_one(whole):
    digest, status = sha256(whole), whole.stat()
    assert pruning.read(whole) is None and pruning.digest(whole) == digest
    assert pruning.original_bytes(whole) == status.st_size
    trimmed = pruning.prune(whole)
    assert pruning.read(whole) == trimmed and (trimmed.original, trimmed.original_bytes) == (digest, status.st_size)
    assert pruning.digest(whole) == digest and sha256(whole) != digest
    assert pruning.original_bytes(whole) == status.st_size != whole.stat().st_size
    assert whole.stat().st_mtime_ns == status.st_mtime_ns, "or Snakemake runs what depends on it"
    assert trimmed.is_undamaged()
    content = whole.read_bytes()
    assert pruning.prune(whole) == trimmed and whole.read_bytes() == content, "once is enough"


def test_a_file_that_is_trimmed_while_its_digest_is_taken(whole, monkeypatch):
    """As by the job that trims it, while the next stage's is being started."""
    digest, parsed = sha256(whole), pruning._parsed

    def trims(path, block):
        found = parsed(path, block)
        monkeypatch.setattr(pruning, "_parsed", parsed)
        pruning.prune(path)
        return found

    monkeypatch.setattr(pruning, "_parsed", trims)
    assert pruning.digest(whole) == digest and pruning.read(whole)


def test_tensors_that_were_dropped_are_not_taken_for_none(whole):
    pruning.prune(whole)
    with pytest.raises(StageError, match=r"layer_000.h5: contains only outputs \(compare.taps: auto\).*--forcerun"):
        hdf5.read_group(whole, "golden")


@pytest.mark.parametrize("byte", [pruning.BLOCK_BYTES + 5, -1])
def test_damage_of_a_trimmed_file_shows(whole, byte):
    pruning.prune(whole)
    content = bytearray(whole.read_bytes())
    content[byte] ^= 1
    whole.write_bytes(content)
    assert not pruning.read(whole).is_undamaged()


def test_a_file_with_a_damaged_first_line_is_no_trimmed_one(whole):
    pruning.prune(whole)
    content = whole.read_bytes()
    whole.write_bytes(content[: len(pruning.MAGIC)] + bytes(pruning.BLOCK_BYTES) + content[pruning.BLOCK_BYTES :])
    assert pruning.read(whole) is None and pruning.digest(whole) == sha256(whole)


@pytest.mark.parametrize("limit", [100, 1000])
def test_a_full_disk_leaves_the_whole_file(whole, limit):
    """A limit on the size of files stands in for it. The file is well: nobody is told to delete it."""
    content = whole.read_bytes()
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
    try:
        with pytest.raises(StageError, match=r"layer_000.h5: cannot be written \(.*\). Free disk space and run again."):
            pruning.prune(whole)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert whole.read_bytes() == content and list(whole.parent.iterdir()) == [whole]


def test_a_damaged_file_is_told_from_a_full_disk(whole):
    content = whole.read_bytes()[:-100]
    whole.write_bytes(content)
    with pytest.raises(StageError, match=r"layer_000.h5: cannot be read, the file is damaged"):
        pruning.prune(whole)
    assert whole.read_bytes() == content and list(whole.parent.iterdir()) == [whole]


def test_a_job_that_reads_all_has_trimmed_files_made_again(whole, tmp_path):
    pruning.require_intact([whole, tmp_path / "none.h5"])
    pruning.prune(whole)
    with pytest.raises(
        UserError, match=r"layer_000.h5: contained only outputs.*all taps are needed, so it was removed. Run again."
    ):
        pruning.require_intact([whole])
    assert not whole.exists()

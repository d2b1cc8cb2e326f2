"""Files of tensors: bit for bit, equal for equal tensors, and no damaged file is believed."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from layerproof.errors import StageError, StageMissing
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import STORAGE, Tensor

WORKFLOW = Path(hdf5.__file__).parents[2]
GROUPS = {
    "golden": {
        "out": Tensor(np.arange(0x3F80, 0x3F8C, dtype=np.uint16).reshape(1, 3, 4), "bfloat16"),
        "router.choice": Tensor(np.array([[3, 1, 2]], np.int32), "int32"),
    },
    "truth": {"out": Tensor(np.linspace(-1, 1, 12, dtype=np.float32).reshape(1, 3, 4), "float32")},
}
FACTS = {"stage": "layer_000", "device": "cpu", "compilations": 2, "same": True}


def content(path):
    """Everything that a reader can learn from a file."""
    with hdf5.reading(path) as file:
        found = {"facts": hdf5.attributes(file)}
        for group in GROUPS:
            for name, tensor in hdf5.taps(file, group).items():
                data = tensor.data[...]
                found[group, name] = tensor.dtype, tensor.shape, data.tobytes(), hdf5.attributes(tensor.data)
    return found


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "layer_000.h5"
    hdf5.write(path, GROUPS, attributes=FACTS)
    return path


def bits(dtype):
    """Arrays of any bits of a stored dtype: NaNs with payloads, -0, subnormals and infinities among them."""
    storage = STORAGE[dtype]
    if dtype == "bool":
        return arrays(storage, array_shapes(min_dims=2, max_dims=4, max_side=5))
    unsigned = np.dtype(f"u{storage.itemsize}")
    special = {2: [0x8000, 0x7F81, 0xFFC1, 0x7C01], 4: [0x80000000, 0x7F800001, 0xFFC12345], 8: [1 << 63]}
    elements = st.integers(0, 256**storage.itemsize - 1) | st.sampled_from(special[storage.itemsize])
    return arrays(unsigned, array_shapes(min_dims=2, max_dims=4, max_side=5), elements=elements).map(
        lambda array: array.view(storage)
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "int32", "int64", "bool"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_bits_come_back_from_the_file_and_from_torch(dtype, data):
    array = data.draw(bits(dtype))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "a.h5"
        hdf5.write(path, {"golden": {"out": Tensor(array, dtype)}})
        found = hdf5.read(path, "golden/out")
    assert (found.dtype, found.shape, found.data.tobytes()) == (dtype, array.shape, array.tobytes())
    as_torch = hdf5.to_torch(found)
    assert str(as_torch.dtype) == f"torch.{dtype}"
    again = hdf5.to_array(as_torch)
    assert (again.dtype, again.shape, again.data.tobytes()) == (dtype, array.shape, array.tobytes())


def test_to_array_keeps_the_values_of_a_view_that_is_not_contiguous():
    tensor = torch.arange(24, dtype=torch.bfloat16).view(2, 3, 4).transpose(1, 2)
    assert torch.equal(hdf5.to_torch(hdf5.to_array(tensor)), tensor)


@pytest.mark.parametrize(("length", "chunk"), [(512, 512), (513, 257), (900, 450), (1025, 342)])
def test_tensors_of_several_chunks_come_back(tmp_path, length, chunk):
    array = np.random.default_rng(0).standard_normal((2, length, 512)).astype(np.float32)
    hdf5.write(tmp_path / "a.h5", {"golden": {"out": Tensor(array, "float32")}})
    with hdf5.reading(tmp_path / "a.h5") as file:
        assert file["golden/out"].chunks == (1, chunk, 512), "whole tokens of one prompt, a megabyte at most"
    assert hdf5.read(tmp_path / "a.h5", "golden/out").data.tobytes() == array.tobytes()
    assert (tmp_path / "a.h5").stat().st_size < 1.01 * array.nbytes, "chunks are as full as can be"


def test_a_tensor_without_elements_comes_back(tmp_path):
    hdf5.write(tmp_path / "a.h5", {"golden": {"out": Tensor(np.zeros((1, 3, 0), np.float32), "float32")}})
    assert hdf5.read(tmp_path / "a.h5", "golden/out").shape == (1, 3, 0)


def test_equal_tensors_make_equal_files(tmp_path, small):
    os.utime(small, (1, 1))
    copy = {
        group: {name: Tensor(t.data.copy(), t.dtype) for name, t in members.items()}
        for group, members in GROUPS.items()
    }
    hdf5.write(tmp_path / "again.h5", copy, attributes=dict(FACTS))
    assert (tmp_path / "again.h5").read_bytes() == small.read_bytes()


def test_facts_and_statistics_are_attributes(tmp_path):
    values = np.array([[[1, 2], [3, np.nan], [100, np.inf]]], np.float32)
    valid = np.array([[True, True, False]])
    path = tmp_path / "a.h5"
    hdf5.write(path, {"port": {"out": Tensor(values, "float32")}}, valid=valid, attributes={"device": "Größe", "n": 3})
    with hdf5.reading(path) as file:
        assert hdf5.attributes(file) == {"device": "Größe", "n": 3}
        found = hdf5.attributes(file["port/out"])
    deviation = found.pop("std")
    assert found == {"dtype": "float32", "count": 3, "mean": 2.0, "min": 1.0, "max": 3.0, "nan": 1, "inf": 0}
    assert deviation == pytest.approx(np.sqrt(2 / 3))


def test_a_statistic_that_is_undefined_is_left_out(tmp_path):
    hdf5.write(tmp_path / "a.h5", {"port": {"out": Tensor(np.full((1, 2), np.nan, np.float32), "float32")}})
    with hdf5.reading(tmp_path / "a.h5") as file:
        assert hdf5.attributes(file["port/out"]) == {"dtype": "float32", "count": 0, "nan": 2, "inf": 0}


def test_taps_have_their_dots_and_a_group_that_is_not_there_has_none(small):
    with hdf5.reading(small) as file:
        assert set(hdf5.taps(file, "golden")) == {"out", "router.choice"}
        assert hdf5.taps(file, "port") == {}


@pytest.mark.parametrize("kind", [StageError, StageMissing])
@pytest.mark.parametrize("message", ["layer_003: Größe does not fit. Do this.", "x" * 100_000, "two\nlines"])
def test_a_failed_stage_leaves_its_message(tmp_path, kind, message):
    path = tmp_path / "layer_003.h5"
    hdf5.write_error(path, kind(message))
    with pytest.raises(StageError) as error, hdf5.reading(path):
        pytest.fail("the block must not run")
    assert type(error.value) is kind
    assert str(error.value) == message


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(StageError, match=r"a\.h5: does not exist\. Run") as error:
        hdf5.read(tmp_path / "a.h5", "golden/out")
    assert not isinstance(error.value, StageMissing)


def test_a_tensor_that_is_not_there(small):
    with pytest.raises(StageError, match=r"layer_000\.h5: cannot be read"):
        hdf5.read(small, "golden/attn.q")


@contextlib.contextmanager
def believed_only_if(whole, path):
    """The file is refused with a message that names it, or nothing that it tells has changed."""
    try:
        found = content(path)
    except StageError as error:
        assert str(path) in str(error)
        yield False
    else:
        assert found == whole, "a damaged file is believed"
        yield True


def test_no_truncated_file_is_believed(small):
    whole, data = content(small), small.read_bytes()
    lengths = [*range(0, 64), *range(64, len(data), 37), len(data) - 1]
    for length in lengths:
        small.write_bytes(data[:length])
        with believed_only_if(whole, small) as believed:
            assert not believed, f"{length} of {len(data)} bytes are believed to be all"


@pytest.mark.slow
def test_no_file_with_a_damaged_byte_is_believed(small):
    """Each byte in turn has all of its bits flipped, and then one of them. Bytes that hold nothing may change."""
    whole, data = content(small), small.read_bytes()
    assert b"GCOL" not in data, "damaged text of variable length can hang HDF5"
    refused = 0
    with open(small, "r+b", buffering=0) as file:
        for position, byte in enumerate(data):
            for mask in (0xFF, 1 << position % 8):
                file.seek(position)
                file.write(bytes([byte ^ mask]))
                with believed_only_if(whole, small) as believed:
                    refused += not believed
            file.seek(position)
            file.write(bytes([byte]))
    assert refused > len(data), "over half of the bytes hold something"
    assert content(small) == whole


def test_no_message_with_a_damaged_byte_is_believed(tmp_path):
    path = tmp_path / "layer_000.h5"
    hdf5.write_error(path, StageMissing("layer_000: shard is gone."))
    data = path.read_bytes()
    for position, byte in enumerate(data):
        path.write_bytes(data[:position] + bytes([byte ^ 1 << position % 8]) + data[position + 1 :])
        with pytest.raises(StageError) as error, hdf5.reading(path):
            pass
        same = type(error.value) is StageMissing and str(error.value) == "layer_000: shard is gone."
        assert same or (str(path) in str(error.value) and type(error.value) is StageError)


def test_text_is_never_of_variable_length(small):
    """HDF5 keeps such text in a heap without checksum, and can hang on one that is damaged."""
    assert b"GCOL" not in small.read_bytes()


def run_writer(path, before, elements, after=""):
    code = f"""
import resource, signal, sys, os
import numpy as np
from pathlib import Path
from layerproof import files
from layerproof.errors import StageError
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor
{before}
try:
    data = np.random.default_rng(0).integers(0, 65536, (1, {elements}), dtype=np.uint16)
    hdf5.write(Path(sys.argv[1]), {{"golden": {{"out": Tensor(data, "bfloat16")}}}})
except StageError as error:
    print(error)
    sys.exit(3)
"""
    return subprocess.run(
        [sys.executable, "-c", code, str(path)],
        env=os.environ | {"PYTHONPATH": str(WORKFLOW)},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize("limit", [100, 5_000, 300_000, 1_500_000])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(small, limit):
    whole = small.read_bytes()
    before = (
        f"signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))"
    )
    process = run_writer(small, before, 1_000_000)
    assert process.returncode == 3, process.stderr
    assert process.stdout.startswith(f"{small}: cannot be written (")
    assert process.stdout.count("\n") == 1 and "Free disk space" in process.stdout
    assert small.read_bytes() == whole
    assert [path.name for path in small.parent.iterdir()] == [small.name]


@pytest.mark.parametrize("moment", ["hdf5.statistics", "files.os.fsync", "files.os.replace"])
def test_a_kill_in_the_middle_leaves_the_old_file_and_the_next_job_writes_over_the_rest(small, moment):
    """Killed while tensors are written, when all are, and just before the file gets its name."""
    whole = small.read_bytes()
    process = run_writer(small, f"{moment} = lambda *a, **k: os.kill(os.getpid(), signal.SIGKILL)", 100_000)
    assert process.returncode == -signal.SIGKILL, process.stderr
    assert small.read_bytes() == whole
    hdf5.write(small, GROUPS, attributes={"stage": "layer_001"})
    assert content(small)["facts"] == {"stage": "layer_001"}
    assert [path.name for path in small.parent.iterdir()] == [small.name]


def test_a_folder_that_does_not_exist_is_made(tmp_path):
    hdf5.write(tmp_path / "chain" / "0-5" / "layer_000.h5", GROUPS)
    with h5py.File(tmp_path / "chain" / "0-5" / "layer_000.h5") as file:
        assert set(file) == {"golden", "truth"}

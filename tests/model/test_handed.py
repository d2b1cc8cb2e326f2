"""What stages hand over to later ones besides their output: where it is stored, who gets it, and what damage does."""

import numpy as np
import pytest

from layerproof.errors import StageError, StageMissing
from layerproof.model import handed
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor


def tensor(value, *shape):
    return Tensor(np.full(shape or (1, 3, 2), value, np.float32), "float32")


def write(path, before=None, group="golden", **outputs):
    """The file of a stage with `out` and these other outputs."""
    path.parent.mkdir(exist_ok=True)
    taps = {"out": tensor(0)} | {f"out/{name.replace('__', '.')}": value for name, value in outputs.items()}
    sources = handed.sources(before, path, group, taps)
    hdf5.write(path, {group: taps}, documents={hdf5.SOURCES: sources})
    return path


def given(path, stage, name="golden/out"):
    found = handed.stage_input(path, stage, name).handed
    return {name: float(one.data[0, 0, 0]) for name, one in found.items()}


def test_a_layer_gets_what_is_for_all_and_what_is_for_it_alone(tmp_path):
    embed = write(tmp_path / "embed.h5", x=tensor(1), y__layer_000=tensor(2), y__layer_001=tensor(3))
    assert given(embed, "layer_000") == {"x": 1, "y": 2}
    first = write(tmp_path / "layer_000.h5", embed)
    assert given(first, "layer_001") == {"x": 1, "y": 3}


def test_the_last_stage_that_hands_a_tensor_over_counts(tmp_path):
    embed = write(tmp_path / "embed.h5", kv=tensor(1))
    first = write(tmp_path / "layer_000.h5", embed, kv=tensor(2))
    second = write(tmp_path / "layer_001.h5", first)
    assert given(second, "layer_002") == {"kv": 2}


def test_the_last_one_counts_whether_it_is_for_all_or_for_one(tmp_path):
    embed = write(tmp_path / "embed.h5", kv__layer_002=tensor(1))
    first = write(tmp_path / "layer_000.h5", embed, kv=tensor(2))
    assert given(first, "layer_002") == {"kv": 2}
    second = write(tmp_path / "layer_001.h5", first, kv__layer_002=tensor(3))
    assert given(second, "layer_002") == {"kv": 3}


def test_what_follows_the_layers_gets_what_the_last_layer_gets(tmp_path):
    embed = write(tmp_path / "embed.h5", blocks__layer_001=tensor(4))
    last = write(tmp_path / "layer_001.h5", write(tmp_path / "layer_000.h5", embed))
    assert given(last, "norm") == {"blocks": 4}


def test_a_chain_takes_from_the_golden_what_stages_before_it_hand_over(tmp_path):
    embed = write(tmp_path / "golden" / "embed.h5", kv=tensor(1), x=tensor(5))
    first = write(tmp_path / "chain" / "layer_000.h5", embed, "port", kv=tensor(2))
    assert given(first, "layer_001", "port/out") == {"kv": 2, "x": 5}


def test_a_changed_source_changes_every_later_file(tmp_path):
    """So the digest of the file before a stage says whether anything that the stage gets has changed."""

    def later(value):
        embed = write(tmp_path / "embed.h5", x=tensor(value))
        write(tmp_path / "layer_001.h5", write(tmp_path / "layer_000.h5", embed))
        return (tmp_path / "layer_001.h5").read_bytes()

    assert later(1) == later(1) != later(2)


def test_outputs_of_a_stage_are_read_by_name_and_stay_when_it_is_pruned(tmp_path):
    path = write(tmp_path / "layer_000.h5", kv=tensor(7))
    with hdf5.reading(path) as file:
        assert list(hdf5.taps(file, "golden")) == ["out", "out/kv"]
    hdf5.write_pruned(path, tmp_path / "pruned.h5", 0)
    assert hdf5.read(tmp_path / "pruned.h5", "golden/out").data.shape == (1, 3, 2)
    assert hdf5.read(tmp_path / "pruned.h5", "golden/out/kv").data[0, 0, 0] == 7


def test_an_input_from_a_failed_stage_is_missing_and_keeps_the_first_message(tmp_path):
    hdf5.write_error(tmp_path / "embed.h5", StageError("embed: shard is gone."))
    with pytest.raises(StageMissing, match=r"earlier stage failed: embed: shard is gone\.") as first:
        handed.stage_input(tmp_path / "embed.h5", "layer_000")
    hdf5.write_error(tmp_path / "layer_000.h5", first.value)
    with pytest.raises(StageMissing) as second:
        handed.stage_input(tmp_path / "layer_000.h5", "layer_001")
    assert str(second.value) == str(first.value)


def test_a_source_that_is_gone_is_an_input_that_is_missing(tmp_path):
    embed = write(tmp_path / "embed.h5", x=tensor(1))
    first = write(tmp_path / "layer_000.h5", embed)
    embed.unlink()
    with pytest.raises(StageMissing, match=r"embed\.h5: does not exist"):
        handed.stage_input(first, "layer_001")

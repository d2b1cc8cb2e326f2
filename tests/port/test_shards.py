"""One file of a stage out of those of its ranks."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from layerproof.compare.ranks import Ranks
from layerproof.distributed.axes import coordinates
from layerproof.errors import StageError
from layerproof.port import placements, shards
from layerproof.port.contract import ZigZag
from layerproof.taps import SHAPES, SPLIT_BY_RANKS
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

VALID = np.ones((2, 3), bool)


def float32(values):
    return Tensor(np.asarray(values, np.float32), "float32")


def joined(folder, taps_of_ranks, graphs=(), valid=VALID, axes=None, said=None):
    """The joined file's taps, its document on the ranks, and what it has summed."""
    paths = [folder / f"{rank}.h5" for rank in range(len(taps_of_ranks))]
    for rank, (path, taps) in enumerate(zip(paths, taps_of_ranks, strict=True)):
        documents = {hdf5.CONVERSION: {"reads": {}, "parameters": {}}} | ({hdf5.PLACEMENTS: said} if said else {})
        hdf5.write(path, {"port": taps}, valid=valid, attributes={"kind": f"of rank {rank}"}, documents=documents)
    output = folder / "out.h5"
    shards.join(paths, output, valid, axes or {"tp": len(paths)}, graphs)
    return hdf5.read_group(output, "port"), hdf5.read_document(output, hdf5.RANKS)


def part_of(name, whole, keys, rank):
    return shards.part(name, whole, keys, rank, {"tp": len(keys)}, VALID.shape[1])


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(pieces=st.integers(1, 4), copies=st.integers(1, 4), adjacent=st.booleans(), per_head=st.booleans())
def test_parts_come_together_and_apart(tmp_path_factory, pieces, copies, adjacent, per_head):
    count = pieces * copies
    whole = random(2, 3, pieces * 2, *([5] if per_head else []))
    cut = np.split(whole, pieces, axis=2)
    order = [rank // copies if adjacent else rank % pieces for rank in range(count)]
    parts = [{"attn.k": float32(cut[index]), "out": float32(whole)} for index in order]
    folder = tmp_path_factory.mktemp("ranks")
    taps, ranks = joined(folder, parts)
    assert np.array_equal(taps["attn.k"].data, whole)
    part = {"axis": "tp", "dim": 2, "sizes": [2] * count, "copies": copies, "zigzag": False}
    assert ranks == {
        "count": count,
        "axes": {"tp": count},
        "parts": {"attn.k": [part]} if count > 1 else {},
        "differ": {},
    }
    keys = [shards.part_key(part["attn.k"]) for part in parts]
    for rank in range(count):
        assert np.array_equal(part_of("attn.k", float32(whole), keys, rank).data, cut[order[rank]])


PLACED = st.sampled_from([{"kind": "shard", "dim": 1}, {"kind": "zigzag", "dim": 1}, {"kind": "replicate"}])


@settings(max_examples=60)
@given(
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    cp=PLACED,
    ep=st.sampled_from([{"kind": "partial"}, {"kind": "replicate"}, {"kind": "shard", "dim": 3}]),
    seq=st.integers(6, 13),
)
def test_parts_over_several_axes_come_together_as_declared(tmp_path_factory, sizes, cp, ep, seq):
    axes = dict(zip(("ep", "cp", "tp"), sizes, strict=True))
    said = {"*": {"cp": cp, "ep": ep}}
    whole, valid = float32(random(2, seq, 6, 4)), np.ones((2, seq), bool)
    count = sizes[0] * sizes[1] * sizes[2]
    cut = []
    for rank in range(count):
        at = coordinates(rank, axes)
        own = np.array_split(whole.data, sizes[2], 2)[at["tp"]]
        if cp["kind"] == "shard":
            own = np.array_split(own, sizes[1], 1)[at["cp"]]
        elif cp["kind"] == "zigzag":
            chunks = np.array_split(own, 2 * sizes[1], 1)
            own = np.concatenate([chunks[at["cp"]], chunks[-1 - at["cp"]]], 1) if sizes[1] > 1 else own
        if ep["kind"] == "shard":
            own = np.array_split(own, sizes[0], 3)[at["ep"]]
        elif ep["kind"] == "partial" and at["ep"]:
            own = np.zeros_like(own)
        cut.append(float32(own))
    taps, ranks = joined(tmp_path_factory.mktemp("mesh"), [{"attn.q_rot": one} for one in cut], (), valid, axes, said)
    assert np.array_equal(taps["attn.q_rot"].data, whole.data) and ranks["differ"] == {}
    parts = list(map(shards.part_key, cut))
    for rank, one in enumerate(cut):
        own = shards.part("attn.q_rot", whole, parts, rank, axes, seq, said)
        assert np.array_equal(own.data, one.data)


def test_ranks_that_differ_are_named_by_their_place_in_the_mesh(tmp_path):
    values = random(2, 3, 4)
    parts = [{"attn.out": float32(values * (1 + (rank == 3)))} for rank in range(4)]
    said = {"attn.out": {"cp": {"kind": "replicate"}}}
    taps, content = joined(tmp_path, parts, axes={"cp": 2, "tp": 2}, said=said)
    ranks = Ranks(**content, summed={})
    reason = ranks.reason("attn.out", taps["attn.out"], taps["attn.out"], False)
    assert reason == (
        "ranks 1 and 3 (cp 1 of 2, tp 1 of 2) differ (relative L2 1 at the worst token), but should have the same tensor"
    )


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ({"attn.q": "shard"}, "PLACEMENTS must map taps to axes and placements"),
        ({"attn.q": {"dp": Shard(1)}}, "PLACEMENTS of attn.q: dp is no axis of a stage. Use ep, cp, tp."),
        ({"attn.q": {"tp": 2}}, "PLACEMENTS of attn.q: 2 is no placement"),
        ({"attn.q": {"tp": Partial("max")}}, "is no placement"),
        ({"atn.q": {"tp": Shard(2)}}, 'Did you mean "attn.q"?'),
    ],
)
def test_placements_that_are_none_are_refused_in_one_line(given_, said):
    with pytest.raises(StageError) as caught:
        placements.declared(SimpleNamespace(PLACEMENTS=given_), "port.py")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_placements_are_those_of_torch_and_a_zigzag():
    given_ = {"*": {"cp": ZigZag(1)}, "mlp.out": {"ep": Partial(), "tp": Replicate()}, "attn.q": {"tp": Shard(2)}}
    assert placements.declared(SimpleNamespace(PLACEMENTS=given_), "port.py") == {
        "*": {"cp": {"kind": "zigzag", "dim": 1}},
        "mlp.out": {"ep": {"kind": "partial"}, "tp": {"kind": "replicate"}},
        "attn.q": {"tp": {"kind": "shard", "dim": 2}},
    }
    assert placements.declared(SimpleNamespace(), "port.py") == {}


def test_a_tap_that_is_split_and_has_no_axis_to_split_is_left_to_its_shape():
    part = {"axis": "tp", "dim": 2, "sizes": [4, 4], "copies": 2, "zigzag": False}
    ranks = Ranks(count=2, axes={"tp": 2}, parts={"attn.q": [part]}, differ={}, summed={})
    flat, whole = float32(random(2, 3)), float32(random(2, 3, 8))
    assert ranks.reason("attn.q", flat, whole, False) is None
    assert "the same part" in (ranks.reason("attn.q", float32(random(2, 3, 4)), whole, False) or "")


def test_an_own_tap_is_split_if_its_parts_differ_and_whole_if_they_do_not(tmp_path):
    whole = random(2, 3, 4)
    cut = np.split(whole, 2, axis=2)
    parts = [{"mine": float32(part), "same": float32(whole)} for part in cut]
    taps, ranks = joined(tmp_path, parts)
    assert np.array_equal(taps["mine"].data, whole) and np.array_equal(taps["same"].data, whole)
    assert ranks["differ"] == {}
    keys = [shards.part_key(float32(part)) for part in cut]
    assert np.array_equal(part_of("mine", float32(whole), keys, 1).data, cut[1])
    keys = [shards.part_key(float32(whole))] * 2
    assert np.array_equal(part_of("same", float32(whole), keys, 1).data, whole)


def test_parts_may_be_of_different_sizes_and_empty(tmp_path):
    whole = random(2, 3, 5)
    cut = np.split(whole, [2, 2, 3], axis=2)
    taps, ranks = joined(tmp_path, [{"attn.q": float32(part), "out": float32(whole)} for part in cut])
    assert np.array_equal(taps["attn.q"].data, whole) and ranks["parts"]["attn.q"][0]["copies"] == 1
    keys = [shards.part_key(float32(part)) for part in cut]
    for rank, part in enumerate(cut):
        assert np.array_equal(part_of("attn.q", float32(whole), keys, rank).data, part)


def test_what_all_ranks_have_is_told_where_it_differs(tmp_path):
    one, other = random(2, 3, 4), random(2, 3, 4, seed=1)
    rounded = (one.astype(np.float16)).astype(np.float32)
    parts = [{"attn.out": float32(one), "mlp.out": float32(one), "out": float32(one)} for _ in range(3)]
    parts[1]["attn.out"], parts[2]["attn.out"] = float32(other), float32(rounded)
    parts[2]["out"] = float32(np.where(one > 1, np.nan, one))
    parts[1]["mlp.out"] = float32(one[:, :, :2])
    taps, ranks = joined(tmp_path, parts)
    assert all(np.array_equal(tap.data, one) for tap in taps.values()), "rank 0's"
    change = (np.linalg.norm(other.astype(float) - one, axis=2) / np.linalg.norm(one.astype(float), axis=2)).max()
    assert ranks["differ"]["attn.out"] == {"rank": 1, "first": 0, "axis": "tp", "change": pytest.approx(change)}
    assert ranks["differ"]["out"] == {"rank": 2, "first": 0, "axis": "tp", "change": None}
    assert ranks["differ"]["mlp.out"] == {"rank": 1, "first": 0, "axis": "tp", "change": None}
    summed = hdf5.read_group(tmp_path / "out.h5", "summed")
    assert list(summed) == ["attn.out"]
    np.testing.assert_allclose(summed["attn.out"].data, one + other + rounded, rtol=1e-6)


def test_a_nan_that_all_ranks_have_is_no_difference(tmp_path):
    values = random(2, 3, 4)
    values[0, 0, 0] = np.nan
    _, ranks = joined(tmp_path, [{"out": float32(values)}] * 2)
    assert ranks["differ"] == {}


def test_one_wrong_token_counts_beside_large_ones_and_padding_does_not(tmp_path):
    one = random(2, 3, 4)
    one[0, 0] *= 1e4
    wrong, padded = one.copy(), one.copy()
    wrong[1, 0] *= 1.03
    padded[1, 2] = np.nan
    valid = np.array([[True, True, True], [True, True, False]])
    parts = [{"attn.out": float32(one), "out": float32(one)}, {"attn.out": float32(wrong), "out": float32(padded)}]
    _, ranks = joined(tmp_path, parts, valid=valid)
    assert ranks["differ"] == {
        "attn.out": {"rank": 1, "first": 0, "axis": "tp", "change": pytest.approx(0.03, rel=1e-3)}
    }


def test_what_only_some_ranks_hand_over_is_told(tmp_path):
    taps = {"attn.q": float32(random(2, 3, 4)), "out": float32(random(2, 3, 4))}
    with pytest.raises(StageError, match=r"^rank 1 does not hand over attn\.q, but other ranks do"):
        joined(tmp_path, [taps, {"out": taps["out"]}, taps])


def test_what_any_rank_read_and_left_counts(tmp_path):
    taps = {"out": float32(random(2, 3, 4))}
    paths = [tmp_path / f"{rank}.h5" for rank in range(2)]
    for rank, path in enumerate(paths):
        entry = {"dtype": "bfloat16", "shape": [2], "of": [f"expert.{rank}"], "transposed": False, "initial": rank == 1}
        reads = {f"expert.{other}": int(other == rank) for other in range(3)}
        conversion = {"reads": reads, "parameters": {"experts": entry}}
        hdf5.write(path, {"port": taps}, documents={hdf5.CONVERSION: conversion})
    shards.join(paths, tmp_path / "out.h5", VALID, {"tp": 2})
    conversion = hdf5.read_document(tmp_path / "out.h5", hdf5.CONVERSION)
    assert conversion["reads"] == {"expert.0": 1, "expert.1": 1, "expert.2": 0}
    parameter = conversion["parameters"]["experts"]
    assert (parameter["of"], parameter["initial"]) == (["expert.0", "expert.1"], True)


def test_choices_that_differ_are_counted_and_not_summed(tmp_path):
    parts = [{"router.choice": Tensor(np.zeros((2, 3, 2), np.int32), "int32")} for _ in range(2)]
    parts[1]["router.choice"].data[0, 0, 0] = 1
    _, ranks = joined(tmp_path, parts)
    assert ranks["differ"]["router.choice"] == {"rank": 1, "first": 0, "axis": "tp", "change": pytest.approx(1 / 6)}
    assert hdf5.read_group(tmp_path / "out.h5", "summed") == {}


def test_parts_that_do_not_fit_are_left_for_the_comparison(tmp_path):
    taps, _ = joined(tmp_path, [{"attn.q": float32(random(2, 3, 4))}, {"attn.q": float32(random(2, 2, 4))}])
    assert taps["attn.q"].shape == (2, 3, 4)


def test_facts_are_those_of_rank_0_and_say_how_many_there_were(tmp_path):
    graph = {"constants": [], "depends_on_values": False}
    joined(tmp_path, [{"out": float32(random(2, 3, 4))}] * 3, [(graph, "a"), (graph, "a"), (graph, "b")])
    with hdf5.reading(tmp_path / "out.h5") as file:
        assert hdf5.attributes(file)["kind"] == "of rank 0"
        assert hdf5.document(file, hdf5.CONVERSION) == {"reads": {}, "parameters": {}, "ranks": 3}
        assert hdf5.document(file, hdf5.COMPILED) == graph | {"change": {}, "dtypes": {}, "other_on_ranks": [2]}


def test_a_rank_without_a_file_is_told(tmp_path):
    hdf5.write(tmp_path / "0.h5", {"port": {"out": float32(random(2, 3, 4))}})
    with pytest.raises(StageError, match=r"1\.h5: does not exist"):
        shards.join([tmp_path / "0.h5", tmp_path / "1.h5"], tmp_path / "out.h5", VALID, {"tp": 2})
    assert not (tmp_path / "out.h5").exists()


def test_ranks_that_all_hold_the_first_part_are_given_their_own():
    """By mistake: forced, each has what it should have."""
    whole = float32(random(2, 3, 8))
    part = part_of("attn.q", whole, [((2, 3, 4), "a")] * 2, 1)
    assert np.array_equal(part.data, whole.data[:, :, 4:])


def test_what_ranks_have_whole_is_not_cut():
    whole = float32(random(2, 3, 8))
    assert part_of("attn.out", whole, [((2, 3, 4), "a"), ((2, 3, 4), "b")], 1) is whole
    assert np.array_equal(part_of("attn.q", whole, [((2, 3, 8), "a")] * 2, 1).data, whole.data)
    assert part_of("attn.q", whole, [((2, 3, 3), "a")] * 2, 1) is whole
    assert set(SPLIT_BY_RANKS) < set(SHAPES)

"""Meshes over named axes, in forked ranks over gloo."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from distributed.backends import stand_in
from layerproof.distributed import axes, mesh
from layerproof.distributed.errors import DistributedError
from layerproof.port import ranks
from processes import afresh


def in_fresh_ranks(work, count, *arguments):
    """What ranks return that are forked from a process which is in no group yet."""
    return afresh(run, work, count, arguments)


def run(work, count, arguments):
    def of_rank(rank):
        from layerproof.distributed import process_group

        process_group.initialise("cpu")
        return work(rank, *arguments)

    return [done.value for done in ranks.run(count, of_rank)]


def groups_of(rank, sizes):
    made = mesh.create("cpu", **sizes)
    found = {}
    for axis in made.sizes:
        total = torch.tensor([rank])
        dist.all_reduce(total, group=made.group(axis))
        control = dist.get_process_group_ranks(made.control_group(axis))
        found[axis] = (dist.get_process_group_ranks(made.group(axis)), total.item(), control, made.at(axis))
    return str(made), found


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"tp": 2, "pp": 4}, {"ulysses": 2, "ring": 2, "cfg": 2}, {"ep": 3, "dp": 1}])
def test_each_axis_joins_the_ranks_that_differ_in_it_alone(sizes):
    count = math.prod(sizes.values())
    above_one = [axis for axis in axes.AXES if sizes.get(axis, 1) > 1]
    places = list(itertools.product(*(range(sizes[axis]) for axis in above_one)))  # the last axis fastest
    for rank, (text, found) in enumerate(in_fresh_ranks(groups_of, count, sizes)):
        assert text == ", ".join(
            f"{axis} {at} of {sizes[axis]}" for axis, at in zip(above_one, places[rank], strict=True)
        )
        for number, axis in enumerate(above_one):
            with_it = [
                other
                for other, place in enumerate(places)
                if all(place[at] == places[rank][at] for at in range(len(above_one)) if at != number)
            ]
            assert found[axis] == (with_it, sum(with_it), with_it, places[rank][number])


def beside_a_device(rank):
    from layerproof.distributed import process_group

    process_group.leave()
    stand_in("neuron")
    process_group._device = lambda *arguments: torch.device("cpu")
    process_group.initialise("neuron")
    made = mesh.create("cpu", tp=2, dp=2)
    backends = [dist.get_backend(group) for group in (made.group("tp"), made.control_group("tp"))]
    return backends, dist.get_process_group_ranks(made.control_group("dp"))


@pytest.mark.slow
def test_groups_of_a_device_have_groups_of_gloo_beside_them():
    found = in_fresh_ranks(beside_a_device, 4)
    assert found == [(["neuron", "gloo"], [rank % 2, rank % 2 + 2]) for rank in range(4)]


@given(st.dictionaries(st.sampled_from(axes.AXES), st.integers(1, 6)), st.integers(1, 64))
def test_sizes_make_up_the_world_or_the_arithmetic_is_shown(sizes, world):
    product = math.prod(sizes.values())
    if product == world:
        found = axes.checked(sizes, world)
        assert math.prod(found.values()) == world
        assert list(found) == [axis for axis in axes.AXES if axis in found]
        assert found == {"dp": 1} or all(sizes[axis] == size > 1 for axis, size in found.items())
    else:
        with pytest.raises(DistributedError) as raised:
            axes.checked(sizes, world)
        assert f"= {product} ranks, but there are {world}. Change an axis or WORLD_SIZE." in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ({"tp": 2, "pp": 4}, "pp 4 x tp 2 = 8 ranks, but there are 6. Change an axis or WORLD_SIZE."),
        ({"sp": 6}, "no axis is called sp. Use pp, dp, cfg, ep, cp, ring, ulysses, tp."),
        ({"tp": 0}, "tp = 0: an axis has at least 1 rank."),
    ],
)
def test_sizes_that_cannot_be_are_told(sizes, told):
    with pytest.raises(DistributedError) as raised:
        axes.checked(sizes, 6)
    assert str(raised.value) == told


def test_groups_of_sequence_parallelism_are_those_of_yunchang():
    """As its set_seq_parallel_pg lists them for 8 ranks."""
    low = mesh.sequence_groups(ulysses=2, ring=2, world_size=8)
    assert low["ulysses"] == [[0, 1], [2, 3], [4, 5], [6, 7]] and low["ring"] == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert low["sp"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    high = mesh.sequence_groups(ulysses=2, ring=4, world_size=8, ulysses_is_low=False)
    assert high["ring"] == [[0, 1, 2, 3], [4, 5, 6, 7]] and high["ulysses"] == [[0, 4], [1, 5], [2, 6], [3, 7]]
    with pytest.raises(DistributedError, match="ulysses 2 x ring 3 = 6 ranks, which 8 cannot be split into"):
        mesh.sequence_groups(ulysses=2, ring=3, world_size=8)


def checked_by(rank):
    wanted = mesh.sequence_groups(ulysses=2, ring=2, world_size=4)
    near = [dist.new_group(one) for one in wanted["ulysses"]][rank // 2]
    mesh.check_groups(wanted, {"ulysses": near})
    try:
        mesh.check_groups(wanted, {"ring": near})
    except DistributedError as error:
        return str(error)


@pytest.mark.slow
def test_groups_that_another_library_made_are_checked():
    assert in_fresh_ranks(checked_by, 4)[3] == "rank 3: its group ring has ranks [2, 3], but should have [1, 3]."

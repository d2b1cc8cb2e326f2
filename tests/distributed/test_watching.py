"""Groups that ranks create otherwise are told before torch connects them, in four forked ranks over gloo."""

import os
import shutil
import subprocess
import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.distributed_c10d import new_group

from configs import REPOSITORY
from layerproof.distributed import progress, watch, watching
from layerproof.errors import StageError
from layerproof.port import ranks
from processes import afresh

pytestmark = pytest.mark.slow

SOON = timedelta(seconds=5)
PAIRS = [[0, 1], [2, 3]]


def in_ranks(work, watched=True):
    """What each of four ranks returns, or the error that it ends with."""

    def run(rank):
        if dist.is_initialized():  # in the process that this one was forked from, by another test
            dist.destroy_process_group()
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        if watched:
            watch(SOON)
        try:
            return work(rank)
        except RuntimeError as error:
            return f"{type(error).__name__}: {error}"

    return [done.value for done in ranks.run(4, run)]


def line(work, lines):
    """Where a line of `work` is, counted from its `def`."""
    return f"{__file__}:{work.__code__.co_firstlineno + lines}"


def summed(group):
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total, group=group)
    return total.item()


def test_equal_groups_and_meshes_are_created_as_without_a_ledger():
    def work(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
        pair = [dist.new_group(one) for one in PAIRS][rank // 2]
        everyone = dist.new_group(iter(range(4)))
        own = new_group(PAIRS[rank // 2], use_local_synchronization=True)
        groups = [mesh.get_group("pp"), mesh.get_group("tp"), pair, everyone, own]
        return [summed(group) for group in groups], dict(watching._current[0][1].pages)

    first, second = [2.0, 1.0, 1.0, 6.0, 1.0], [4.0, 1.0, 1.0, 6.0, 1.0]
    sums, pages = zip(*in_ranks(work), strict=True)
    assert sums == (first, second, [2.0, 5.0, 5.0, 6.0, 5.0], [4.0, 5.0, 5.0, 6.0, 5.0])
    assert pages == ({"group all": 4, "group 0,1": 1},) * 2 + ({"group all": 4, "group 2,3": 1},) * 2, (
        "a mesh is one entry"
    )


def test_groups_in_another_order_are_told_to_all_ranks_before_they_are_crossed():
    def work(rank):
        for members in PAIRS if rank < 2 else PAIRS[::-1]:
            dist.new_group(members)

    at = line(work, 2)
    for rank, told in enumerate(in_ranks(work)):
        assert told == (
            f"DistributedError: rank {rank}: group 0 is not the same on all ranks: ranks 0 and 1 create new_group([0, 1]) "
            f"at {at}; ranks 2 and 3 create new_group([2, 3]) at {at}. All ranks must create all groups in one order."
        )


def test_a_rank_that_skips_a_group_is_named_at_the_deadline_with_the_last_one_that_it_created():
    def work(rank):
        dist.new_group([0, 1])
        if rank == 3:
            time.sleep(60)
        return dist.new_group([2, 3])

    with pytest.raises(StageError) as caught:
        in_ranks(work)
    at, last = line(work, 4), f"its last step was new_group([0, 1]) at {line(work, 1)}"
    assert str(caught.value).startswith(
        f"Rank 3 has not come to new_group([2, 3]) at {at}, where ranks 0, 1 and 2 wait. "
    )
    assert f"Rank 3 is at {line(work, 3)} in work; {last}. It is slow there, stuck, or on another path." in str(
        caught.value
    )


def test_groups_that_only_their_members_create_are_told():
    """As in pull request 15805 of sglang: each half creates the group of its own ranks."""

    def work(rank):
        dist.new_group(PAIRS[rank // 2])

    for told in in_ranks(work):
        assert "ranks 0 and 1 create new_group([0, 1])" in told and "ranks 2 and 3 create new_group([2, 3])" in told


def test_a_rank_that_is_at_another_group_with_other_members_is_told():
    def work(rank):
        members = [0, 1] if rank < 2 else [2, 3]
        new_group(members, use_local_synchronization=rank != 1)

    with pytest.raises(StageError) as caught:
        in_ranks(work)
    at = line(work, 2)
    said = f"rank 0 creates a group with its members alone at {at}; rank 1 creates a group with all ranks at {at}"
    assert str(caught.value).startswith(
        f"Ranks create a group differently: {said}. use_local_synchronization has to be"
    )


@pytest.mark.parametrize(
    ("others", "last"),
    [
        (lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")), lambda: init_device_mesh("cpu", (4,))),
        (
            lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp")),
            lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "pp")),
        ),
        (lambda: dist.new_group([0, 1]), lambda: dist.new_group([0, 1], backend="gloo")),
        (lambda: dist.new_group([0, 1]), lambda: dist.new_group()),
        (lambda: dist.new_group([0, 1]), lambda: init_device_mesh("cpu", (4,))),
    ],
    ids=["shapes of meshes", "names of meshes", "backends", "members", "group and mesh"],
)
def test_what_differs_on_one_rank_is_told(others, last):
    told = in_ranks(lambda rank: last() if rank == 3 else others())
    for one in told:
        assert "group 0 is not the same on all ranks: ranks 0, 1 and 2 create " in one and "; rank 3 creates " in one


class Slow:
    """A store that takes its time to answer."""

    def __init__(self, store):
        self.store = store

    def multi_get(self, keys):
        time.sleep(1)
        return self.store.multi_get(keys)

    def __getattr__(self, name):
        return getattr(self.store, name)


def test_the_rank_that_hosts_the_store_stays_until_all_have_read_what_went_wrong():
    def work(rank):
        dist.new_group()
        if rank == 3:
            own = watching._current[0][1]
            own.store = Slow(own.store)
        dist.new_group([rank % 2])

    assert all("group 1 is not the same on all ranks" in told for told in in_ranks(work))


def test_a_second_default_group_has_a_ledger_of_its_own():
    def work(rank):
        dist.new_group([0, 1])
        store = dist.PrefixStore("second", dist.distributed_c10d._get_default_store())
        dist.barrier()  # while others still connect, none may leave
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
        dist.new_group([0, 1] if rank < 2 else [2, 3])

    for told in in_ranks(work):
        assert "group 0 is not the same on all ranks" in told


def test_modules_that_imported_the_functions_before_are_watched_too_until_it_is_taken_back():
    plain = new_group, init_device_mesh
    watch()
    watch()
    try:
        assert new_group is dist.distributed_c10d.new_group is dist.device_mesh.new_group is not plain[0]
        assert init_device_mesh is dist.init_device_mesh is not plain[1], "this module's own name, too"
    finally:
        watching.unwatch()
    assert (new_group, init_device_mesh, dist.device_mesh.new_group) == (*plain, plain[0])


def beside_torch_xla(imported_before):
    def work(rank):
        if imported_before:
            import torch_xla.distributed.xla_backend
        watch(SOON)
        import torch_xla.distributed.xla_backend  # noqa: F401

        watch(SOON)
        assert dist.new_group.__name__ == "new_xla_process_group"
        dist.new_group([0, 1])
        assert watching._current[0][1].pages == {"group all": 1}
        dist.new_group([rank % 2])

    return in_ranks(work, watched=False), line(work, 10)


@pytest.mark.parametrize("imported_before", [True, False])
def test_groups_are_watched_once_whenever_torch_xla_replaces_the_function(imported_before):
    told, at = afresh(beside_torch_xla, imported_before)
    assert all(f"create new_group([0]) at {at}" in one for one in told)


def test_a_copy_of_the_folder_works_without_the_rest_of_layerproof(tmp_path):
    shutil.copytree(REPOSITORY / "workflow/layerproof/distributed", tmp_path / "mine")
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import mine, mine.process_group; mine.watch(); "
        "print(mine.process_group.initialise('cpu').world_size, [name for name in sys.modules if 'layerproof' in name])"
    )
    start = [sys.executable, "-I", "-c", program]
    alone = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # none of a launcher's
    ended = subprocess.run(start, capture_output=True, text=True, cwd=tmp_path, env=alone)
    assert ended.stdout.endswith("1 []\n"), ended.stderr


def test_members_of_unequally_many_groups_are_told_before_torch_names_their_group_differently():
    """torch's name of a group with use_local_synchronization has the number of groups that the rank is in."""

    def work(rank):
        dist.new_group([0, 1])
        if rank in (1, 2):
            dist.new_group([1, 2], use_local_synchronization=True)

    errors = in_ranks(work)
    at = line(work, 3)
    both = [f"rank {rank} creates new_group([1, 2]) as a member of {3 - rank} groups at {at}" for rank in (1, 2)]
    assert errors[0] is errors[3] is None and all("; ".join(both) in errors[rank] for rank in (1, 2))
    assert "all of its members have to be in equally many before" in errors[1]


def checked(work):
    def run(rank):
        watch(SOON, check_collectives=True)
        return work(rank)

    return in_ranks(run, watched=False)


@pytest.mark.parametrize(
    ("others", "last", "said"),
    [
        (
            lambda: dist.all_reduce(torch.ones(4)),
            lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX),
            ("all_reduce(float32[4], SUM)", "all_reduce(float32[4], MAX)"),
        ),
        (
            lambda: dist.broadcast(torch.ones(4), 0),
            lambda: dist.broadcast(torch.ones(4), 1),
            ("broadcast(float32[4], src=0)", "broadcast(float32[4], src=1)"),
        ),
        (
            lambda: dist.all_gather([torch.empty(2)] * 4, torch.ones(2)),
            lambda: dist.all_gather([torch.empty(2).half()] * 4, torch.ones(2).half()),
            ("all_gather(4 x float32[2])", "all_gather(4 x float16[2])"),
        ),
        (lambda: dist.barrier(), lambda: dist.all_reduce(torch.ones(1)), ("barrier", "all_reduce(float32[1], SUM)")),
    ],
    ids=["operation", "root", "dtype", "another one"],
)
def test_another_collective_is_told_before_it_runs(others, last, said):
    for told in checked(lambda rank: last() if rank == 3 else others()):
        assert f"collective 0 is not the same on all ranks: ranks 0, 1 and 2 call {said[0]} at " in told
        assert f"; rank 3 calls {said[1]} at " in told


def test_collectives_that_only_look_different_pass():
    def work(rank):
        group = dist.new_group([1, 3])
        if rank in (1, 3):
            value = torch.tensor([float(rank)])
            dist.broadcast(value, **({"src": 3} if rank == 1 else {"group_src": 1}), group=group)
            dist.gather(torch.ones(2), [torch.empty(2)] * 2 if rank == 1 else None, 1, group=group)
        dist.barrier()  # rank 0 has the store over which the others connect
        return value.item() if rank in (1, 3) else None

    assert checked(work) == [None, 3.0, None, 3.0]


def test_a_rank_that_reports_progress_is_waited_for():
    def work(rank):
        if rank == 3:
            for _ in range(3):
                time.sleep(0.6 * SOON.total_seconds())
                progress()
        dist.barrier()
        return "done"

    assert in_ranks(work) == ["done"] * 4


def test_a_store_that_a_launcher_does_not_host_does_as_well():
    """As in a program that calls watch() and that nothing but torchrun starts."""
    program = (
        f"import sys, time; sys.path.insert(0, {str(REPOSITORY / 'workflow')!r}); from datetime import timedelta; "
        "import torch.distributed as dist; from layerproof import distributed; "
        "distributed.watch(timedelta(seconds=3)); dist.init_process_group('gloo'); "
        "time.sleep(60 if dist.get_rank() == 1 else 0); dist.barrier()"
    )
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    ended = subprocess.run([*start, sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "layerproof: Rank 1 has not come to barrier at <string>:1, where rank 0 waits." in ended.stderr, ended.stderr

"""Mistakes that show only on several ranks: each is found at its tap, and it is said what ranks have to do with it."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest

from bugs import ranks, run_ranks
from bugs.rank_corpus import LAYER, RANK_BUGS

pytestmark = pytest.mark.slow
SIDE_BY_SIDE = [{"tp": 4}, {"cp": 2, "tp": 2}, {"ep": 3}, {"ep": 2, "cp": 2}]


SLICE = (
    "no all-reduce after o_proj",
    "norm of a rank's own heads",
    "fewer key/value heads than ranks, all the first",
    "logits of the ranks in reverse",
    "uneven experts: the last ones are dropped",
    "all-to-all transposed",
    "all-to-all and an all-reduce",
    "mask at the borders of chunks",
    "the ring turns the other way",
    "chunks one after the other, declared in zigzag",
)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """Judges in a process that no other test has used: the ranks are forked from it."""
    directory = tmp_path_factory.mktemp("ranks")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        yield lambda *case: process.submit(run_ranks.judged, directory, *case).result()


@pytest.mark.parametrize("name", SLICE)
def test_a_mistake_of_ranks_is_found_placed_and_named(judge, name):
    (bug,) = (bug for bug in RANK_BUGS if bug.name == name)
    row = judge(bug.overlay(ranks.PORT.read_text()), bug.stage, bug.axes)
    assert row.tap == bug.tap, row.said
    assert bug.says in row.said


@pytest.mark.parametrize("stage", ["embed", LAYER, "lm_head"])
@pytest.mark.parametrize("axes", SIDE_BY_SIDE, ids=str)
def test_a_port_without_a_mistake_passes_on_any_mesh(judge, axes, stage):
    row = judge(ranks.PORT.read_text(), stage, axes)
    assert (row.status, row.tap) == ("pass", None), row.said


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("tiny", LAYER),
        ("tiny", "lm_head"),
        ("qwen3_moe", "layer_001"),
        ("gpt_oss", "layer_000"),
        ("gemma3_text", "layer_000"),
        ("deepseek_v3", "layer_001"),
    ],
)
def test_transformers_splits_its_models_by_its_own_plan(judge, name, stage):
    row = judge(None, stage, {"tp": 2}, name)
    assert (row.status, row.tap) == ("pass", None), row.said


def test_the_plan_of_llama_4_is_wrong_in_transformers_5_23_with_torch_2_9(judge):
    """distribute_tensor makes a plain Shard of _StridedShard(dim=-1), so ranks have the wrong halves of gate and up. Plain
    transformers gives other logits on two ranks, too.
    """
    row = judge(None, "layer_000", {"tp": 2}, "llama4_text")
    assert (row.status, row.tap) == ("fail", "mlp.out"), row.said


def test_there_are_enough_and_every_mistake_is_another():
    assert len({bug.name for bug in RANK_BUGS}) == len(RANK_BUGS) >= 20
    assert {axis for bug in RANK_BUGS for axis in bug.axes} == {"tp", "cp", "ep"}

"""Bisect: the first wrong stage by chained runs alone, with as few of them as halving takes, and no false alarm."""

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bugs import harness
from layerproof.compare import bisect
from layerproof.model.stages import first_run, related_stages
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors.tensor import Tensor

pytestmark = pytest.mark.slow


@given(st.integers(1, 500), st.data())
def test_halving_finds_the_first_and_asks_no_more_than_it_must(count, data):
    first = data.draw(st.integers(0, count))  # count: it holds nowhere
    asked = []

    def holds(index):
        asked.append(index)
        return index >= first

    assert bisect.first_true(count, holds) == (None if first == count else first)
    assert len(asked) == len(set(asked)) <= 1 + math.ceil(math.log2(count))


def test_of_no_stage_none_is_wrong():
    assert bisect.first_true(0, lambda index: True) is None


def test_how_far_an_output_strays_leaves_padding_out_and_tells_the_median_token_from_all():
    golden = np.ones((1, 5, 4), np.float32)
    found = golden.copy()
    found[0, 0] += 8.0
    found[0, 4] = 100.0
    valid = np.array([[True, True, True, True, False]])
    strayed = bisect.Strayed.measure(Tensor(found, "float32"), Tensor(golden, "float32"), valid)
    assert strayed.median == 0.0 and strayed.whole == pytest.approx(4.0)
    assert strayed.is_wrong(bisect.Strayed(0.0, 0.0)) and not strayed.is_wrong(bisect.Strayed(0.0, 2.0))
    narrow = bisect.Strayed.measure(Tensor(found[..., :3], "float32"), Tensor(golden, "float32"), valid)
    assert narrow.median == narrow.whole == math.inf
    assert not bisect.Strayed(2**-9, 2**-9).is_wrong(bisect.Strayed(0.0, 0.0)), "a rounding, where the variant is exact"
    assert bisect.Strayed(0.004, 0.004).is_wrong(bisect.Strayed(4e-4, 4e-4)), "where less than a rounding is the rule"
    found[0, 1:4] = np.nan
    assert bisect.Strayed.measure(Tensor(found, "float32"), Tensor(golden, "float32"), valid).median == math.inf


@pytest.mark.parametrize(
    ("stages", "found"),
    [
        (["embed", "layer_000", "layer_001", "norm", "lm_head"], 5),
        (["layer_000"], 1),
        (["embed", "layer_000", "norm", "lm_head"], 2),
    ],
)
def test_stages_of_a_chain_have_no_gap(stages, found):
    assert first_run(stages, 2) == stages[:found]


def test_weights_that_may_have_been_mistaken_for_those_of_a_stage():
    assert related_stages("layer_000", 3) == ["layer_001"]
    assert related_stages("layer_001", 3) == ["layer_000", "layer_002"]
    assert related_stages("lm_head", 3) == ["embed", "norm"]
    assert related_stages("embed", 3) == []


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model("qwen3_moe", 0, tmp_path_factory.mktemp("model"), (20, 11, 30))


WRONG = (
    'if "mlp.gate.weight" in state:',
    'if stage.layer == 1: state["self_attn.v_proj.weight"] *= 1.2\n    if "mlp.gate.weight" in state:',
)


@pytest.mark.parametrize("edit", [None, WRONG], ids=["right", "layer 1 wrong"])
def test_a_port_is_run_in_chains_and_its_first_wrong_stage_found(model, tmp_path, edit):
    source = (harness.REPOSITORY / "tests/ports/qwen3_moe.py").read_text()
    if edit:
        assert source.count(edit[0]) == 1
        source = source.replace(*edit)
    (tmp_path / "port.py").write_text(source)
    runner = Runner.start(model.checkpoint, model.prompts, harness.port_settings(tmp_path / "port.py"))
    descriptions = {stage: model.description(stage) for stage in model.stages}
    files = (
        {stage: model.directory / folder / f"{stage}.h5" for stage in model.stages} for folder in ("golden", "noise")
    )
    run = functools.partial(port_stage.run_chain, runner, descriptions, None)
    found = bisect.bisect(model.stages, run, *files, model.prompts.valid)
    if edit:
        assert (found["first_wrong"], found["last_right"]) == ("layer_001", "layer_000")
        assert len(found["runs"]) <= 1 + math.ceil(math.log2(len(model.stages)))
    else:
        assert (found["first_wrong"], found["last_right"]) == (None, "lm_head")
        assert len(found["runs"]) == 1

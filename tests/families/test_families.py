"""A few rows of the survey: drawn with the version as the seed, and those in which a fresh seed found something."""

import numpy as np
import pytest

from families import survey
from families.configs import OUT_OF_SCOPE, WANTED, judged_types
from families.one_process import Run, drawn_prompts
from layerproof import __version__
from layerproof.files import read_json, write_json
from layerproof.model import tokens
from layerproof.tensors import hdf5

pytestmark = pytest.mark.slow

SEED = int(__version__.replace(".", ""))
DRAWN = np.random.default_rng(SEED).choice(judged_types(), 3, replace=False).tolist()
FOUND = {
    "falcon_h1": (27001, "a buffer that a module around its owner computes"),
    "inkling2_text": (70423, "block states that only later layers get"),
    "llama4_text": (281127, "a tap that the model writes into after it was handed over"),
    "minimax": (70423, "a near-tie of which half a variant's tokens are"),
    "phimoe": (70423, "a router that chooses one expert at a time"),
    "qwen2_moe": (881127, "one number a token, small in all draws by chance"),
    "zaya": (70423, "residuals in fp32"),
}


@pytest.mark.parametrize("model_type", DRAWN)
def test_a_drawn_family_passes_and_a_drawn_mistake_in_it_is_found(model_type, tmp_path):
    row = survey.judge(model_type, SEED, tmp_path)
    assert row.outcome == "passed", row.trace or row.sentence
    assert row.mistake["found"]["stage"] == row.mistake["expected"]["stage"]
    assert row.mistake["found"]["tap"] == row.mistake["expected"]["tap"]


@pytest.mark.parametrize("model_type", FOUND)
def test_what_a_fresh_seed_found_stays_mended(model_type, tmp_path):
    seed, _ = FOUND[model_type]
    row = survey.judge(model_type, seed, tmp_path, with_mistake=False)
    assert row.outcome == "passed", row.trace or row.sentence


def test_what_is_handed_over_is_known_behind_what_the_device_wraps(tmp_path):
    """An fp32 port of a bf16 model whose norm reads block states: a crash (case 128 of false alarms with seed 281126)."""
    survey.save("inkling2_text", tmp_path / "checkpoint", 128)
    port = {"backend": "transformers", "dtype": "float32"}
    run = Run.of(tmp_path, tokens.pad([[5], [6, 7, 8], [9, 10]], 0), port=port)
    for stage in run.stages:
        run.golden(stage)
        assert run.port(stage)["status"] == "pass"


def test_the_choice_of_a_router_whose_experts_do_not_get_it_is_a_tap(tmp_path):
    """Llama 4 multiplies inputs by scores: a near-tie that flips there was a false alarm (case 38 of seed 50127)."""
    survey.save("llama4_text", tmp_path / "checkpoint", 38)
    run = Run.of(tmp_path, drawn_prompts(38))
    for stage in run.stages[:2]:
        run.golden(stage)
    with hdf5.reading(run.file("golden", "layer_000")) as file:
        feeds = {one.name: one.fed_by for one in hdf5.feeds(file)}
    assert feeds["router.choice"] == ("router.selection",)
    assert "router.choice" in feeds["router.scores"]


def test_what_a_mask_rules_out_in_fp16_is_ruled_out_in_the_truth_too(tmp_path):
    """Its mask adds the lowest number of fp16, which is nothing special in fp32 (case 22 of seed 9041177)."""
    survey.save("hy_v4", tmp_path / "checkpoint", 22)
    port = {"backend": "transformers", "dtype": "float16"}
    run = Run.of(tmp_path, drawn_prompts(22), golden={"device": "cpu", "dtype": "float16"}, port=port)
    for stage in run.stages[:2]:
        run.golden(stage)
    comparison = run.port("layer_000")
    assert "self_attn.indexer.selection" in comparison["taps"]
    assert (comparison["status"], comparison["reason"]) == ("pass", None)


def test_a_flip_that_a_convolution_hands_on_is_left_out_of_the_tokens_behind_it(tmp_path):
    """Its shared experts are weighted by what the router chose, and a convolution follows (seed 6620914 of the survey)."""
    survey.save("inkling_text", tmp_path / "checkpoint", 6620914)
    run = Run.of(tmp_path, drawn_prompts(6620914))
    for stage in run.stages[:3]:
        run.golden(stage)
    comparison = run.port("layer_001")
    assert (comparison["status"], comparison["reason"]) == ("pass", None)
    assert comparison["routing"]["left_out"] == 1
    left_out = {name: 64 * 64 - tap["count"] for name, tap in comparison["taps"].items()}
    assert left_out["mlp.shared_experts"] == left_out["mlp.out"] == 64
    assert left_out["mlp_sconv"] == left_out["out"] == 4 * 64, "a kernel of four tokens"


@pytest.mark.parametrize("groups", [1, 2])
def test_a_correction_bias_that_is_dropped_is_named_where_experts_have_groups(tmp_path, groups):
    """Each group is rated by its best two experts, with the bias: what shows first has no canonical name (GLM-4.5)."""
    survey.save("glm4_moe", tmp_path / "checkpoint", 5)
    config = read_json(tmp_path / "checkpoint/config.json")
    write_json(tmp_path / "checkpoint/config.json", config | {"n_group": groups})
    run = Run.of(tmp_path, drawn_prompts(5))
    for stage in run.stages[:4]:
        run.golden(stage)
    assert run.stages[3] == "layer_002"

    def patch(model, part, stage):
        part.mlp.gate.e_score_correction_bias.zero_()

    comparison = run.port("layer_002", patch)
    assert comparison["taps"]["router.choice"]["status"] == "fail"
    first = run.diagnosis("layer_002", comparison, patch)["culprits"][0]
    assert (first["tap"], first["cause"]["name"]) == ("mlp.gate.selection", "correction_bias_dropped")


def test_every_type_of_transformers_is_judged_wanted_or_out_of_scope():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    types = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(OUT_OF_SCOPE) | set(WANTED) <= types
    assert not set(OUT_OF_SCOPE) & set(WANTED)
    assert len(judged_types()) >= 0.95 * (len(types) - len(OUT_OF_SCOPE) - len(NOT_RUN))


NOT_RUN = ("gemma3n", "xlstm")
"""Wanted types that plain transformers does not run here."""

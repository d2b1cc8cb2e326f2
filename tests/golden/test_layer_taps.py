"""How tensors inside a layer of transformers become taps."""

import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from families import survey
from layerproof.golden.layer_taps import modules_without_tap
from layerproof.golden.transformers_stage import run_stage, stage_module
from models import save

NUMBERS = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [2, 4])
def test_as_many_tokens_as_heads_are_no_other_layout(tmp_path, tokens):
    """The model has four heads of queries and two of keys."""
    save("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, valid = torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool)
    whole = run_stage(model, "layer_000", NUMBERS, ids, valid)
    first = run_stage(model, "layer_000", NUMBERS[:, :tokens], ids[:, :tokens], valid[:, :tokens])
    for name in ("attn.q_rot", "attn.k_rot"):
        assert torch.allclose(first[name], whole[name][:, :tokens], atol=1e-5), name


@pytest.mark.parametrize(
    ("model_type", "mixer", "function", "arguments"),
    [
        ("qwen3_next", "linear_attn", "torch_chunk_gated_delta_rule", ("query", "key", "value", "g", "beta")),
        ("kimi_linear", "self_attn", "chunk_kimi_delta_attention", ("query", "key", "value", "g", "beta")),
        ("mamba", "mixer", "mamba_selective_scan", ("dt", "B", "C")),
        ("mamba2", "mixer", "mamba2_chunk_scan", ("dt", "B", "C")),
        ("lfm2", "conv", None, ()),
    ],
)
def test_convolutions_scans_and_delta_rules_are_taps_and_so_are_their_arguments(
    tmp_path, model_type, mixer, function, arguments
):
    survey.save(model_type, tmp_path, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    taps = run_stage(model, "layer_000", NUMBERS, torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool))
    names = {f"{mixer}.causal_conv1d_fn", *(f"{mixer}.{function}.{argument}" for argument in arguments)}
    assert names <= set(taps)
    assert all(taps[name].shape[:2] == (2, 6) for name in names)
    assert modules_without_tap(stage_module(model, "layer_000")) == [], "the convolution's weights are those of a tap"


def test_a_module_with_weights_that_does_not_run_has_no_tap(tmp_path):
    save("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model.model.layers[0].unused = torch.nn.Linear(3, 3)
    run_stage(model, "layer_000", NUMBERS, torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool))
    assert modules_without_tap(stage_module(model, "layer_000")) == ["unused"]


def test_a_function_of_torch_in_the_file_of_a_model_is_left_alone(tmp_path, monkeypatch):
    survey.save("lfm2", tmp_path, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    monkeypatch.setattr(sys.modules[type(model).__module__], "conv1d", torch.conv1d, raising=False)
    taps = run_stage(model, "layer_000", NUMBERS, torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool))
    assert "conv.causal_conv1d_fn" in taps


def test_a_router_with_one_group_of_experts_has_the_selection_that_chooses_them(tmp_path):
    """Its group is rated by the two best experts of all, which is no choice of experts (GLM-4.5 has one group)."""
    survey.save("glm4_moe", tmp_path, seed=1)
    config = AutoConfig.from_pretrained(tmp_path)
    config.n_group = 1
    model = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32).eval()
    taps = run_stage(model, "layer_003", NUMBERS, torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool))
    assert "router.selection.2" not in taps
    chosen = taps["router.selection"].topk(config.num_experts_per_tok, -1).indices.sort(-1).values
    assert torch.equal(taps["router.choice"], chosen.int())

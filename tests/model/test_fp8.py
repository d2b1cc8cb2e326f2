"""The FP8 form of the release: what is written can be read again, by transformers and by the shipped port alike."""

import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import models
from layerproof.files import read_json
from layerproof.model import checkpoint, fp8, loading, tiny
from layerproof.port.contract import Stage
from layerproof.port.runner import load_module

SIDES = st.sampled_from([1, 5, 96, 128, 192, 256, 320, 384])


@given(SIDES, SIDES, st.integers(-30, 30), st.integers(0, 2**32 - 1))
def test_a_value_times_its_scale_is_the_weight_up_to_a_rounding(rows, columns, exponent, seed):
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    weight[0, 0] = 0.0
    values, scales = fp8.quantized(weight)
    assert values.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
    assert scales.shape == (math.ceil(rows / 128), math.ceil(columns / 128))
    found = dequantized(values, scales, torch.float32)
    step = by_element(scales, weight.shape) * 2**-9
    # Three bits of mantissa, and subnormal numbers in steps of 2^-9; one step of fp32 for the division.
    assert ((found - weight).abs() <= torch.maximum(weight.abs() * 2**-4, step / 2) * (1 + 1e-6)).all()


def by_element(scales, shape):
    """Each element's scale, as the form defines it."""
    rows, columns = (torch.arange(size) // 128 for size in shape)
    return scales[rows[:, None], columns]


def dequantized(values, scales, dtype):
    module = load_module("workflow/ports/minimax_m2.py")
    return module.dequantized({"w": values, "w_scale_inv": scales}, "w", dtype)


def test_zeros_stay_zeros():
    values, scales = fp8.quantized(torch.zeros(128, 128))
    assert not dequantized(values, scales, torch.bfloat16).any()


@pytest.mark.parametrize("whole", [False, True])
def test_the_golden_takes_blocks_as_the_form_has_them_where_the_last_is_smaller(tmp_path, whole, monkeypatch):
    """Transformers takes all blocks of a side to be equal."""
    sides = {"hidden_size": 320, "intermediate_size": 192}
    monkeypatch.setitem(models.FP8, "minimax_m2_fp8", models.FP8["minimax_m2_fp8"] | sides)
    models.save("minimax_m2_fp8", tmp_path / "model")
    description, _ = loading.describe_stages(tmp_path / "model", ["layer_001"], trust_remote_code=False)
    held = checkpoint.StageWeights(checkpoint.tensors_of_stage(tmp_path / "model", description["layer_001"]))
    if whole:
        quantization = loading.dequantizing(tmp_path / "model", False)
        model = AutoModelForCausalLM.from_pretrained(
            tmp_path / "model", dtype=torch.bfloat16, quantization_config=quantization
        )
    else:
        model = loading.meta_stage(tmp_path / "model", "layer_001", False, torch.bfloat16)
        loading.load_stage(model, "layer_001", tmp_path / "model", description["layer_001"], torch.device("cpu"))
    layer, experts = "model.layers.1.", "model.layers.1.block_sparse_moe.experts.3."
    names = [f"{layer}self_attn.{name}_proj.weight" for name in "qkvo"] + [f"{experts}w2.weight"]
    for name in names:
        values, scales = held[name], held[f"{name}_scale_inv"]
        wanted = (values.float() * by_element(scales, values.shape)).bfloat16()
        found = model.get_parameter(description["layer_001"]["tensors"][name]["parameter"])
        assert torch.equal(found[3] if "experts" in name else found, wanted), name
    assert {held[name].shape[0] % 128 for name in names} > {0}


def test_a_grid_that_is_none_of_blocks_stays_as_it_is():
    scales = torch.rand(5, 5)
    assert fp8.evened(scales, (640, 640), (128, 128)) is scales
    assert fp8.evened(scales, (320, 320), (128, 128)) is scales, "its blocks are of another size"
    assert fp8.evened(scales, (576, 600), (128, 128)).shape == (9, 75)


@pytest.mark.parametrize(
    ("settings", "on_disk", "asked", "held"),
    [
        ({"quant_method": "fp8"}, torch.float32, torch.bfloat16, torch.float32),
        ({"quant_method": "fp8"}, torch.bfloat16, torch.bfloat16, torch.bfloat16),
        ({"quant_method": "fp8"}, torch.bfloat16, torch.float32, torch.float32),
        (None, torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_router_of_the_shipped_port_is_as_wide_as_that_of_the_golden(settings, on_disk, asked, held):
    module = load_module("workflow/ports/minimax_m2.py")
    config = {"quantization_config": settings, "num_local_experts": 0}
    stage = Stage("layer_000", 0, config, asked, {}, (1, 4), Path("model"))
    weights = defaultdict(lambda: torch.ones(2, 2, dtype=on_disk))
    assert dict(module.convert(stage, weights))["moe.router"].dtype == held


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tiny.make(directory, steps=0, form="fp8")
    return directory


def test_the_default_checkpoint_in_the_form_of_the_release(directory):
    assert sorted(path.name for path in directory.iterdir()) == sorted(tiny.FILES)
    held = {
        name: tensor for shard in checkpoint.shards(directory) for name, tensor in load_file(directory / shard).items()
    }
    index = read_json(directory / checkpoint.INDEX)
    assert index["weight_map"].keys() == held.keys()
    assert index["metadata"] == {"total_size": sum(tensor.nbytes for tensor in held.values())}
    quantized = {name for name, tensor in held.items() if tensor.dtype == torch.float8_e4m3fn}
    assert {name.removesuffix("_scale_inv") for name in held if name.endswith("_scale_inv")} == quantized
    parts = {name.removesuffix(".weight").rpartition(".")[2] for name in quantized}
    assert parts == {"q_proj", "k_proj", "v_proj", "o_proj", "w1", "w2", "w3"}
    kept = {tensor.dtype for name, tensor in held.items() if "gate" in name or "lm_head" in name or "norm" in name}
    assert torch.float8_e4m3fn not in kept
    assert read_json(directory / "config.json")["quantization_config"]["weight_block_size"] == [128, 128]

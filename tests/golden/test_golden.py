"""The golden, streamed one stage at a time, is the model that transformers runs as a whole."""

import itertools

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from layerproof.golden import stage as golden_stage
from layerproof.golden.transformers_stage import run_stage
from layerproof.model import fp8, loading
from layerproof.model.parts import parts_of
from layerproof.model.stages import all_stages, layer_of
from layerproof.tensors import hdf5
from models import CONFIGS, FP8, MORE, save
from streaming import TOKENS, stream

pytestmark = pytest.mark.slow


def whole_model(directory, dtype, **options):
    """Output of every stage of the whole model by hooks, as bits-preserving tensors."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, **options).eval()
    outputs = {}
    parts = parts_of(model)

    def keep(stage):
        return lambda module, args, output: outputs.__setitem__(
            stage, (output[0] if isinstance(output, tuple) else output).clone()
        )

    model.get_submodule(parts.embed).register_forward_hook(keep("embed"))
    model.get_submodule(parts.norm).register_forward_hook(keep("norm"))
    for index, layer in enumerate(model.get_submodule(parts.layers)):
        layer.register_forward_hook(keep(f"layer_{index:03d}"))
    with torch.no_grad():
        result = model(input_ids=torch.from_numpy(TOKENS.ids), attention_mask=torch.from_numpy(TOKENS.valid).long())
    return outputs | {"lm_head": result.logits}


@pytest.mark.parametrize("model_type", CONFIGS | MORE)
def test_stream_equals_whole_model_bit_for_bit(model_type, golden_of):
    golden = golden_of(model_type)
    whole = whole_model(golden / "model", torch.bfloat16)
    for stage in all_stages(len(whole) - 3):
        streamed = hdf5.to_torch(hdf5.read(golden / f"{stage}.h5", "golden/out"))
        assert streamed.dtype == torch.bfloat16
        assert torch.equal(streamed, whole[stage]), stage


@pytest.mark.parametrize("model_type", ["minimax_m2_fp8", "minimax_m2", "qwen3_moe", "deepseek_v3", "llama"])
def test_released_fp8_form_equals_the_model_that_transformers_dequantizes(model_type, tmp_path):
    save(model_type, tmp_path / "model")
    if model_type not in FP8:
        fp8.quantize_checkpoint(tmp_path / "model")
    whole = whole_model(tmp_path / "model", torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True))
    for stage in stream(tmp_path / "model", tmp_path):
        streamed = hdf5.to_torch(hdf5.read(tmp_path / f"{stage}.h5", "golden/out"))
        assert torch.equal(streamed, whole[stage]), stage


def test_truth_is_the_fp32_stage_from_the_golden_input(golden_of):
    golden = golden_of("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(golden / "model", dtype=torch.float32).eval()
    fed = hdf5.to_torch(hdf5.read(golden / "norm.h5", "golden/out")).float()
    truth = hdf5.to_torch(hdf5.read(golden / "lm_head.h5", "truth/out"))
    with torch.no_grad():
        assert torch.equal(truth, model.lm_head(fed))


MOE = ("minimax_m2", "qwen3_moe", "gpt_oss")
FORMS = [*itertools.product(MOE, ("bf16", "fp32 beside bf16")), *((model_type, "fp8") for model_type in MOE[:2])]


@pytest.mark.parametrize(("model_type", "form"), FORMS)
def test_truth_is_what_the_whole_model_in_fp32_computes(model_type, form, tmp_path):
    """With the golden's weights, of which what is fp32 on disk is not rounded."""
    directory = tmp_path / "model"
    save(model_type, directory)
    if form == "fp8":
        fp8.quantize_checkpoint(directory)
    elif form == "fp32 beside bf16":
        make_fp32(directory, "gate", "router", "bias")
    stages = stream(directory, tmp_path)
    options = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if form == "fp8" else {}
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **options)
    exact = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager", **options
    )
    if form == "fp8":  # the golden's values are products rounded to bf16
        exact.float().load_state_dict({name: tensor.float() for name, tensor in model.state_dict().items()})
    ids, valid = torch.from_numpy(TOKENS.ids), torch.from_numpy(TOKENS.valid)
    for stage, before in zip(stages[1:], stages, strict=False):
        fed = hdf5.to_torch(hdf5.read(tmp_path / f"{before}.h5", "golden/out")).float()
        wanted = run_stage(exact.eval(), stage, fed, ids, valid)
        with hdf5.reading(tmp_path / f"{stage}.h5") as file:
            for name, tap in hdf5.taps(file, "truth").items():
                assert torch.equal(hdf5.to_torch(tap), wanted[name]), (stage, name)


def make_fp32(directory, *parts):
    """Widens those tensors of a checkpoint whose names hold one of the parts, and adds what bf16 cannot hold."""
    for shard in directory.glob("*.safetensors"):
        held = load_file(shard)
        for name in held:
            if any(part in name for part in parts):
                held[name] = held[name].float() * (1 + 2**-12)
        save_file(held, shard, metadata={"format": "pt"})


def test_experts_stay_bf16_in_the_truth(tmp_path, monkeypatch):
    """Also where other tensors of the layer are fp32 on disk, as the router of the release is."""
    save("minimax_m2", tmp_path / "model")
    make_fp32(tmp_path / "model", ".gate.", "bias")
    widened = []
    original = golden_stage._WidenedOnUse.__getitem__

    def spy(self, expert):
        widened.append(self.parameter.dtype)
        return original(self, expert)

    monkeypatch.setattr(golden_stage._WidenedOnUse, "__getitem__", spy)
    stream(tmp_path / "model", tmp_path)
    assert widened and set(widened) == {torch.bfloat16}


def test_every_stage_loads_only_its_own_tensors(tmp_path):
    save("minimax_m2", tmp_path / "model")
    stages = all_stages(3)
    descriptions, _ = loading.describe_stages(tmp_path / "model", stages, trust_remote_code=False)
    model = loading.meta_model(tmp_path / "model", False, torch.bfloat16)
    loading.load_stage(model, "layer_001", tmp_path / "model", descriptions["layer_001"], torch.device("cpu"))
    parts = parts_of(model)
    loaded = {
        stage for name, tensor in model.state_dict().items() if not tensor.is_meta for stage in parts.stages_of(name)
    }
    assert loaded == {"layer_001"}
    names = [name for stage in stages for name in descriptions[stage]["tensors"]]
    assert len(names) == len(set(names))
    assert all(
        layer_of(s) is None or all(f"layers.{layer_of(s)}." in n for n in descriptions[s]["tensors"]) for s in stages
    )


def test_the_context_is_what_the_output_projection_gets(tmp_path, monkeypatch):
    """Also where the model gates first what the attention function gives."""
    monkeypatch.setitem(
        MORE, "afmoe", {"num_hidden_layers": 1, "num_dense_layers": 1, "layer_types": ["full_attention"]}
    )
    save("afmoe", tmp_path / "model")
    stream(tmp_path / "model", tmp_path)
    with hdf5.reading(tmp_path / "layer_000.h5") as file:
        taps = hdf5.taps(file, "golden")
        context, out = (hdf5.to_torch(taps[name]).float() for name in ("attn.context", "attn.out"))
    projection = load_file(tmp_path / "model/model.safetensors")["model.layers.0.self_attn.o_proj.weight"].float()
    assert (context @ projection.T - out).norm() < 0.01 * out.norm()


def test_layers_have_the_canonical_taps_and_those_of_their_other_modules(golden_of):
    with hdf5.reading(golden_of("minimax_m2") / "layer_002.h5") as file:
        golden_taps, truth = hdf5.taps(file, "golden"), hdf5.taps(file, "truth")
        assert (
            set(golden_taps)
            == set(truth)
            == {
                *("input_norm", "attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm", "attn.q_rot", "attn.k_rot"),
                *("attn.context", "attn.out", "post_attn_norm", "mlp.out", "out"),
                *("router.logits", "router.scores", "router.selection", "router.choice", "router.weights"),
                "mlp.experts",
            }
        )
        assert [one.name for one in hdf5.feeds(file) if one.optional] == ["mlp.experts"]
        assert {tap.dtype for tap in truth.values()} == {"float32", "int32"}
        assert golden_taps["attn.q_rot"].data.shape == (3, 20, 4, 16)
        scores, weights, choice = (truth[f"router.{name}"].data[...] for name in ("scores", "weights", "choice"))
    assert ((scores > 0) & (scores < 1)).all()
    chosen = np.take_along_axis(scores, choice, -1)
    expected = chosen / chosen.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.take_along_axis(weights, choice, -1), expected, rtol=1e-5)
    assert (np.count_nonzero(weights, axis=-1) == 2).all()

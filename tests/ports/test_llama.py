"""The shipped Llama port: right for every model that it takes, and a clear line for the others."""

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from layerproof.errors import StageError
from layerproof.model.stages import all_stages, layer_of
from layerproof.port.contract import Stage
from layerproof.port.runner import load_module
from models import save_drawn
from port.test_port import SETTINGS, failures, run
from streaming import TOKENS, stream

PORT = SETTINGS | {"module": "workflow/ports/llama.py"}
SEEDS = range(4)
KINDS = ("llama", "llama, tied", "mistral", "qwen2", "qwen3")


def draw_rope(draw: random.Random) -> dict:
    theta = draw.choice([5e3, 1e4, 5e5, 1e6])
    drawn = {
        "default": {},
        "linear": {"factor": draw.choice([2.0, 4.0])},
        "llama3": {
            "factor": draw.choice([8.0, 32.0]),
            "low_freq_factor": 1.0,
            "high_freq_factor": draw.choice([2.0, 4.0]),
            "original_max_position_embeddings": draw.choice([16, 64]),
        },
    }
    kind = draw.choice(list(drawn))
    return {"rope_type": kind, "rope_theta": theta} | drawn[kind]


def draw_config(kind: str, seed: int) -> dict:
    """Arguments of a transformers config."""
    draw = random.Random(f"{kind} {seed}")
    kv_heads, hidden_per_head = draw.choice([1, 2, 3]), draw.choice([8, 16])
    heads = kv_heads * draw.choice([1, 2, 4])
    drawn = {
        "vocab_size": draw.randint(50, 120),
        "hidden_size": heads * hidden_per_head,
        "intermediate_size": draw.randint(20, 90),
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw.choice([hidden_per_head, 12, 32]),
        "max_position_embeddings": 64,
        "rms_norm_eps": draw.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": kind.endswith("tied") or (kind.startswith("qwen") and draw.random() < 0.5),
        "rope_parameters": draw_rope(draw),
    }
    if kind.startswith("llama"):
        drawn |= {"attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5}
    if kind == "mistral":
        drawn |= {"sliding_window": draw.choice([None, TOKENS.ids.shape[1]])}
    if kind.startswith("qwen"):
        drawn |= {"attention_bias": draw.random() < 0.5}
    return drawn


def as_before_transformers_5(directory: Path) -> None:
    """Writes config.json as transformers 4 and the releases of that time did."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    kind = rope.pop("rope_type")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    path.write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_it_passes_on_models_whose_sizes_are_drawn_at_random(kind, seed, tmp_path):
    drawn = draw_config(kind, seed)
    save_drawn(kind.partition(",")[0], drawn, tmp_path / "model", seed)
    if seed % 2:
        as_before_transformers_5(tmp_path / "model")
    stages = stream(tmp_path / "model", tmp_path / "golden")
    run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", PORT)
    for stage in stages:
        assert failures(tmp_path / "golden", tmp_path / "port", stage) == {}, (stage, drawn)


def logits_of_port(directory: Path) -> torch.Tensor:
    """Logits fp32 [batch, seq, vocabulary] of the port's stages one after the other, in plain PyTorch."""
    port, config = load_module(PORT["module"]), json.loads((directory / "config.json").read_text())
    on_disk = {name: tensor for shard in directory.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    embedding = "model.embed_tokens.weight"
    own = {"embed": embedding, "norm": "model.norm.weight"}
    own["lm_head"] = "lm_head.weight" if "lm_head.weight" in on_disk else embedding
    x, valid = torch.from_numpy(TOKENS.ids), torch.from_numpy(TOKENS.valid)
    for name in all_stages(config["num_hidden_layers"]):
        layer, prefix = layer_of(name), own.get(name) or f"model.layers.{layer_of(name)}."
        stage = Stage(name, layer, config, torch.float32, {}, (x.shape[0], x.shape[1]), directory)
        weights = {key: tensor for key, tensor in on_disk.items() if key.startswith(prefix)}
        module = port.build(stage)
        module.load_state_dict(dict(port.convert(stage, weights)), assign=True)
        with torch.no_grad():
            x = module(x, torch.arange(x.shape[1]), valid)
    return x


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
def test_in_fp32_its_logits_are_those_of_transformers(kind, seed, tmp_path):
    """Far below the rounding of bf16, which hides small mistakes from the other test."""
    save_drawn(kind.partition(",")[0], draw_config(kind, seed), tmp_path, seed)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    ids, valid = torch.from_numpy(TOKENS.ids), torch.from_numpy(TOKENS.valid)
    with torch.no_grad():
        wanted = model(input_ids=ids, attention_mask=valid.long()).logits
    scale = wanted[valid].square().mean().sqrt()
    assert (logits_of_port(tmp_path) - wanted)[valid].abs().max() < 1e-5 * scale


@pytest.mark.slow
def test_layers_share_their_graphs(tmp_path):
    save_drawn("llama", draw_config("llama", 0) | {"vocab_size": 83, "num_hidden_layers": 3}, tmp_path / "model")
    stream(tmp_path / "model", tmp_path / "golden")
    facts = run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", PORT)
    assert [facts[f"layer_{layer:03d}"]["compilations"] for layer in (1, 2)] == [0, 0]


def test_the_draws_cover_what_the_port_has_to_tell_apart():
    drawn = [draw_config(kind, seed) for kind in KINDS for seed in SEEDS]
    assert {config["rope_parameters"]["rope_type"] for config in drawn} == {"default", "linear", "llama3"}
    assert any(config["head_dim"] * config["num_attention_heads"] != config["hidden_size"] for config in drawn)
    assert any(config["head_dim"] * config["num_attention_heads"] == config["hidden_size"] for config in drawn)
    for key in ("attention_bias", "mlp_bias"):
        assert {config[key] for config in drawn if key in config} == {False, True}
    for kind in ("default", "linear", "llama3"):
        forms = {seed % 2 for kinds in KINDS for seed in SEEDS if _rope_type(kinds, seed) == kind}
        assert forms == {0, 1}, f"{kind} is read in one form of config.json alone"


def _rope_type(kind: str, seed: int) -> str:
    return draw_config(kind, seed)["rope_parameters"]["rope_type"]


@pytest.mark.parametrize("seed", range(8))
def test_rotary_frequencies_are_those_of_transformers(seed):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    port = load_module(PORT["module"])
    rope = draw_rope(random.Random(seed))
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, head_dim=64, rope_parameters=dict(rope))
    wanted = LlamaRotaryEmbedding(config).inv_freq
    found = port.rotary_frequencies(port.rope_parameters({"rope_parameters": rope}), 64, torch.device("cpu"))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, ("default", 5e5)),
        ({"rope_theta": 5e5}, ("default", 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, ("default", 5e5)),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}, ("linear", 5e5)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0}},
            ("linear", 5e5),
        ),
        ({}, ("default", 1e4)),
    ],
)
def test_rope_parameters_are_read_in_both_forms(config, wanted):
    rope = load_module(PORT["module"]).rope_parameters(config)
    assert (rope["rope_type"], rope["rope_theta"]) == wanted


def test_the_original_context_is_the_whole_one_if_the_config_does_not_say():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope_parameters = load_module(PORT["module"]).rope_parameters
    config = {"max_position_embeddings": 512, "rope_scaling": scaling}
    assert rope_parameters(config)["original_max_position_embeddings"] == 512
    scaling["original_max_position_embeddings"] = 64
    assert rope_parameters(config)["original_max_position_embeddings"] == 64


LLAMA = {
    "model_type": "llama",
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}


def build(config: dict, seq: int = 20, name: str = "layer_000") -> torch.nn.Module:
    layer = 0 if name == "layer_000" else None
    return load_module(PORT["module"]).build(Stage(name, layer, config, torch.bfloat16, {}, (3, seq), Path()))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, "llama.py is for llama, mistral, qwen2, qwen3, not gemma2."),
        ({"hidden_act": "gelu"}, "knows no activation gelu."),
        ({"quantization_config": {"quant_method": "fp8"}}, "does not dequantize weights. Name a checkpoint in bf16."),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "does not know rope_type yarn. Add it to"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "does not know rope_type dynamic."),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "does not know partial_rotary_factor of rope_type default.",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "does not know full_attention of rope_type"),
        ({"model_type": "mistral", "sliding_window": 19}, "no sliding window, so set inputs.max_tokens to 19 or less."),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True},
            "no sliding window, so set inputs.max_tokens to 8 or less.",
        ),
    ],
)
def test_what_it_does_not_know_it_refuses(changes, message):
    with pytest.raises(StageError) as error:
        build(LLAMA | changes)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "mistral", "sliding_window": 20},
        {"model_type": "mistral", "sliding_window": None},
        {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False},
        {"head_dim": None},
        {"quantization_config": None},
    ],
)
def test_it_refuses_nothing_that_does_not_matter(changes):
    for name in ("embed", "layer_000", "norm", "lm_head"):
        assert all(tensor.is_meta for tensor in build(LLAMA | changes, name=name).parameters())


@pytest.mark.slow
def test_a_small_mistake_in_the_port_would_be_seen(tmp_path):
    """The draws are sharp enough: a port that keeps every frequency of a llama3 model fails."""
    (seed,) = [seed for seed in SEEDS if _rope_type("llama", seed) == "llama3"][:1]
    save_drawn("llama", draw_config("llama", seed), tmp_path / "model", seed)
    stream(tmp_path / "model", tmp_path / "golden")
    source = Path(PORT["module"]).read_text()
    old = "kept = ((turns - low) / (high - low)).clamp(0, 1)"
    assert source.count(old) == 1
    (tmp_path / "edited.py").write_text(source.replace(old, "kept = torch.ones_like(turns)"))
    run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", PORT | {"module": str(tmp_path / "edited.py")})
    assert "attn.q_rot" in failures(tmp_path / "golden", tmp_path / "port", "layer_000")

"""Memory and disk of one layer of MiniMax-M2 at full size: what a job takes beside the layer itself.

The layer has synthetic weights in the released layout, 256 experts, in bf16 or in FP8; the model around it is cut to what a
layer needs. Peak RSS is told beside that of a process that only imports what the job imports.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from runs import Workflow
from safetensors.torch import save_file

from layerproof.files import read_json, write_json
from layerproof.model import fp8
from layerproof.model.checkpoint import read_shard_header
from measure import Result, drop_from_cache, measure

STAGE = "layer_000"
CONFIG = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 512,
}
"""Of MiniMaxAI/MiniMax-M2, with one layer and a small vocabulary."""
EXPERTS_IN_SHARD = 32
IMPORTS = {
    "golden": "import h5py; from layerproof.golden import stage; from transformers import MiniMaxM2ForCausalLM",
    "port": "from layerproof.port import stage; from layerproof.distributed import process_group as g; g.initialise('xla')",
}


def make_checkpoint(directory: Path, form: str, config: Mapping[str, Any] = CONFIG) -> int:
    """Writes the model in `form`, bf16 or fp8; the layers' bytes in bf16."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", config)
    needed = dict(shapes(config))
    names = list(needed)
    experts = [name for name in names if ".experts." in name]
    parts = [[name for name in names if name not in experts]]
    size = EXPERTS_IN_SHARD * 3
    parts += [experts[start : start + size] for start in range(0, len(experts), size)]
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, part in enumerate(parts):
        shard = f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        held = {name: _drawn(name, needed[name], generator) for name in part}
        save_file(held, directory / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(held, shard)
    write_json(directory / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    if form == "fp8":
        fp8.quantize_checkpoint(directory)
    return sum(2 * torch.Size(shape).numel() for name, shape in needed.items() if ".layers." in name)


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors on disk of a MiniMax-M2 as it was released."""
    hidden = config["hidden_size"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        yield from _layer_shapes(f"model.layers.{layer}.", config)


def _layer_shapes(layer: str, config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, experts = (config[key] for key in ("hidden_size", "intermediate_size", "num_local_experts"))
    queries, keys = (config[key] * config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    yield layer + "input_layernorm.weight", (hidden,)
    yield layer + "post_attention_layernorm.weight", (hidden,)
    yield layer + "self_attn.q_proj.weight", (queries, hidden)
    yield layer + "self_attn.k_proj.weight", (keys, hidden)
    yield layer + "self_attn.v_proj.weight", (keys, hidden)
    yield layer + "self_attn.o_proj.weight", (hidden, queries)
    yield layer + "self_attn.q_norm.weight", (queries,)
    yield layer + "self_attn.k_norm.weight", (keys,)
    yield layer + "block_sparse_moe.gate.weight", (experts, hidden)
    yield layer + "block_sparse_moe.e_score_correction_bias", (experts,)
    for expert in range(experts):
        for name, shape in (("w1", (inner, hidden)), ("w2", (hidden, inner)), ("w3", (inner, hidden))):
            yield f"{layer}block_sparse_moe.experts.{expert}.{name}.weight", shape


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    fan_in = shape[-1]
    return (torch.randn(shape, generator=generator) * fan_in**-0.5).bfloat16()


def measure_jobs(directory: Path, form: str) -> list[Result]:
    """What the golden and the port of one layer take, as their user calls them."""
    size = make_checkpoint(directory / "model", form)
    write_json(directory / "ids.json", [list(range(3, 67)), list(range(70, 102))])
    Workflow(
        directory,
        model={"checkpoint": "model"},
        inputs={"prompts": None, "token_ids": "ids.json"},
        layers="0",
        chains=[],
    )
    snakemake = ["snakemake", "--cores", "1"]
    before = ("golden/embed.h5", "port/embed.h5")  # reads what both load of their libraries, too
    measure([*snakemake, *(f"results/{target}" for target in before)], directory)
    predicted = read_json(directory / "results/prediction.json")["stages"][STAGE]
    shards = sorted((directory / "model").glob("*.safetensors"))
    on_disk = [tensor for shard in shards for tensor in read_shard_header(shard).values()]
    stored = sum(tensor.end - tensor.start for tensor in on_disk if ".layers." in tensor.name)
    results = []
    for side in ("golden", "port"):
        imports = measure(["python", "-c", IMPORTS[side]], directory)
        drop_from_cache(shards)
        job = measure([*snakemake, f"results/{side}/{STAGE}.h5"], directory)
        name = f"{side}, full-size layer, {form}"
        above = job.peak_rss - imports.peak_rss
        results += [
            Result(
                f"{name}: peak RSS above imports", above / size, "of the layer's bf16 bytes", f"{size / 1e9:.2f} GB"
            ),
            Result(
                f"{name}: that as predicted", predicted[side] / above, "of what was measured", f"{above / 1e9:.2f} GB"
            ),
            Result(
                f"{name}: read from disk", job.read_bytes / stored, "of the stage's bytes", f"{stored / 1e9:.2f} GB"
            ),
            Result(f"{name}: time", job.wall_s, "s", "with the start of Snakemake and imports"),
        ]
    return results


def run() -> list[Result]:
    """The figures of both forms."""
    results = []
    for form in ("bf16", "fp8"):
        with tempfile.TemporaryDirectory(prefix="layerproof-memory-") as directory:
            results += measure_jobs(Path(directory), form)
    return results

"""Quantised checkpoints, as the libraries that people quantise with write them."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import torch

from layerproof.model import fp8
from layerproof.model.checkpoint import SINGLE
from models import COMMON, save_drawn

if TYPE_CHECKING:
    from inputs.case import Case

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MXFP4_VALUES = 32
"""Values that share a scale."""


def replace(case: Case, model_type: str, config: dict[str, Any]) -> None:
    """Puts a checkpoint of another model type in place of the Llama; the tokenizer stays."""
    before = json.loads((case.checkpoint / "config.json").read_text())
    common = {key: COMMON[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    save_drawn(
        model_type,
        common | config | {"vocab_size": before["vocab_size"]},
        case.folder / "new",
        shard_size="1GB",
    )
    for name in ("config.json", SINGLE):
        shutil.move(case.folder / "new" / name, case.checkpoint / name)


def fp8_blocks(case: Case) -> None:
    fp8.quantize_checkpoint(case.checkpoint)


def fp8_without_a_scale(case: Case) -> None:
    fp8_blocks(case)
    case.change(lambda all: all.pop("model.layers.0.mlp.up_proj.weight_scale_inv"))


def _compressed(case: Case, format: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None) -> None:
    """Quantises the layers' matrices by compressed-tensors' own code."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs, format=format)
    compressor = BaseCompressor.get_value_from_registry(format)
    args = scheme.weights

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if any(f"{part}.weight" in name for part in MATRICES)]:
            weight = tensors.pop(name)  # in bf16, as the scales then are
            groups = weight.unflatten(1, (-1, args.group_size)) if args.group_size else weight
            dims = (0, 1) if args.strategy == "tensor" else -1
            low, high = groups.amin(dims), groups.amax(dims)
            if args.strategy == "channel":
                low, high = low[:, None], high[:, None]
            given: dict[str, Any] = {}
            if args.strategy == "tensor_group":
                largest = weight.abs().max()
                given["global_scale"] = (448.0 * 6.0 / largest).reshape(1)
            scale, zero = calculate_qparams(low, high, args, **given)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            state |= {f"weight_{key}": value for key, value in given.items()}
            if args.symmetric:
                state.pop("weight_zero_point")
            stored = compressor.compress(state, scheme)
            tensors |= {name.removesuffix("weight") + key: value for key, value in stored.items()}

    case.change(change)
    group = json.loads(scheme.model_dump_json())
    case.config(
        quantization_config={
            "quant_method": "compressed-tensors",
            "format": format,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    )


def fp8_tensors(case: Case) -> None:
    _compressed(case, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"})


def fp8_rows(case: Case) -> None:
    _compressed(case, "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"})


def int8(case: Case) -> None:
    _compressed(case, "int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})


def int4(case: Case) -> None:
    _compressed(case, "pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16})


def nvfp4(case: Case) -> None:
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    _compressed(case, "nvfp4-pack-quantized", weights)


def _experts(case: Case) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    replace(case, "qwen3_moe", COMMON | experts | {"num_hidden_layers": 1, "intermediate_size": 64})


def nvfp4_experts(case: Case) -> None:
    _experts(case)
    nvfp4(case)


def int4_experts(case: Case) -> None:
    _experts(case)
    int4(case)


def fp8_experts(case: Case) -> None:
    _experts(case)
    fp8_rows(case)


def unknown_format(case: Case) -> None:
    int8(case)
    settings = json.loads((case.checkpoint / "config.json").read_text())["quantization_config"]
    groups = {"group_0": settings["config_groups"]["group_0"] | {"format": "eighth-quantized"}}
    case.config(quantization_config=settings | {"format": "eighth-quantized", "config_groups": groups})


def mxfp4(case: Case) -> None:
    """Experts as gpt-oss is released: two values in a byte, and a shared exponent for each 32."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    experts = {"num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    replace(case, "gpt_oss", sizes | experts)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        torch.manual_seed(0)
        for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
            experts, inner, outer = tensors.pop(
                name
            ).shape  # in memory [experts, in, out]; on disk [experts, out, in / 32, 16]
            blocks = inner // MXFP4_VALUES
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (experts, outer, blocks, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.randint(120, 124, (experts, outer, blocks), dtype=torch.uint8)

    case.change(change)
    case.config(quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens"]})

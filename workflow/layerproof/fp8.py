"""The FP8 form in which MiniMax-M2, DeepSeek-V3 and others are released: e4m3 values and a scale for each block.

Matrices of linear layers are stored as `NAME.weight` in float8_e4m3fn with `NAME.weight_scale_inv` in float32, one scale for
each block of 128 x 128; a value is the product of the two (DeepSeek-V3, arXiv 2412.19437, section 3.3). Other tensors stay.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from layerproof.checkpoint import CONFIG, INDEX, shards
from layerproof.files import read_json

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SUFFIX = "_scale_inv"
KEPT = ("gate", "e_score_correction_bias", "lm_head")
"""Modules that MiniMax-M2's release leaves as they are, in its words."""
NOT_LINEAR = ("embed_tokens", "norm")


def quantize_checkpoint(directory: Path) -> None:
    """Rewrites a checkpoint's shards, index and config in the FP8 form, in place.

    Raises:
        ValueError: if a matrix is larger than a block and does not divide into blocks.
    """
    weight_map: dict[str, str] = {}
    total_size = 0
    for shard in shards(directory):
        held: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(directory / shard).items():
            if _is_quantized(name, tensor):
                held[name], held[name + SUFFIX] = quantized(tensor)
            else:
                held[name] = tensor
        mode = (directory / shard).stat().st_mode
        save_file(held, directory / shard, metadata={"format": "pt"})
        (directory / shard).chmod(mode)
        weight_map |= dict.fromkeys(held, shard)
        total_size += sum(tensor.nbytes for tensor in held.values())
    if (directory / INDEX).exists():
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    settings = {
        "activation_scheme": "dynamic",
        "fmt": "float8_e4m3fn",
        "modules_to_not_convert": list(KEPT),
        "quant_method": "fp8",
        "weight_block_size": [BLOCK, BLOCK],
    }
    config = read_json(directory / CONFIG) | {"quantization_config": settings}
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def quantized(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns] in e4m3 and scales [rows / 128, columns / 128] in fp32; a side below 128 is one block.

    The scale maps a block's largest magnitude to e4m3's largest number.

    Raises:
        ValueError: if a side is larger than a block and does not divide into blocks.
    """
    rows, columns = (_blocks(size) for size in weight.shape)
    blocks = weight.float().unflatten(0, (rows, -1)).unflatten(-1, (columns, -1))
    scales = blocks.abs().amax((1, 3)).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2).flatten(0, 1), scales


def _blocks(size: int) -> int:
    if size > BLOCK and size % BLOCK:
        raise ValueError(f"a side of {size} does not divide into blocks of {BLOCK}")
    return max(1, size // BLOCK)


def _is_quantized(name: str, tensor: torch.Tensor) -> bool:
    modules = name.removesuffix(".weight").split(".")
    excluded = (*KEPT, *NOT_LINEAR)
    return name.endswith(".weight") and tensor.ndim == 2 and not set(modules).intersection(excluded)

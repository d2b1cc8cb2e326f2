"""The FP8 form in which MiniMax-M2, DeepSeek-V3 and others are released: e4m3 values and one scale per block.

A linear layer's matrix is stored as `NAME.weight` in float8_e4m3fn, plus `NAME.weight_scale_inv` in float32 with one
scale per 128 x 128 block. The last block of a side may be smaller. The value is the product of the two. Other tensors
stay as they are.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from layerproof.files import read_json
from layerproof.model.checkpoint import CONFIG, INDEX, shards

BLOCK = 128
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SUFFIX = "_scale_inv"
KEPT = ("gate", "e_score_correction_bias", "lm_head")
"""Modules that MiniMax-M2's release does not quantise, by its names."""
NOT_LINEAR = ("embed_tokens", "norm")


def quantize_checkpoint(directory: Path) -> None:
    """Rewrites a checkpoint's shards, index and config to the FP8 form, in place."""
    weight_map: dict[str, str] = {}
    total_size = 0
    for shard in shards(directory):
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(directory / shard).items():
            if _is_quantized(name, tensor):
                stored[name], stored[name + SUFFIX] = quantized(tensor)
            else:
                stored[name] = tensor
        mode = (directory / shard).stat().st_mode
        save_file(stored, directory / shard, metadata={"format": "pt"})
        (directory / shard).chmod(mode)
        weight_map |= dict.fromkeys(stored, shard)
        total_size += sum(tensor.nbytes for tensor in stored.values())
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
    """Quantises a matrix to e4m3 values [rows, columns] and fp32 scales [rows / 128, columns / 128], rounded up.

    The scale maps a block's largest magnitude to e4m3's largest number.
    """
    rows, columns = weight.shape
    whole = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = whole.unflatten(0, (-1, BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax((1, 3)).clamp_min(torch.finfo(torch.float32).tiny) / LARGEST
    values = (blocks / scales[:, None, :, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return values.flatten(-2).flatten(0, 1)[:rows, :columns].contiguous(), scales


def evened(scales: torch.Tensor, shape: Sequence[int], block: Sequence[int]) -> torch.Tensor:
    """Converts scales [..., rows, columns] to smaller blocks that divide each side of the matrix evenly.

    Only sides whose last `block` is smaller than the others change. A side of 576 has 5 blocks of 128, or 9 of 64.
    """
    for dim, (size, step) in enumerate(zip(shape[-2:], block, strict=True), start=-2):
        if size > step and size % step and scales.shape[dim] == math.ceil(size / step):
            part = math.gcd(size, step)
            scales = scales.repeat_interleave(step // part, dim).narrow(dim, 0, size // part)
    return scales


def _is_quantized(name: str, tensor: torch.Tensor) -> bool:
    modules = name.removesuffix(".weight").split(".")
    excluded = (*KEPT, *NOT_LINEAR)
    return name.endswith(".weight") and tensor.ndim == 2 and not set(modules).intersection(excluded)

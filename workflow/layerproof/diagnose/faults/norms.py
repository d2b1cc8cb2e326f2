"""Norms: RMSNorm before attention and experts, of q and k, and after the last layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable

NORMS = ("input_norm", "attn.q_norm", "attn.k_norm", "post_attn_norm", "pre_mlp_norm", "post_mlp_norm", "out")
QK_NORMS = ("attn.q_norm", "attn.k_norm")
FAULTS = fault = Faults()


def norm_of(stage: GoldenStage, tap: str) -> Any:
    """The RMSNorm whose output is the tap."""
    module = stage.of_tap(tap)
    if epsilon_name(module) is None or getattr(module, "weight", None) is None:
        raise NotApplicable(f"{tap} is not a norm")
    return module


def epsilon_name(module: nn.Module) -> str | None:
    return next((name for name in ("variance_epsilon", "eps") if hasattr(module, name)), None)


def epsilon(module: Any) -> float:
    return getattr(module, epsilon_name(module) or "")


def normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def normalise_by(stage: GoldenStage, tap: str, unit: Callable[[torch.Tensor, float], torch.Tensor]) -> None:
    """Normalises the norm's input by `unit(input, epsilon)`; the module's own factors stay."""
    module = norm_of(stage, tap)
    eps = epsilon(module)
    stage.output(module, lambda x, out: (unit(x, eps) * factors(module, x, out)).to(out.dtype))


def factors(module: Any, x: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
    """The factors of normalised numbers in the module: its weight w, or 1 + w."""
    weight = module.weight.float()
    unit = normed(x, epsilon(module))
    errors = [(unit * (weight + offset) - output.float()).norm() for offset in (0.0, 1.0)]
    return weight + float(errors[1] < errors[0])


@fault("norm_weight_dropped", "no weight in this norm", *NORMS)
def norm_weight_dropped(stage: GoldenStage, tap: str) -> None:
    module = norm_of(stage, tap)
    stage.output(module, lambda x, out: (out.float() / factors(module, x, out)).nan_to_num().to(out.dtype))


@fault("norm_weight_plus_one", "1 + w for the weight w of this norm", *NORMS)
def norm_weight_plus_one(stage: GoldenStage, tap: str) -> None:
    stage.weight(norm_of(stage, tap), "weight", lambda weight: weight + 1)


@fault("norm_weight_without_one", "w for the weight 1 + w of this norm", *NORMS)
def norm_weight_without_one(stage: GoldenStage, tap: str) -> None:
    stage.weight(norm_of(stage, tap), "weight", lambda weight: weight - 1)


def _with_epsilon(value: float) -> None:
    @fault("norm_epsilon", f"an epsilon of {value:g} in this norm", *NORMS)
    def norm_epsilon(stage: GoldenStage, tap: str) -> None:
        module = norm_of(stage, tap)
        stage.set(module, epsilon_name(module) or "", value)


for value in (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 1.0):
    _with_epsilon(value)


@fault("norm_variance_bf16", "the variance of this norm in bf16", *NORMS)
def norm_variance_bf16(stage: GoldenStage, tap: str) -> None:
    def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
        narrow = x.bfloat16()
        return (narrow * torch.rsqrt(narrow.square().mean(-1, keepdim=True) + eps)).float()

    normalise_by(stage, tap, unit)


@fault("norm_mean_subtracted", "a LayerNorm, which subtracts the mean, in place of this RMSNorm", *NORMS)
def norm_mean_subtracted(stage: GoldenStage, tap: str) -> None:
    module = norm_of(stage, tap)
    stage.input(module, lambda x: x - x.mean(-1, keepdim=True))


@fault("norm_skipped", "left this norm out", *NORMS)
def norm_skipped(stage: GoldenStage, tap: str) -> None:
    stage.output(norm_of(stage, tap), lambda x, out: x)


def _by_parts(x: torch.Tensor, parts: int, heads: int, eps: float) -> torch.Tensor:
    """Normalises each of this many parts of a whole projection alone."""
    if x.shape[-1] % heads or x.ndim != 3:
        raise NotApplicable("the norm is not over a whole projection")
    return normed(x.unflatten(-1, (parts, -1)), eps).flatten(-2)


def _heads(stage: GoldenStage, tap: str) -> int:
    heads = stage.config.num_attention_heads
    return heads if tap == "attn.q_norm" else stage.config.num_key_value_heads or heads


@fault("qk_norm_per_head", "this norm computed per head, not over the whole projection", *QK_NORMS)
def qk_norm_per_head(stage: GoldenStage, tap: str) -> None:
    heads = _heads(stage, tap)
    normalise_by(stage, tap, lambda x, eps: _by_parts(x, heads, heads, eps))


def _on_shards(ranks: int) -> None:
    @fault("qk_norm_per_shard", f"this norm computed on each of {ranks} shards alone", *QK_NORMS)
    def qk_norm_per_shard(stage: GoldenStage, tap: str) -> None:
        heads = _heads(stage, tap)
        if heads % ranks or ranks == heads:
            raise NotApplicable(f"{heads} heads on {ranks} ranks")
        normalise_by(stage, tap, lambda x, eps: _by_parts(x, ranks, heads, eps))


for ranks in (2, 4, 8, 16, 32):
    _on_shards(ranks)


@fault("qk_norm_whole", "this norm computed over the whole projection, not per head", *QK_NORMS)
def qk_norm_whole(stage: GoldenStage, tap: str) -> None:
    def unit(x: torch.Tensor, eps: float) -> torch.Tensor:
        if x.ndim != 4:
            raise NotApplicable("the norm is over a whole projection")
        dims = tuple(dim for dim in (1, 2, 3) if dim == 3 or x.shape[dim] == _heads(stage, tap))
        wide = x.float()
        return wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + eps)

    normalise_by(stage, tap, unit)


@fault("qk_norm_one_head_weight", "the first head's weight of this norm used for all heads", *QK_NORMS)
def qk_norm_one_head_weight(stage: GoldenStage, tap: str) -> None:
    heads = _heads(stage, tap)

    def make(weight: torch.Tensor) -> torch.Tensor:
        return _by_head(weight, heads)[0].repeat(heads)

    stage.weight(norm_of(stage, tap), "weight", make)


@fault("qk_norm_weight_averaged", "the weight of this norm averaged over the heads", *QK_NORMS)
def qk_norm_weight_averaged(stage: GoldenStage, tap: str) -> None:
    heads = _heads(stage, tap)

    def make(weight: torch.Tensor) -> torch.Tensor:
        return _by_head(weight, heads).float().mean(0).repeat(heads).to(weight.dtype)

    stage.weight(norm_of(stage, tap), "weight", make)


def _by_head(weight: torch.Tensor, heads: int) -> torch.Tensor:
    if weight.ndim != 1 or len(weight) % heads or len(weight) == heads:
        raise NotApplicable("the weight is not over a whole projection")
    return weight.unflatten(0, (heads, -1))


@fault("qk_norms_swapped", "the weights of the norms of q and k exchanged", *QK_NORMS)
def qk_norms_swapped(stage: GoldenStage, tap: str) -> None:
    other = norm_of(stage, next(name for name in QK_NORMS if name != tap))
    stage.weight(norm_of(stage, tap), "weight", lambda weight: stage.original(other, "weight"))

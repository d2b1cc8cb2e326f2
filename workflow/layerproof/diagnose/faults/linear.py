"""Weights of linear layers and other loaded weights: wrong layer, wrong layout, wrong shard, not loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerproof.diagnose.faults.golden_stage import PATHS, Faults, GoldenStage, NotApplicable, rank_zero_only
from layerproof.diagnose.faults.rotary import rotation_of
from layerproof.diagnose.faults.router import router_of

PROJECTIONS = ("attn.q", "attn.k", "attn.v", "mlp.gate", "mlp.up")
ROW_PARALLEL = ("attn.out", "mlp.out")
COLUMN_PARALLEL = (*PROJECTIONS, "out")
MATRICES = (*COLUMN_PARALLEL, *ROW_PARALLEL, "router.logits")
LOADED = (
    *PROJECTIONS,
    *ROW_PARALLEL,
    "router.logits",
    "input_norm",
    "attn.q_norm",
    "attn.k_norm",
    "post_attn_norm",
    "pre_mlp_norm",
    "post_mlp_norm",
)
RANKS = (2, 4, 8)
FAULTS = fault = Faults()

Make = Callable[[torch.Tensor], torch.Tensor]
LINEAR = {"attn.out": "self_attn.o_proj", "mlp.out": "mlp.down_proj"}


def part_of(stage: GoldenStage, tap: str) -> Any:
    """The module with the weight that makes a tap; for a block, its last product."""
    if tap == "router.logits":
        return router_of(stage)
    if tap == "out" and stage.name != "lm_head":
        raise NotApplicable("no matrix product computes this output")
    return stage.part(LINEAR[tap]) if tap in LINEAR else stage.of_tap(tap)


def matrix(stage: GoldenStage, tap: str, make: Make) -> None:
    """Replaces the matrix [out, in] of a linear layer by `make` of it."""
    stage.weight(part_of(stage, tap), "weight", make)


@fault("weight_transposed", "this weight transposed", *MATRICES)
def weight_transposed(stage: GoldenStage, tap: str) -> None:
    # A matrix that is not square can only have been read in the other order.
    matrix(stage, tap, lambda weight: weight.reshape(weight.shape[::-1]).T.contiguous())


@fault("weight_not_loaded", "this weight left at zero", *MATRICES)
def weight_not_loaded(stage: GoldenStage, tap: str) -> None:
    matrix(stage, tap, torch.zeros_like)


@fault("weight_in_fp8", "this weight rounded to fp8 (e4m3)", *MATRICES)
def weight_in_fp8(stage: GoldenStage, tap: str) -> None:
    matrix(stage, tap, lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype))


@fault("bias_dropped", "no bias in this product", *MATRICES)
def bias_dropped(stage: GoldenStage, tap: str) -> None:
    stage.weight(part_of(stage, tap), "bias", torch.zeros_like)


def _divisible(weight: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    if weight.shape[dim] % ranks:
        raise NotApplicable(f"{weight.shape[dim]} rows on {ranks} ranks")
    return weight


def _shards(weight: torch.Tensor, ranks: int) -> tuple[torch.Tensor, ...]:
    return _divisible(weight, ranks, 0).chunk(ranks)


def _with_ranks(ranks: int) -> None:
    @fault("rank_zero_slice", f"rank 0's slice of this weight on all of {ranks} ranks", *COLUMN_PARALLEL)
    def rank_zero_slice(stage: GoldenStage, tap: str) -> None:
        matrix(stage, tap, lambda weight: torch.cat([_shards(weight, ranks)[0]] * ranks))

    @fault("shards_out_of_order", f"the shards of {ranks} ranks put together in reverse", *COLUMN_PARALLEL)
    def shards_out_of_order(stage: GoldenStage, tap: str) -> None:
        matrix(stage, tap, lambda weight: torch.cat(_shards(weight, ranks)[::-1]))

    @fault("sharded_sum_missing", f"only rank 0's part of a sum over {ranks} ranks", *ROW_PARALLEL)
    def sharded_sum_missing(stage: GoldenStage, tap: str) -> None:
        matrix(stage, tap, lambda weight: rank_zero_only(_divisible(weight, ranks, 1), ranks, 1))

    @fault("sharded_sum_twice", f"a sum over {ranks} ranks computed twice", *ROW_PARALLEL)
    def sharded_sum_twice(stage: GoldenStage, tap: str) -> None:
        stage.edit(tap, lambda tensor, seen: tensor * ranks)


for ranks in RANKS:
    _with_ranks(ranks)


@fault(
    "rotary_layout", "rows of this weight in the interleaved rotary layout of the original release", "attn.q", "attn.k"
)
def rotary_layout(stage: GoldenStage, tap: str) -> None:
    size = rotation_of(stage).head_dim

    def permute(weight: torch.Tensor) -> torch.Tensor:
        return weight.unflatten(0, (-1, 2, size // 2)).transpose(1, 2).reshape(weight.shape)

    matrix(stage, tap, permute)


EXCHANGES = {"attn.k": "attn.v", "attn.v": "attn.k", "mlp.gate": "mlp.up", "mlp.up": "mlp.gate"}


@fault("weights_swapped", "the weights of k and v, or of gate and up, exchanged", *EXCHANGES)
def weights_swapped(stage: GoldenStage, tap: str) -> None:
    other = part_of(stage, EXCHANGES[tap])
    matrix(stage, tap, lambda weight: stage.original(other, "weight"))


def _of_layer(offset: int, name: str) -> None:
    @fault("wrong_layers_weights", f"the weights of the {name} layer here", *LOADED, "router.selection", slow=True)
    def wrong_layers_weights(stage: GoldenStage, tap: str) -> None:
        path = _loaded_at(stage, tap)
        mine, theirs = stage.part(path), stage.neighbour(offset, path)
        for key, _ in (*theirs.named_parameters(recurse=False), *theirs.named_buffers(recurse=False)):
            stage.weight(mine, key, lambda old, key=key: getattr(theirs, key).detach().to(old.dtype))


def _loaded_at(stage: GoldenStage, tap: str) -> str:
    """Path of the module whose weights show first at a tap."""
    has_experts = "experts" in dict(stage.part("mlp").named_children())
    if tap == "router.logits":
        return next(name for name, part in stage.module.named_modules() if part is router_of(stage))
    if has_experts and tap in ("router.selection", "mlp.out"):
        return {"router.selection": "mlp", "mlp.out": "mlp.experts"}[tap]
    path = LINEAR.get(tap) or PATHS.get(tap)
    if path is None:
        raise NotApplicable(f"nothing is loaded at {tap}")
    return path


for offset, name in ((1, "next"), (-1, "previous")):
    _of_layer(offset, name)

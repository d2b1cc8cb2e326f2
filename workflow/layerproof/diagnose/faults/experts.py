"""MLPs, dense and with experts: activation, gate and up, and the layout and sharding of stacked weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable, rank_zero_only

MLP = "mlp.out"
FAULTS = fault = Faults()


def mlp_of(stage: GoldenStage) -> nn.Module:
    """The module that applies the activation: the experts, or the dense MLP."""
    try:
        experts = stage.part("mlp.experts")
    except NotApplicable:
        return stage.part("mlp")
    if not hasattr(experts, "gate_up_proj"):
        raise NotApplicable("the experts have no gate")
    return experts


def experts_of(stage: GoldenStage) -> Any:
    experts = stage.part("mlp.experts")
    if not hasattr(experts, "is_transposed") or not hasattr(experts, "gate_up_proj"):
        raise NotApplicable("the experts are not stacked with a gate")
    return experts


def _activation(function: nn.Module, text: str) -> None:
    @fault("activation", text, MLP)
    def activation(stage: GoldenStage) -> None:
        stage.set(mlp_of(stage), "act_fn", function)


_activation(nn.GELU(), "a gelu for the activation of the gate")
_activation(nn.GELU(approximate="tanh"), "a tanh gelu for the activation of the gate")
_activation(nn.SiLU(), "a silu for the activation of the gate")
_activation(nn.ReLU(), "a relu for the activation of the gate")
_activation(nn.Sigmoid(), "a sigmoid for the activation of the gate")
_activation(nn.Identity(), "no activation of the gate")


def _gate(name: str, text: str, make: Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    @fault(name, text, MLP)
    def gate(stage: GoldenStage) -> None:
        experts = experts_of(stage)

        def apply(gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = _halves(experts, gate_up)
            return make(experts, gate, up)

        stage.set(experts, "_apply_gate", apply)


def _halves(experts: Any, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if experts.is_concatenated:
        gate, up = gate_up.chunk(2, -1)
        return gate, up
    return gate_up[..., ::2], gate_up[..., 1::2]


def _glu(experts: Any, gate: torch.Tensor, up: torch.Tensor, clamp: bool = True, alpha: float | None = None) -> Any:
    """The factors of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1), with gate and up clamped."""
    if not hasattr(experts, "alpha"):
        raise NotApplicable("the experts have no clamped gate")
    if clamp:
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    return gate * torch.sigmoid(gate * (experts.alpha if alpha is None else alpha)), up


def _simple(experts: Any) -> Callable:
    if hasattr(experts, "alpha"):
        raise NotApplicable("the experts have a clamped gate")
    return experts.act_fn


def _plus_one_dropped(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    glu, up = _glu(experts, gate, up)
    return glu * up


def _clamp_dropped(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    glu, up = _glu(experts, gate, up, clamp=False)
    return glu * (up + 1)


def _alpha_dropped(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    glu, up = _glu(experts, gate, up, alpha=1.0)
    return glu * (up + 1)


_gate("up_plus_one", "up + 1 for up", lambda experts, gate, up: _simple(experts)(gate) * (up + 1))
_gate("up_without_plus_one", "up for up + 1", _plus_one_dropped)
_gate("gate_clamp_dropped", "no clamp on gate and up", _clamp_dropped)
_gate("gate_alpha_dropped", "a silu without its alpha", _alpha_dropped)
_gate(
    "gate_up_swapped",
    "gate and up swapped",
    lambda experts, gate, up: experts.__class__._apply_gate(experts, _joined(experts, up, gate)),
)


def _joined(experts: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.cat((gate, up), -1) if experts.is_concatenated else torch.stack((gate, up), -1).flatten(-2)


def _dense(name: str, text: str, make: Callable[[Callable, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    @fault(name, text, MLP)
    def dense(stage: GoldenStage) -> None:
        mlp, down = stage.part("mlp"), stage.part("mlp.down_proj")
        if not hasattr(mlp, "act_fn"):
            raise NotApplicable("the MLP has no gate")
        stage.edit(MLP, lambda out, seen: down(make(mlp.act_fn, seen["mlp.gate"], seen["mlp.up"])))


_dense("gate_up_swapped", "gate and up swapped", lambda act, gate, up: gate * act(up))
_dense("up_plus_one", "up + 1 for up", lambda act, gate, up: act(gate) * (up + 1))


@fault(
    "gate_up_interleaved",
    "the rows of gate and up interleaved instead of stacked, or stacked instead of interleaved",
    MLP,
)
def gate_up_interleaved(stage: GoldenStage) -> None:
    experts = experts_of(stage)

    def apply(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if experts.is_concatenated else gate_up.chunk(2, -1)
        return experts.__class__._apply_gate(experts, _joined(experts, gate, up))

    stage.set(experts, "_apply_gate", apply)


def _stacked(stage: GoldenStage, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces the stacked weights of the experts by `make` of them."""
    stage.weight(experts_of(stage), name, make)


def _transposed(weight: torch.Tensor) -> torch.Tensor:
    return weight.reshape(weight.shape[0], weight.shape[2], weight.shape[1]).transpose(1, 2).contiguous()


@fault("weight_transposed", "the experts' down weights transposed", MLP)
def down_transposed(stage: GoldenStage) -> None:
    _stacked(stage, "down_proj", _transposed)


@fault("weight_transposed", "the experts' gate and up weights transposed", MLP)
def gate_up_transposed(stage: GoldenStage) -> None:
    experts = experts_of(stage)

    def make(weight: torch.Tensor) -> torch.Tensor:
        dim = 2 if experts.is_transposed else 1
        if not experts.is_concatenated:
            return _transposed(weight)
        return torch.cat([_transposed(part) for part in weight.chunk(2, dim)], dim)

    _stacked(stage, "gate_up_proj", make)


@fault("weight_not_loaded", "the experts' down weights left at zero", MLP)
def down_not_loaded(stage: GoldenStage) -> None:
    _stacked(stage, "down_proj", torch.zeros_like)


def _experts_order(name: str, text: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    @fault(name, text, MLP)
    def order(stage: GoldenStage) -> None:
        _of_each_expert(stage, ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"), make)


def _of_each_expert(stage: GoldenStage, names: Sequence[str], make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces those of the stacked weights and biases [experts, ...] that exist by `make` of them."""
    for name in names:
        if getattr(experts_of(stage), name, None) is not None:
            _stacked(stage, name, make)


_experts_order("experts_out_of_order", "the next expert in place of each", lambda weight: weight.roll(-1, 0))
_experts_order("experts_out_of_order", "the expert before in place of each", lambda weight: weight.roll(1, 0))
_experts_order("experts_out_of_order", "the experts in reverse", lambda weight: weight.flip(0))
_experts_order("one_expert_for_all", "expert 0 in place of all", lambda weight: weight[:1].expand_as(weight))
_experts_order(
    "weight_in_fp8",
    "the experts' weights rounded to fp8 (e4m3)",
    lambda weight: weight.to(torch.float8_e4m3fn).to(weight.dtype),
)


def _with_ranks(ranks: int) -> None:
    @fault("expert_shard_missing", f"only the experts of rank 0 of {ranks}", MLP)
    def expert_shard_missing(stage: GoldenStage) -> None:
        _of_each_expert(stage, ("down_proj", "down_proj_bias"), lambda weight: rank_zero_only(weight, ranks, 0))

    @fault("sharded_sum_missing", f"only rank 0's part of a sum over {ranks} ranks", MLP)
    def sharded_sum_missing(stage: GoldenStage) -> None:
        dim = 1 if experts_of(stage).is_transposed else 2
        _stacked(stage, "down_proj", lambda weight: rank_zero_only(weight, ranks, dim))


for ranks in (2, 4, 8):
    _with_ranks(ranks)


@fault("shared_expert_missing", "no shared expert", MLP)
def shared_expert_missing(stage: GoldenStage) -> None:
    children = dict(stage.part("mlp").named_children())
    shared = next((children[name] for name in ("shared_experts", "shared_expert") if name in children), None)
    if shared is None:
        raise NotApplicable("there is no shared expert")
    stage.output(shared, lambda x, out: torch.zeros_like(out))

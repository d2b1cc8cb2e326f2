"""Routers: scores, the choice of experts, and the weights of the chosen experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable
from layerproof.taps import Seen

FAULTS = fault = Faults()


def router_of(stage: GoldenStage) -> Any:
    """The module that computes every expert's logit."""
    stage.part("mlp.experts")
    children = dict(stage.part("mlp").named_children())
    found = next((children[name] for name in ("gate", "router") if name in children), None)
    if found is None:
        raise NotApplicable("the router is unknown")
    return found


def _needs_correction_bias(stage: GoldenStage) -> str:
    """The name of the correction bias in the MLP."""
    name = next((name for name in stage.part("mlp").state_dict() if "correction_bias" in name), None)
    if name is None:
        raise NotApplicable("the router has no correction bias")
    return name


def _change_correction_bias(stage: GoldenStage, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replaces the bias itself, which groups of experts are rated with, too."""
    path, _, name = _needs_correction_bias(stage).rpartition(".")
    stage.weight(stage.part("mlp").get_submodule(path), name, make)


def _chosen(dense: torch.Tensor, seen: Seen) -> torch.Tensor:
    """1 where an expert is chosen, else 0, [batch, seq, experts] in the dtype of `dense`."""
    return torch.zeros_like(dense).scatter(-1, seen["router.choice"].long(), 1.0)


def _scores(seen: Seen) -> torch.Tensor:
    return seen.get("router.scores", seen["router.logits"].float().softmax(-1))


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    return weights / weights.sum(-1, keepdim=True)


@fault("router_softmax", "a softmax over the experts in place of the sigmoid", "router.scores")
def router_softmax(stage: GoldenStage) -> None:
    stage.edit("router.scores", lambda scores, seen: seen["router.logits"].float().softmax(-1))


@fault("router_sigmoid", "a sigmoid in place of the softmax over the experts", "router.scores")
def router_sigmoid(stage: GoldenStage) -> None:
    stage.edit("router.scores", lambda scores, seen: seen["router.logits"].float().sigmoid())


@fault("router_no_activation", "neither sigmoid nor softmax on the router's logits", "router.scores")
def router_no_activation(stage: GoldenStage) -> None:
    stage.edit("router.scores", lambda scores, seen: seen["router.logits"].float())


@fault("correction_bias_dropped", "no correction bias in the choice of experts", "router.selection")
def correction_bias_dropped(stage: GoldenStage) -> None:
    _change_correction_bias(stage, torch.zeros_like)


@fault("correction_bias_sign", "the correction bias subtracted", "router.selection")
def correction_bias_sign(stage: GoldenStage) -> None:
    _change_correction_bias(stage, torch.neg)


@fault(
    "correction_bias_on_logits", "the correction bias added to the logits in place of the scores", "router.selection"
)
def correction_bias_on_logits(stage: GoldenStage) -> None:
    _needs_correction_bias(stage)
    stage.edit(
        "router.selection",
        lambda selection, seen: (seen["router.logits"].float() + selection - _scores(seen)).sigmoid(),
    )


def _choose(by: int) -> None:
    text = f"one expert too {'many' if by > 0 else 'few'}"

    @fault("router_top_k", text, "router.choice")
    def router_top_k(stage: GoldenStage) -> None:
        router = router_of(stage)
        count = getattr(router, "top_k", 0) + by
        if not 0 < count <= stage.part("mlp.experts").num_experts:
            raise NotApplicable(f"{count} experts cannot be chosen")
        stage.set(router, "top_k", count)


for by in (1, -1):
    _choose(by)


@fault("router_lowest", "the lowest experts chosen", "router.choice")
def router_lowest(stage: GoldenStage) -> None:
    stage.edit(
        "router.choice",
        lambda choice, seen: (-seen["router.selection"]).topk(choice.shape[-1], -1).indices.sort(-1).values.int(),
    )


@fault("correction_bias_dropped", "no correction bias in the choice of experts", "router.choice")
def correction_bias_dropped_in_choice(stage: GoldenStage) -> None:
    _needs_correction_bias(stage)
    stage.edit(
        "router.choice",
        lambda choice, seen: _scores(seen).topk(choice.shape[-1], -1).indices.sort(-1).values.int(),
    )


@fault("expert_groups_ignored", "experts chosen from all groups", "router.choice")
def expert_groups_ignored(stage: GoldenStage) -> None:
    if not getattr(stage.config, "n_group", None):
        raise NotApplicable("the experts are not grouped")
    count = router_of(stage).top_k
    stage.edit(
        "router.choice", lambda choice, seen: _ungrouped(stage, seen).topk(count, -1).indices.sort(-1).values.int()
    )


def _ungrouped(stage: GoldenStage, seen: Seen) -> torch.Tensor:
    """Scores plus correction bias, for the experts of all groups, [batch, seq, experts]."""
    bias = next((tensor for name, tensor in stage.part("mlp").state_dict().items() if "correction_bias" in name), 0.0)
    return _scores(seen) + bias


@fault("router_weights_not_normalised", "the chosen experts' weights not normalised", "router.weights")
def router_weights_not_normalised(stage: GoldenStage) -> None:
    stage.edit("router.weights", lambda dense, seen: (_scores(seen) * _chosen(dense, seen)).to(dense.dtype))


@fault("router_weights_normalised", "the chosen experts' weights normalised", "router.weights")
def router_weights_normalised(stage: GoldenStage) -> None:
    stage.edit("router.weights", lambda dense, seen: _normalised(dense))


@fault("router_weights_over_all", "the chosen experts' weights normalised over all experts", "router.weights")
def router_weights_over_all(stage: GoldenStage) -> None:
    stage.edit(
        "router.weights", lambda dense, seen: (_normalised(_scores(seen)) * _chosen(dense, seen)).to(dense.dtype)
    )


@fault("correction_bias_in_weights", "the correction bias in the experts' weights", "router.weights")
def correction_bias_in_weights(stage: GoldenStage) -> None:
    _needs_correction_bias(stage)
    stage.edit(
        "router.weights",
        lambda dense, seen: _normalised(seen["router.selection"] * _chosen(dense, seen)).to(dense.dtype),
    )


@fault("correction_bias_in_weights", "the correction bias in the experts' weights, not normalised", "router.weights")
def correction_bias_in_plain_weights(stage: GoldenStage) -> None:
    _needs_correction_bias(stage)
    stage.edit("router.weights", lambda dense, seen: (seen["router.selection"] * _chosen(dense, seen)).to(dense.dtype))


@fault("router_softmax_over_chosen", "a softmax over the chosen experts' logits", "router.weights")
def router_softmax_over_chosen(stage: GoldenStage) -> None:
    def edit(dense: torch.Tensor, seen: Seen) -> torch.Tensor:
        logits = seen["router.logits"].float().masked_fill(_chosen(dense, seen) == 0, float("-inf"))
        return logits.softmax(-1).to(dense.dtype)

    stage.edit("router.weights", edit)


@fault("router_softmax_of_scores", "a softmax over the chosen experts' scores", "router.weights")
def router_softmax_of_scores(stage: GoldenStage) -> None:
    def edit(dense: torch.Tensor, seen: Seen) -> torch.Tensor:
        scores = _scores(seen).float().masked_fill(_chosen(dense, seen) == 0, float("-inf"))
        return scores.softmax(-1).to(dense.dtype)

    stage.edit("router.weights", edit)


@fault("router_weights_equal", "the same weight for all chosen experts", "router.weights")
def router_weights_equal(stage: GoldenStage) -> None:
    stage.edit("router.weights", lambda dense, seen: _normalised(_chosen(dense, seen)))


@fault("router_scaling_dropped", "no scaling factor on the experts' weights", "router.weights")
def router_scaling_dropped(stage: GoldenStage) -> None:
    factor = getattr(stage.config, "routed_scaling_factor", None)
    if not factor:
        raise NotApplicable("the router has no scaling factor")
    stage.edit("router.weights", lambda dense, seen: dense / factor)


@fault("router_weights_misplaced", "weights sorted by size given to experts sorted by number", "router.weights")
def router_weights_misplaced(stage: GoldenStage) -> None:
    def edit(dense: torch.Tensor, seen: Seen) -> torch.Tensor:
        choice = seen["router.choice"].long()
        weights = dense.gather(-1, choice).sort(-1, descending=True).values
        return torch.zeros_like(dense).scatter(-1, choice, weights)

    stage.edit("router.weights", edit)

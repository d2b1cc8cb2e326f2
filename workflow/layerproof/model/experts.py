"""Experts functions for transformers' MoE models.

transformers' own functions loop over the experts that tokens chose, or sort tokens by expert, which a compiler of
static graphs cannot do. Some of them also compute gate and up where a fault cannot reach. The functions here follow
transformers' conventions: `is_transposed` weights are [experts, in, out], others [experts, out, in].
"""

from __future__ import annotations

from typing import Any

import torch

from layerproof.taps import dense_weights

STATIC_EXPERTS = "layerproof_static"
EXPERT_BY_EXPERT = "layerproof_expert_by_expert"
ONE_EXPERT = "layerproof_one_expert"


def static_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts' output [tokens, hidden] for hidden states [tokens, hidden] and a choice and weights [tokens, top_k].

    Shapes are static: every expert computes every token, in one batched product, and unchosen experts get weight zero.
    """

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)
        product = x @ (weight if self.is_transposed else weight.transpose(1, 2))
        return product + getattr(self, f"{name}_bias")[:, None] if self.has_bias else product

    outputs = _expert(self, hidden_states.expand(self.num_experts, *hidden_states.shape), linear)
    weights = dense_weights(top_k_index, top_k_weights, self.num_experts)
    return torch.einsum("te,eth->th", weights.float(), outputs.float()).to(hidden_states.dtype)


def expert_by_expert_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Like `static_experts_forward`, but one expert after the other. It reads weights only by expert."""
    total = torch.zeros_like(hidden_states)
    for expert in range(self.num_experts):

        def linear(x: torch.Tensor, name: str, expert: int = expert) -> torch.Tensor:
            weight = getattr(self, name)[expert]
            product = x @ (weight if self.is_transposed else weight.T)
            return product + getattr(self, f"{name}_bias")[expert] if self.has_bias else product

        tokens, places = torch.where(top_k_index == expert)
        if len(tokens):
            outputs = _expert(self, hidden_states[tokens], linear) * top_k_weights[tokens, places, None]
            total.index_add_(0, tokens, outputs.to(total.dtype))
    return total


def one_expert_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Runs every token through the first expert.

    The output means nothing, but shapes and memory are the largest that a loop over the experts can reach.
    """

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        weight = getattr(self, name)[0].to(x.dtype)
        return x @ (weight if self.is_transposed else weight.T)

    return _expert(self, hidden_states, linear) * top_k_weights[:, :1].to(hidden_states.dtype)


def _expert(self: Any, x: torch.Tensor, linear: Any) -> torch.Tensor:
    """Computes an expert up to its routing weight; `linear(x, name)` multiplies by the weight of that name."""
    inner = self._apply_gate(linear(x, "gate_up_proj")) if self.has_gate else self.act_fn(linear(x, "up_proj"))
    outputs = linear(inner, "down_proj")
    return self.post_expert_norm(outputs) if self.has_post_expert_norm else outputs


def register() -> None:
    """Registers the functions with transformers as experts implementations."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(STATIC_EXPERTS, static_experts_forward)
    ALL_EXPERTS_FUNCTIONS.register(EXPERT_BY_EXPERT, expert_by_expert_forward)
    ALL_EXPERTS_FUNCTIONS.register(ONE_EXPERT, one_expert_forward)

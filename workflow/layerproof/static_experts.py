"""A fixed-shape experts function for transformers' MoE models: every expert sees every token, in one batched product.

transformers' own implementations loop over the experts that are hit or sort tokens by expert, which a compiler of static
graphs cannot take. This one computes the same sum with unchosen experts weighted by zero.
"""

from __future__ import annotations

from typing import Any

import torch

from layerproof.taps import dense_weights

STATIC_EXPERTS = "layerproof_static"


def static_experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts' output [tokens, hidden] for hidden states [tokens, hidden] and a choice and weights [tokens, top_k].

    Follows transformers' conventions: `is_transposed` weights are [experts, in, out], others [experts, out, in].
    """

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        product = x @ (weight if self.is_transposed else weight.transpose(1, 2))
        return product if bias is None else product + bias[:, None]

    has_bias = self.has_bias
    tokens = hidden_states.expand(self.num_experts, *hidden_states.shape)
    if self.has_gate:
        inner = self._apply_gate(linear(tokens, self.gate_up_proj, self.gate_up_proj_bias if has_bias else None))
    else:
        inner = self.act_fn(linear(tokens, self.up_proj, self.up_proj_bias if has_bias else None))
    outputs = linear(inner, self.down_proj, self.down_proj_bias if has_bias else None)
    if self.has_post_expert_norm:
        outputs = self.post_expert_norm(outputs)
    weights = dense_weights(top_k_index, top_k_weights, self.num_experts)
    return torch.einsum("te,eth->th", weights.float(), outputs.float()).to(hidden_states.dtype)


def register() -> None:
    """Makes the function known to transformers as an experts implementation."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(STATIC_EXPERTS, static_experts_forward)

"""Taps: named tensors inside a stage, by their canonical names.

A port hands a tensor over with `tap("attn.q_rot", q)`, which returns it unchanged and costs nothing unless a run collects
taps. On a lazy device the collected tensors become extra outputs of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from layerproof.errors import StageError

if TYPE_CHECKING:
    import torch

OUT = "out"

SHAPES = {
    "input_norm": "[batch, seq, hidden]",
    "attn.q": "[batch, seq, heads * head_dim]",
    "attn.k": "[batch, seq, kv_heads * head_dim]",
    "attn.v": "[batch, seq, kv_heads * head_dim]",
    "attn.q_norm": "[batch, seq, heads * head_dim], or [batch, seq, heads, head_dim] where the norm is per head",
    "attn.k_norm": "[batch, seq, kv_heads * head_dim], or [batch, seq, kv_heads, head_dim] where the norm is per head",
    "attn.q_rot": "[batch, seq, heads, head_dim]",
    "attn.k_rot": "[batch, seq, kv_heads, head_dim]",
    "attn.context": "[batch, seq, heads * head_dim]",
    "attn.out": "[batch, seq, hidden]",
    "post_attn_norm": "[batch, seq, hidden]",
    "pre_mlp_norm": "[batch, seq, hidden], where a model has a norm of its own before the MLP",
    "router.logits": "[batch, seq, experts]",
    "router.scores": "[batch, seq, experts], after the sigmoid or softmax, without the correction bias",
    "router.selection": "[batch, seq, experts], what the top-k is taken of: the scores with the correction bias",
    "router.choice": "[batch, seq, top_k], integer, ascending",
    "router.weights": "[batch, seq, experts], zero where an expert is not chosen",
    "mlp.gate": "[batch, seq, intermediate]",
    "mlp.up": "[batch, seq, intermediate]",
    "mlp.out": "[batch, seq, hidden]",
    "post_mlp_norm": "[batch, seq, hidden], where a model has a norm of its own after the MLP",
    OUT: "[batch, seq, hidden]; of lm_head [batch, seq, vocabulary]",
}
"""Canonical taps and their layout, in the order that data flows through a layer."""

_collected: ContextVar[dict[str, torch.Tensor] | None] = ContextVar("collected", default=None)


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Hands `tensor` over under a canonical name if the run collects taps, and returns it unchanged.

    Raises:
        StageError: if the name is not canonical or it stands for no tensor.
    """
    if name not in SHAPES:
        raise StageError(f'tap "{name}": is not a canonical name. The names are {", ".join(SHAPES)}.')
    if not hasattr(tensor, "dtype"):
        raise StageError(
            f'tap "{name}": is a {type(tensor).__name__}, not a tensor. Write tap("{name}", tensor) inside forward.'
        )
    collected = _collected.get()
    if collected is not None:
        collected[name] = tensor
    return tensor


@contextlib.contextmanager
def collecting() -> Iterator[dict[str, torch.Tensor]]:
    """Collects the taps of what runs inside the block."""
    collected: dict[str, torch.Tensor] = {}
    token = _collected.set(collected)
    try:
        yield collected
    finally:
        _collected.reset(token)


def in_order(names: Iterable[str]) -> list[str]:
    """Tap names in the order that data flows."""
    order = list(SHAPES)
    return sorted(names, key=order.index)


def dense_weights(choice: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Routing weights [..., top_k] laid out by expert, [..., experts], so that the order of the choice does not matter."""
    import torch

    dense = torch.zeros(*choice.shape[:-1], num_experts, dtype=weights.dtype, device=weights.device)
    return dense.scatter(-1, choice.long(), weights)

"""Attention: the scale of the scores, the mask, how heads are grouped, and how they are put together again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable

CONTEXT = "attn.context"
FAULTS = fault = Faults()


def _scale_by(name: str, text: str, factor: Callable[[GoldenStage, Any], float]) -> None:
    @fault(name, text, CONTEXT)
    def attention_scale(stage: GoldenStage) -> None:
        by = factor(stage, stage.part("self_attn"))

        def wrap(function: Callable) -> Callable:
            def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                return function(module, query * by, key, *args, **kwargs)

            return attention

        stage.attention(wrap)


def _rotary_size(stage: GoldenStage, attention: Any) -> float:
    factor = (getattr(stage.config, "rope_parameters", None) or {}).get("partial_rotary_factor")
    if not factor:
        raise NotApplicable("the rotary size is the head's")
    return factor**-0.5


_scale_by("attention_scale", "no scale on the attention scores", lambda stage, a: 1 / a.scaling)
_scale_by("attention_scale", "the scale of the attention scores applied twice", lambda stage, a: a.scaling)
_scale_by("attention_scale", "attention scores scaled by the rotary size in place of the head's", _rotary_size)
_scale_by(
    "attention_scale",
    "attention scores scaled by hidden size / heads in place of the head's size",
    lambda stage, a: (stage.config.hidden_size / stage.config.num_attention_heads) ** -0.5 / a.scaling,
)
_scale_by(
    "attention_scale",
    "attention scores scaled by the hidden size in place of the head's",
    lambda stage, a: stage.config.hidden_size**-0.5 / a.scaling,
)


def seen_by(stage: GoldenStage, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    """Changes the mask.

    `change` gets which keys each query sees, bool [batch, 1, queries, keys], and how far before the query each key is,
    [queries, keys].
    """

    def wrap(function: Callable) -> Callable:
        def attention(
            module: Any,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            mask: Any,
            *args: Any,
            **kwargs: Any,
        ) -> Any:
            if not isinstance(mask, torch.Tensor) or not mask.is_floating_point():
                raise NotApplicable("the attention has no mask to change")
            positions = torch.arange(mask.shape[-1], device=mask.device)
            seen = change(mask == 0, positions[:, None] - positions[None])
            # A query that sees nothing would have an undefined output, so it sees itself.
            seen = seen | (~seen.any(-1, keepdim=True) & (positions[:, None] == positions[None]))
            mask = torch.where(seen, 0.0, torch.finfo(mask.dtype).min).to(mask.dtype)
            return function(module, query, key, value, mask, *args, **kwargs)

        return attention

    stage.part("self_attn")
    stage.attention(wrap)


@fault("causal_mask_shifted", "every token see the next one", CONTEXT)
def sees_the_next(stage: GoldenStage) -> None:
    seen_by(stage, lambda seen, back: seen | ((back == -1) & stage.valid[:, None, None]))


@fault("causal_mask_shifted", "no token see itself", CONTEXT)
def sees_not_itself(stage: GoldenStage) -> None:
    seen_by(stage, lambda seen, back: seen & (back > 0))


@fault("causal_mask_missing", "every token see all others", CONTEXT)
def not_causal(stage: GoldenStage) -> None:
    seen_by(stage, lambda seen, back: seen | stage.valid[:, None, None])


@fault("causal_mask_missing", "every token see all others and the padding", CONTEXT)
def no_mask(stage: GoldenStage) -> None:
    seen_by(stage, lambda seen, back: torch.ones_like(seen))


@fault("last_key_hidden", "the last token of each prompt masked", CONTEXT)
def last_key_hidden(stage: GoldenStage) -> None:
    last = stage.valid & ~torch.nn.functional.pad(stage.valid, (0, 1))[:, 1:]
    seen_by(stage, lambda seen, back: seen & ~last[:, None, None])


@fault("first_key_hidden", "the first token of each prompt masked", CONTEXT)
def first_key_hidden(stage: GoldenStage) -> None:
    seen_by(stage, lambda seen, back: seen & (torch.arange(seen.shape[-1], device=seen.device) > 0))


def _window(stage: GoldenStage) -> int:
    size = getattr(stage.config, "sliding_window", None)
    if not size or size >= stage.ids.shape[1]:
        raise NotApplicable("no sliding window acts on these prompts")
    return size


def _window_by(by: int) -> None:
    @fault("sliding_window_size", f"a sliding window {'longer' if by > 0 else 'shorter'} by {abs(by)}", CONTEXT)
    def sliding_window_size(stage: GoldenStage) -> None:
        size = _window(stage)

        def change(seen: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
            if (seen & (back >= size)).any():
                raise NotApplicable("the layer has no sliding window")
            causal = (back >= 0) & stage.valid[:, None, None]
            return causal & (back < size + by)

        seen_by(stage, change)


for by in (1, -1):
    _window_by(by)


@fault("sliding_window_missing", "no sliding window", CONTEXT)
def sliding_window_missing(stage: GoldenStage) -> None:
    _window(stage)
    seen_by(stage, lambda seen, back: (back >= 0) & stage.valid[:, None, None])


@fault("sliding_window_added", "a sliding window in a layer without one", CONTEXT)
def sliding_window_added(stage: GoldenStage) -> None:
    size = _window(stage)
    seen_by(stage, lambda seen, back: seen & (back < size))


def _grouped(stage: GoldenStage, back_in_order: bool) -> None:
    attention_part = stage.part("self_attn")
    kv_heads = stage.config.num_key_value_heads
    # The golden pairs key head 0 with the first heads // kv_heads queries; this pairs it with every kv_heads-th.
    order = torch.arange(stage.config.num_attention_heads, device=stage.ids.device).view(-1, kv_heads).T.reshape(-1)
    if getattr(attention_part, "sinks", None) is not None:
        stage.weight(attention_part, "sinks", lambda sinks: sinks[order])

    def wrap(function: Callable) -> Callable:
        def attention(module: Any, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            context, weights = function(module, query[:, order], key, *args, **kwargs)
            return context[:, :, order.argsort()] if back_in_order else context, weights

        return attention

    stage.attention(wrap)


@fault("kv_heads_order", "key and value heads repeated in the wrong order", CONTEXT)
def kv_heads_order(stage: GoldenStage) -> None:
    _grouped(stage, back_in_order=True)


@fault("kv_heads_order", "query heads grouped in the wrong order", CONTEXT)
def query_heads_order(stage: GoldenStage) -> None:
    _grouped(stage, back_in_order=False)


@fault("sinks_dropped", "no attention sinks", CONTEXT)
def sinks_dropped(stage: GoldenStage) -> None:
    stage.weight(stage.part("self_attn"), "sinks", lambda sinks: torch.full_like(sinks, -1e4))


@fault("attention_softcap_dropped", "no soft cap on the attention scores", CONTEXT)
def attention_softcap_dropped(stage: GoldenStage) -> None:
    stage.set(stage.part("self_attn"), "attn_logit_softcapping", None)


@fault("context_not_transposed", "the attention's output not transposed back to [tokens, heads]", CONTEXT)
def context_not_transposed(stage: GoldenStage) -> None:
    heads = stage.config.num_attention_heads
    stage.edit(CONTEXT, lambda tensor, seen: tensor.unflatten(-1, (heads, -1)).transpose(1, 2).reshape(tensor.shape))


@fault("value_rotated", "the values rotated like queries and keys", CONTEXT)
def value_rotated(stage: GoldenStage) -> None:
    from layerproof.diagnose.faults.rotary import rotation_of

    rotation = rotation_of(stage)

    def wrap(function: Callable) -> Callable:
        def attention(
            module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            return function(module, query, key, rotation(value.transpose(1, 2)).transpose(1, 2), *args, **kwargs)

        return attention

    stage.attention(wrap)

"""Canonical taps in a decoder layer of NxD Inference: by its submodules' outputs, and inside of its attention and experts.

They are put in when a layer is built. Outside of a run that collects taps they hand on what they get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerproof.taps import Show, tap, tap_as

OUTPUTS = {
    "input_norm": ("input_layernorm",),
    "attn.q": ("self_attn.qkv_proj[0]",),
    "attn.k": ("self_attn.qkv_proj[1]",),
    "attn.v": ("self_attn.qkv_proj[2]",),
    "attn.q_norm": ("self_attn.q_layernorm", "self_attn.q_norm"),
    "attn.k_norm": ("self_attn.k_layernorm", "self_attn.k_norm"),
    "attn.out": ("self_attn.o_proj",),
    "post_attn_norm": ("post_attention_layernorm",),
    "pre_mlp_norm": ("pre_feedforward_layernorm",),
    "router.choice": ("MLP.router[2]",),
    "mlp.gate": ("MLP.gate_proj",),
    "mlp.up": ("MLP.up_proj",),
    "mlp.out": ("MLP",),
    "post_mlp_norm": ("post_feedforward_layernorm",),
}
"""Submodules of a layer whose output a tap is; `[i]` is another part than the first of one that returns several. Names that
a layer does not have are other models' names.
"""
MLPS = ("mlp", "feed_forward", "block_sparse_moe")
"""What MLP stands for."""


def put_in(layer: nn.Module, batch: int, seq: int, more: Mapping[str, str]) -> None:
    """Has a layer hand over its taps; `more` are submodules by tap, which take the place of those of `OUTPUTS`."""
    modules = dict(layer.named_modules())
    for name, places in (OUTPUTS | {name: (place,) for name, place in more.items()}).items():
        spelled = dict.fromkeys(place.replace("MLP", mlp) for place in places for mlp in MLPS)
        for path, _, part in (place.removesuffix("]").partition("[") for place in spelled):
            if path in modules:
                index = int(part) if part else None
                of_heads = getattr(modules.get("self_attn"), "post_transpose_layernorm", False)
                hook = functools.partial(_output, name, index, *_layouts(name, batch, seq, of_heads))
                modules[path].register_forward_hook(hook)
    attention = modules.get("self_attn")
    if hasattr(attention, "prep_qkv_tensors"):
        _tap_rotated(attention)
    if "self_attn.o_proj" in modules:
        modules["self_attn.o_proj"].register_forward_pre_hook(_context)
    for path, module in modules.items():
        if hasattr(module, "get_expert_affinities_masked"):
            _pass_result(module, "get_expert_affinities_masked", _of_tokens("router.weights", batch, seq))
        if path.endswith("router") and hasattr(module, "apply_activation_fn"):
            _tap_router(module, batch, seq)


def _layouts(name: str, batch: int, seq: int, of_heads: bool = False) -> tuple[Show, Show]:
    """From the library's layout to the tap's, and back."""
    if name == "router.choice":  # [tokens, top_k] in the order of the scores
        return lambda flat: flat.view(batch, seq, -1).sort(-1).values.int(), lambda shown: shown.flatten(0, 1).long()
    if name.startswith("router."):  # [tokens, experts], the scores in fp64
        return lambda flat: _up_to_fp32(flat).view(batch, seq, -1), lambda shown: shown.flatten(0, 1)
    if name in ("attn.q_rot", "attn.k_rot") or (of_heads and name in ("attn.q_norm", "attn.k_norm")):
        return _swap_heads, _swap_heads
    return _same, _same


def _of_tokens(name: str, batch: int, seq: int) -> Show:
    """Hands [tokens, experts] over as [batch, seq, experts]."""
    show, back = _layouts(name, batch, seq)
    return functools.partial(tap_as, name, show=show, back=back)


def _up_to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _swap_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, head_dim] to [batch, seq, heads, head_dim], or the other way."""
    return tensor.transpose(1, 2)


def _output(name: str, part: int | None, show: Show, back: Show, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):  # of which a part is not one of several
        return tap_as(name, output, show, back) if part is None else output
    parts = list(output)
    parts[part or 0] = tap_as(name, parts[part or 0], show, back)
    return type(output)(parts) if type(output) in (tuple, list) else type(output)(*parts)


def _context(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The input of the output projection, which the library hands over by position."""
    return (tap("attn.context", args[0]), *args[1:]) if args else args


def _tap_rotated(attention: Any) -> None:
    """Taps rotated heads where the library rotates them, or at the end of a model's own preparation of q, k and v."""
    done = []

    def rotary(result: tuple[Any, ...]) -> tuple[Any, ...]:
        done.append(True)
        return _rotated(result)

    def prepared(result: tuple[Any, ...]) -> tuple[Any, ...]:
        result = result if done else _rotated(result)
        done.clear()
        return result

    if hasattr(attention, "apply_rotary_embedding"):
        _pass_result(attention, "apply_rotary_embedding", rotary)
    _pass_result(attention, "prep_qkv_tensors", prepared)


def _rotated(result: tuple[Any, ...]) -> tuple[Any, ...]:
    queries, keys, *others = result
    queries = tap_as("attn.q_rot", queries, _swap_heads, _swap_heads)
    return (queries, tap_as("attn.k_rot", keys, _swap_heads, _swap_heads), *others)


def _tap_router(router: Any, batch: int, seq: int) -> None:
    """Taps a router's logits and scores, and what it takes the top-k of. Without a correction bias that may be the logits,
    which have the order of the scores, what a golden chooses by: then the scores stand for it.
    """
    logits, scores, selection = (_of_tokens(f"router.{name}", batch, seq) for name in ("logits", "scores", "selection"))
    own = [*router.named_parameters(recurse=False), *router.named_buffers(recurse=False)]
    is_biased = any("bias" in name for name, _ in own)

    def of_experts(activated: torch.Tensor) -> torch.Tensor:
        if activated.shape[-1] != router.num_experts:  # some activate the chosen ones alone
            return activated
        activated = scores(activated)
        if not is_biased:
            selection(activated)
        return activated

    _pass_result(router, "get_router_logits", logits)
    _pass_result(router, "apply_activation_fn", of_experts)
    if is_biased:
        forward = router.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with _TopK(selection):
                return forward(*args, **kwargs)

        router.forward = watched


class _TopK(TorchFunctionMode):
    """Passes what a top-k is taken of through a function."""

    def __init__(self, through: Show) -> None:
        super().__init__()
        self.through = through

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk) and args:
            args = (self.through(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _pass_result(module: Any, method: str, through: Callable[[Any], Any]) -> None:
    """Puts a function behind a method of one module."""
    original = getattr(module, method)
    setattr(module, method, lambda *args, **kwargs: through(original(*args, **kwargs)))

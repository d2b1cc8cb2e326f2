"""Canonical taps in a decoder layer of NxD Inference: submodule outputs, and tensors inside attention and experts.

They are put in when a layer is built. Outside a run that collects taps, they return their input unchanged.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerproof.errors import StageError
from layerproof.taps import Show, tap_as

OUTPUTS = {
    "input_norm": ("input_layernorm",),
    "attn.q": ("self_attn.qkv_proj[0]",),
    "attn.k": ("self_attn.qkv_proj[1]",),
    "attn.v": ("self_attn.qkv_proj[2]",),
    "attn.q_norm": ("self_attn.q_layernorm", "self_attn.q_norm"),
    "attn.k_norm": ("self_attn.k_layernorm", "self_attn.k_norm"),
    "attn.out": ("self_attn.o_proj",),
    "post_attn_norm": ("post_attention_layernorm",),
    "pre_mlp_norm": ("pre_feedforward_layernorm", "pre_mlp_layernorm"),
    "router.choice": ("MLP.router[2]", "MLP.moe.router[2]"),
    "mlp.gate": ("MLP.gate_proj",),
    "mlp.up": ("MLP.up_proj",),
    "mlp.out": ("MLP",),
    "post_mlp_norm": ("post_feedforward_layernorm", "post_mlp_layernorm"),
}
"""For each tap, the submodules of a layer whose output it is.

`[i]` selects part i of an output that has several; without it, the tap is the whole output or its first part. Names
that a layer does not have belong to other models.
"""
KEYS = ("attn.k", "attn.v")
"""Prefixes of the names of taps of key and value heads."""
MLPS = ("mlp", "feed_forward", "block_sparse_moe")
"""The names that MLP stands for."""


def check_places(layers: Iterable[nn.Module], places: Mapping[str, str | None]) -> None:
    """Checks that some layer has each submodule that the config names for a tap; layers of other types may lack it.

    Raises:
        StageError: if no layer has one; names the submodules that are most like it.
    """
    names = {name for layer in layers for name, _ in layer.named_modules(remove_duplicate=False)}
    for tap, place in places.items():
        if place and place.partition("[")[0] not in names:
            near = ", ".join(difflib.get_close_matches(place, names, n=3, cutoff=0)) or "none"
            raise StageError(
                f"port.nxdi.taps: {tap}: no layer has a submodule {place}. Name an existing one, such as {near}."
            )


def put_in(layer: nn.Module, batch: int, seq: int, more: Mapping[str, str | None]) -> None:
    """Puts taps into a layer.

    `more` maps taps to the submodules that replace those of `OUTPUTS`; None stands for no submodule.
    """
    modules = dict(layer.named_modules(remove_duplicate=False))  # with all names of a shared module
    heads = _Heads.of(getattr(modules.get("self_attn"), "qkv_proj", None))
    for name, places in (OUTPUTS | {name: (place,) if place else () for name, place in more.items()}).items():
        spelled = dict.fromkeys(place.replace("MLP", mlp) for place in places for mlp in MLPS)
        for path, _, part in (place.removesuffix("]").partition("[") for place in spelled):
            if path in modules and not heads.has_copies_of(name):
                index = int(part) if part else None
                of_heads = getattr(modules.get("self_attn"), "post_transpose_layernorm", False)
                layouts = heads.own(name, *_layouts(name, batch, seq, of_heads))
                modules[path].register_forward_hook(functools.partial(_output, name, index, *layouts))
    attention = modules.get("self_attn")
    if hasattr(attention, "prep_qkv_tensors"):
        _tap_rotated(attention, heads)
    if "self_attn.o_proj" in modules:
        layouts = heads.own("attn.context", _same, _same)
        modules["self_attn.o_proj"].register_forward_pre_hook(functools.partial(_context, *layouts))
    for path, module in layer.named_modules():
        if hasattr(module, "get_expert_affinities_masked"):
            _pass_result(module, "get_expert_affinities_masked", _of_tokens("router.weights", batch, seq))
        if path.endswith("router") and hasattr(module, "apply_activation_fn"):
            _tap_router(module, batch, seq)


@dataclass(frozen=True)
class _Heads:
    """Which of a rank's heads are the model's own, in order, for taps whose names start with one of `beginnings`.

    The library adds heads of zeros where ranks cannot share the existing ones. `are_keys_copied` says whether it gave
    each query head a copy of its key and value head.
    """

    is_own: tuple[bool, ...] = ()
    beginnings: tuple[str, ...] = ()
    are_keys_copied: bool = False

    @classmethod
    def of(cls, projection: Any) -> _Heads:
        """Reads the heads of a `GroupQueryAttention_QKV`.

        The library adds heads to those of each key, or after all heads if it may give each query its own key.
        """
        source, keys = (getattr(projection, f"_src_num_{name}_heads", None) for name in ("attention", "key_value"))
        if source is None or keys is None:
            return cls()
        rank, total = torch.distributed.get_rank(), projection.num_attention_heads
        local = total // torch.distributed.get_world_size()
        behind_all = projection.sharding_strategy.name == "CONVERT_TO_MHA"
        group, own = (total, source) if behind_all else (total // keys, source // keys)
        is_own = tuple(head % group < own for head in range(rank * local, (rank + 1) * local))
        more_keys = behind_all and projection.num_key_value_heads != keys
        beginnings = ("attn.q", "attn.context", *(KEYS if more_keys and source == keys else ()))
        return cls(is_own, beginnings, more_keys and source != keys)

    def has_copies_of(self, name: str) -> bool:
        """Whether a tap has more key or value heads than the model. Such a tap is not compared."""
        return self.are_keys_copied and name.startswith(KEYS)

    def own(self, name: str, show: Show, back: Show) -> tuple[Show, Show]:
        """Shows only the model's heads of a tap.

        On the way back, fills the others with zeros: no output depends on them.
        """
        if all(self.is_own) or not name.startswith(self.beginnings):
            return show, back
        own, heads = [head for head, is_own in enumerate(self.is_own) if is_own], len(self.is_own)
        whole: list[torch.Tensor] = []

        def show_own(tensor: torch.Tensor) -> torch.Tensor:
            whole[:] = [show(tensor)]
            return whole[0].unflatten(2, (heads, -1))[:, :, own].flatten(2, 3)

        def fill(shown: torch.Tensor) -> torch.Tensor:
            filled = torch.zeros_like(whole[0], dtype=shown.dtype).unflatten(2, (heads, -1))
            if own:
                filled[:, :, own] = shown.unflatten(2, (len(own), -1))
            return back(filled.flatten(2, 3))

        return show_own, fill


def _layouts(name: str, batch: int, seq: int, of_heads: bool = False) -> tuple[Show, Show]:
    """Functions from the library's layout to the tap's, and back."""
    if name == "router.choice":  # [tokens, top_k] in the order of the scores
        return lambda flat: flat.view(batch, seq, -1).sort(-1).values.int(), lambda shown: shown.flatten(0, 1).long()
    if name.startswith("router."):  # [tokens, experts], the scores in fp64
        return lambda flat: _up_to_fp32(flat).view(batch, seq, -1), lambda shown: shown.flatten(0, 1)
    if name in ("attn.q_rot", "attn.k_rot") or (of_heads and name in ("attn.q_norm", "attn.k_norm")):
        return _swap_heads, _swap_heads
    return _same, _same


def _of_tokens(name: str, batch: int, seq: int) -> Show:
    """A function that taps [tokens, experts] as [batch, seq, experts]."""
    show, back = _layouts(name, batch, seq)
    return functools.partial(tap_as, name, show=show, back=back)


def _up_to_fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _swap_heads(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, head_dim] to [batch, seq, heads, head_dim], or the reverse."""
    return tensor.transpose(1, 2)


def _output(name: str, part: int | None, show: Show, back: Show, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, torch.Tensor):  # a single tensor has no parts
        return tap_as(name, output, show, back) if part is None else output
    parts = list(output)
    parts[part or 0] = tap_as(name, parts[part or 0], show, back)
    return type(output)(parts) if type(output) in (tuple, list) else type(output)(*parts)


def _context(show: Show, back: Show, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Taps the input of the output projection, which the library passes by position."""
    return (tap_as("attn.context", args[0], show, back), *args[1:]) if args else args


def _tap_rotated(attention: Any, heads: _Heads) -> None:
    """Taps rotated heads where the library rotates them, or at the end of a model's own preparation of q, k and v."""
    done = []

    def rotary(result: tuple[Any, ...]) -> tuple[Any, ...]:
        done.append(True)
        return _rotated(heads, result)

    def prepared(result: tuple[Any, ...]) -> tuple[Any, ...]:
        result = result if done else _rotated(heads, result)
        done.clear()
        return result

    if hasattr(attention, "apply_rotary_embedding"):
        _pass_result(attention, "apply_rotary_embedding", rotary)
    _pass_result(attention, "prep_qkv_tensors", prepared)


def _rotated(heads: _Heads, result: tuple[Any, ...]) -> tuple[Any, ...]:
    queries, keys, *others = result
    queries = tap_as("attn.q_rot", queries, *heads.own("attn.q_rot", _swap_heads, _swap_heads))
    if not heads.has_copies_of("attn.k_rot"):
        keys = tap_as("attn.k_rot", keys, *heads.own("attn.k_rot", _swap_heads, _swap_heads))
    return (queries, keys, *others)


def _tap_router(router: Any, batch: int, seq: int) -> None:
    """Taps a router's logits, its scores, and the tensor that it takes the top-k of.

    A router with scores for all experts and no bias may take the top-k of its logits, since they have the same order.
    The golden takes it of the scores, so the scores are tapped in their place.
    """
    logits, scores, selection = (_of_tokens(f"router.{name}", batch, seq) for name in ("logits", "scores", "selection"))
    own = [*router.named_parameters(recurse=False), *router.named_buffers(recurse=False)]
    chosen_are_activated = getattr(router, "apply_act_fn_over_topk", False)
    is_watched = chosen_are_activated or any("bias" in name for name, _ in own)

    def of_experts(activated: torch.Tensor) -> torch.Tensor:
        if chosen_are_activated:
            return activated
        activated = scores(activated)
        if not is_watched:
            selection(activated)
        return activated

    _pass_result(router, "get_router_logits", logits)
    _pass_result(router, "apply_activation_fn", of_experts)
    if is_watched:
        forward = router.forward

        def watched(*args: Any, **kwargs: Any) -> Any:
            with _TopK((batch * seq, router.num_experts), selection):
                return forward(*args, **kwargs)

        router.forward = watched


class _TopK(TorchFunctionMode):
    """Passes the input of a top-k through a function, if it has this shape.

    Some routers choose groups of experts first.
    """

    def __init__(self, shape: tuple[int, ...], through: Show) -> None:
        super().__init__()
        self.shape, self.through = shape, through

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, torch.Tensor.topk) and args and args[0].shape == self.shape:
            args = (self.through(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _pass_result(module: Any, method: str, through: Callable[[Any], Any]) -> None:
    """Passes the results of a method of one module through a function."""
    original = getattr(module, method)
    setattr(module, method, lambda *args, **kwargs: through(original(*args, **kwargs)))

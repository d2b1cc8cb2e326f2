"""One stage of an unmodified transformers model, run by the model's own forward.

The whole causal language model runs, with every stage but one replaced by a pass-through. So masks, positions, rotary
tables, scalings and anything else that depends on the layer's index reach the stage as in the whole model, for any
architecture. The stage's input is put in at its boundary, and its output is read there.
"""

from __future__ import annotations

import contextlib
import difflib
import sys
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerproof.errors import StageError, UserError
from layerproof.model.loading import parts_of
from layerproof.model.stages import EMBED, LM_HEAD, layer_of
from layerproof.taps import OUT, Edit, TapsDone, collecting, dense_weights, tap, tap_as

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODULE_TAPS = {
    "input_layernorm": "input_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
    "self_attn": "attn.out",
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "pre_mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp": "mlp.out",
    "post_feedforward_layernorm": "post_mlp_norm",
}
"""Modules of a transformers decoder layer whose output is a canonical tap."""
PROJECTION = "self_attn.o_proj"
"""The module whose input is the context. If a model lacks it, the attention function's result is the context."""


def run_stage(
    model: PreTrainedModel,
    stage: str,
    stage_input: torch.Tensor | None,
    token_ids: torch.Tensor,
    valid: torch.Tensor,
    with_taps: bool = True,
    forced: Mapping[str, torch.Tensor] | None = None,
    edits: Mapping[str, Edit] | None = None,
    attention: Callable[[Callable], Callable] | None = None,
    until: str = OUT,
    own_taps: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, torch.Tensor]:
    """Runs one stage and returns its taps, including `out`, in the order in which they ran; without taps, `out` alone.

    `token_ids` is int64 and `valid` bool, both [batch, seq], on the model's device; `stage_input` is the previous
    stage's output [batch, seq, hidden], or None for `embed`. The run touches no weights except the stage's. `forced`,
    `edits` and `until` are those of `taps.collecting`; `attention` wraps the attention function. `own_taps` maps names of
    further taps to the submodules of a layer whose outputs they are (`golden.taps`).

    Raises:
        StageError: if an own tap's tensor has no dims for batch and seq.
    """
    parts = parts_of(model)
    layers = cast("nn.ModuleList", model.get_submodule(parts.layers))
    layer = layer_of(stage)
    with collecting(forced, edits, until, own_taps) as taps, contextlib.ExitStack() as stack, torch.no_grad():
        if stage != EMBED:
            stack.enter_context(_forward_replaced(model.get_submodule(parts.embed), lambda ids: stage_input))
        for index, module in enumerate(layers):
            if index != layer:
                stack.enter_context(_forward_replaced(module, _pass_through))
        if stage == EMBED:
            stack.enter_context(hooked(layers[0].register_forward_pre_hook(_end_with_input, with_kwargs=True)))
        elif stage == LM_HEAD:
            stack.enter_context(_forward_replaced(model.get_submodule(parts.norm), lambda hidden: stage_input))
        else:
            module = stage_module(model, stage)
            feed = _feeder(stage_input)
            # Runs before existing hooks, since those that change the input must change this one.
            stack.enter_context(hooked(module.register_forward_pre_hook(feed, prepend=True, with_kwargs=True)))
            if layer is not None and with_taps:
                _add_taps(stack, module, token_ids.shape, attention, own_taps)
            stack.enter_context(hooked(module.register_forward_hook(_end_with_output)))
        try:
            result = model(input_ids=token_ids, attention_mask=valid.long(), use_cache=False)
            tap(OUT, result.logits)
        except TapsDone:
            pass
    return taps


def check_submodules(model: PreTrainedModel, own_taps: Mapping[str, str]) -> None:
    """Checks that each own tap names a submodule that some layer has.

    Raises:
        UserError: for the first that does not; suggests the nearest names.
    """
    layers = cast("nn.ModuleList", model.get_submodule(parts_of(model).layers))
    paths = dict.fromkeys(path for layer in layers for path, _ in layer.named_modules() if path)
    for name, path in own_taps.items():
        if path not in paths:
            near = difflib.get_close_matches(path, paths, 3, 0.4) or list(paths)[:10]
            raise UserError(
                f'config.yaml: golden.taps: {name}: no layer has a submodule "{path}". Layers have {", ".join(near)}.'
            )


def stage_module(model: PreTrainedModel, stage: str) -> nn.Module:
    """The module of a transformers causal language model that a stage runs."""
    return model.get_submodule(parts_of(model).path_of(stage))


def _pass_through(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _feeder(stage_input: torch.Tensor | None) -> Callable:
    def feed(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return (stage_input, *args[1:]), kwargs

    return feed


def _end_with_input(module: nn.Module, args: tuple, kwargs: dict) -> None:
    tap(OUT, args[0])
    raise TapsDone


def _end_with_output(module: nn.Module, args: tuple, output: Any) -> None:
    tap(OUT, first_of(output))
    raise TapsDone


def first_of(output: Any) -> torch.Tensor:
    """The hidden states in a module's output."""
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _forward_replaced(module: nn.Module, forward: Callable) -> Iterator[None]:
    before = module.__dict__.get("forward")  # accelerate puts its own forward here if it moves what the module needs
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextlib.contextmanager
def hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """Removes a hook when the block ends."""
    try:
        yield
    finally:
        handle.remove()


def _add_taps(
    stack: contextlib.ExitStack,
    layer: nn.Module,
    shape: torch.Size,
    attention: Callable[[Callable], Callable] | None,
    own_taps: Mapping[str, str],
) -> None:
    """Adds hooks for every tap that the layer has, canonical and own; `shape` is [batch, seq]."""
    modules = dict(layer.named_modules())
    for name, path in own_taps.items():
        if path in modules:
            stack.enter_context(hooked(modules[path].register_forward_hook(_own_tap(name, shape))))
    for path, name in MODULE_TAPS.items():
        if path in modules:
            stack.enter_context(hooked(modules[path].register_forward_hook(_module_tap(name, shape))))
    projection = modules.get(PROJECTION)
    if projection is not None:
        stack.enter_context(hooked(projection.register_forward_pre_hook(_context_tap(shape))))
    stack.enter_context(_attention_taps(attention, has_context=projection is None))
    experts = modules.get("mlp.experts")
    router = modules.get("mlp.gate") or modules.get("mlp.router")
    if experts is not None and router is not None:
        _add_router_taps(stack, router, experts, shape)


def _module_tap(name: str, shape: torch.Size) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        tensor = first_of(output)
        # Some models normalise q and k per head before they exchange the dims of heads and tokens, some after.
        dims = (1, 1) if tensor.shape[:2] == shape else (1, 2)
        tensor = _tap_moved(name, tensor, *dims)
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

    return hook


def _own_tap(name: str, shape: torch.Size) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        tensor = first_of(output)
        if tensor.shape[:2] == shape:
            tensor = tap(name, tensor)
        elif tensor.shape[:1] == (shape.numel(),):
            tensor = _tap_viewed(name, tensor, shape)
        elif tensor.shape[0:3:2] == shape:
            tensor = _tap_moved(name, tensor, 1, 2)
        else:
            raise StageError(
                f"config.yaml: golden.taps: {name}: its submodule returns {list(tensor.shape)}, and a tap begins with "
                f"[batch, seq], here {list(shape)}. Name another submodule."
            )
        return (tensor, *output[1:]) if isinstance(output, tuple) else tensor

    return hook


def _context_tap(shape: torch.Size) -> Callable:
    """Taps the input of the output projection: some models first gate or norm the attention function's result."""

    def hook(module: nn.Module, args: tuple) -> tuple:
        return (_tap_viewed("attn.context", args[0], shape), *args[1:])

    return hook


def _tap_moved(name: str, tensor: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Taps a tensor with two dims exchanged."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(first, second)

    return tap_as(name, tensor, moved, moved)


def _tap_viewed(name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Taps a tensor as [batch, seq, rest], where `shape` is [batch, seq]."""
    return tap_as(name, tensor, lambda flat: flat.reshape(*shape, -1), lambda shown: shown.reshape(tensor.shape))


@contextlib.contextmanager
def _attention_taps(wrap: Callable[[Callable], Callable] | None, has_context: bool) -> Iterator[None]:
    """Taps rotated q and k where transformers calls the attention function, whichever that is.

    With `has_context`, also taps its result as the context.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def tapped(original: Callable | None) -> Callable:
        def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any):
            function = original or sys.modules[type(module).__module__].eager_attention_forward
            function = wrap(function) if wrap else function
            query, key = _tap_moved("attn.q_rot", query, 1, 2), _tap_moved("attn.k_rot", key, 1, 2)
            context, weights = function(module, query, key, *args, **kwargs)
            if has_context:
                context = _tap_viewed("attn.context", context, context.shape[:2])
            return context, weights

        return attention

    originals = dict(ALL_ATTENTION_FUNCTIONS)
    for name, original in {"eager": None, **originals}.items():
        ALL_ATTENTION_FUNCTIONS[name] = tapped(original)
    try:
        yield
    finally:
        for name in {"eager", *originals}:
            del ALL_ATTENTION_FUNCTIONS[name]


class _RouterSteps(TorchFunctionMode):
    """Taps the steps of a router: its product, the result of sigmoid or softmax, and the input of the top-k."""

    def __init__(self, num_experts: int, shape: torch.Size) -> None:
        """`shape` is [batch, seq], which the router's input no longer has."""
        super().__init__()
        self.num_experts = num_experts
        self.shape = shape

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "topk" and args[0].shape[-1] == self.num_experts:
            args = (_tap_viewed("router.selection", args[0], self.shape), *args[1:])
        result = func(*args, **(kwargs or {}))
        if name == "linear" and result.shape[-1] == self.num_experts:
            return _tap_viewed("router.logits", result, self.shape)
        if name in ("sigmoid", "softmax") and result.shape[-1] == self.num_experts:
            return _tap_viewed("router.scores", result, self.shape)
        return result


def _add_router_taps(stack: contextlib.ExitStack, router: nn.Module, experts: nn.Module, shape: torch.Size) -> None:
    num_experts = cast("int", experts.num_experts)
    steps = _RouterSteps(num_experts, shape)

    forward = router.forward

    def in_steps(*args: Any, **kwargs: Any) -> Any:
        with steps:
            return forward(*args, **kwargs)

    def before_experts(module: nn.Module, args: tuple) -> tuple | None:
        hidden, choice, weights = args
        ordered = choice.view(*shape, -1).sort(-1).values.int()
        chosen = tap("router.choice", ordered)
        dense = dense_weights(choice.view(*shape, -1), weights.reshape(*shape, -1), num_experts)
        weighted = tap("router.weights", dense)
        if chosen is ordered and weighted is dense:
            return None  # another order of the choice would change the order of a sum
        chosen = chosen.long()
        return hidden, chosen.flatten(0, 1), weighted.gather(-1, chosen).flatten(0, 1).to(weights.dtype)

    stack.enter_context(_forward_replaced(router, in_steps))
    stack.enter_context(hooked(experts.register_forward_pre_hook(before_experts)))

"""Taps inside a decoder layer of transformers: of its modules, its attention function, its mixers and its router.

Modules that do what a canonical tap names have its name, whatever they are called. Every other module that returns
[batch, seq, ...], in this or another order of dims, is a tap by its own name in the layer.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from layerproof.errors import StageError
from layerproof.model.parts import hooked, replaced_forward
from layerproof.taps import SHAPES, dense_weights, forward_place, note_place, tap, tap_as

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
"""Modules of a transformers decoder layer whose output is a canonical tap, by their usual names."""

OTHER_NAMES = (
    (r"^(attn|attention|self_attention)\b", "self_attn"),
    (r"^(feed_forward|ffn|block_sparse_moe)\b", "mlp"),
    (r"^self_attn\.(query|key)_layernorm$", lambda match: f"self_attn.{match[1][0]}_norm"),
    (r"^self_attn\.([qk])_layernorm$", r"self_attn.\1_norm"),
    (r"^self_attn\.(out_proj|dense|c_proj)$", "self_attn.o_proj"),
    (r"^(ln_1|operator_norm)$", "input_layernorm"),
    (r"^(pre|post)_mlp_layernorm$", r"\1_feedforward_layernorm"),
)
"""Other names of these modules, as patterns and what they usually are called."""

PROJECTION = "self_attn.o_proj"
"""The module whose input is the context. If a model lacks it, the attention function's result is the context."""


MIXING = re.compile("conv1d|delta_rule|delta_attention|linear_attention$|scan|state_update")
"""Names of functions that mix tokens, in files of models."""

LAST = (PROJECTION, "mlp.down_proj")
"""Modules whose output is that of the module around them, which is a tap."""


def usual_name(path: str) -> str:
    """Returns what a layer's submodule is usually called: `self_attn.q_norm` for `attention.query_layernorm`."""
    for pattern, usual in OTHER_NAMES:
        path = re.sub(pattern, usual, path)
    return path


def first_of(output: Any) -> torch.Tensor:
    """The hidden states in a module's output."""
    return output[0] if isinstance(output, (tuple, list)) else output


def _has_first(output: Any) -> bool:
    return not isinstance(output, (tuple, list)) or bool(output)


def _with_first(output: Any, tensor: torch.Tensor) -> Any:
    """A module's output with these hidden states."""
    return type(output)([tensor, *output[1:]]) if isinstance(output, (tuple, list)) else tensor


def add_taps(
    stack: contextlib.ExitStack,
    layer: nn.Module,
    shape: torch.Size,
    attention: Callable[[Callable], Callable] | None,
    own_taps: Mapping[str, str],
) -> None:
    """Adds hooks for every tap that the layer has, canonical and own; `shape` is [batch, seq]."""
    modules = dict(layer.named_modules())
    usual = {usual_name(path): module for path, module in modules.items()}
    experts = usual.get("mlp.experts")
    router = next((path for path in modules if usual_name(path) in ("mlp.gate", "mlp.router")), None)
    untapped = _Untapped(set(), set())
    cast("Any", layer).layerproof_untapped = untapped
    has_interface = router is not None and isinstance(getattr(experts, "num_experts", None), int)
    for name, path in own_taps.items():
        if path in modules:
            stack.enter_context(hooked(modules[path].register_forward_hook(_own_tap(name, shape))))
    for path, module in modules.items():
        if path == router and not has_interface:
            stack.enter_context(hooked(module.register_forward_hook(_module_tap("router.logits", shape))))
        elif path not in ("", router, *own_taps.values()) and not _is_covered(usual_name(path)):
            name = MODULE_TAPS.get(usual_name(path), path)
            stack.enter_context(hooked(module.register_forward_hook(_module_tap(name, shape, untapped, path))))
            if _has_weights(module):
                untapped.not_run.add(path)
    projection = usual.get(PROJECTION)
    if projection is not None:
        stack.enter_context(hooked(projection.register_forward_pre_hook(_context_tap(shape))))
    stack.enter_context(_attention_taps(attention, shape, has_context=projection is None))
    if has_interface:
        _add_choice_taps(stack, cast("nn.Module", experts), shape)
    takes_choice = has_interface and len(inspect.signature(cast("nn.Module", experts).forward).parameters) == 3
    num_experts = cast("Any", experts).num_experts if has_interface else 0
    steps = _Steps(shape, router, num_experts, takes_choice, lowest=_lowest(layer) / 2)
    _add_function_taps(stack, modules, shape, steps, untapped)
    _add_steps(stack, layer, modules, steps)


def _lowest(layer: nn.Module) -> float:
    """The number by which masks of this layer rule out: the lowest of its dtype, which in fp32 is a little below bf16's."""
    is_fp16 = any(parameter.dtype == torch.float16 for parameter in layer.parameters())
    return torch.finfo(torch.float16 if is_fp16 else torch.bfloat16).min


def modules_without_tap(layer: nn.Module) -> list[str]:
    """The modules of a layer that have weights of their own and returned no tap when the layer last ran with taps."""
    untapped: _Untapped | None = getattr(layer, "layerproof_untapped", None)
    return sorted(untapped.not_run | untapped.no_tap) if untapped else []


@dataclass(frozen=True)
class _Untapped:
    """Paths of modules with weights of their own that did not run, and of those that ran and returned no tap."""

    not_run: set[str]
    no_tap: set[str]


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_covered(path: str) -> bool:
    """Whether a module needs no tap: what it returns is that of the module around it, or depends on who chose an expert."""
    return path in LAST or path.startswith("mlp.experts.")


@dataclass(frozen=True)
class View:
    """How a tensor becomes a tap [batch, seq, ...], and back."""

    show: Callable[[torch.Tensor], torch.Tensor]
    back: Callable[[torch.Tensor], torch.Tensor]


def view_of(tensor: Any, shape: torch.Size, per_head: bool = False, heads_first: bool = False) -> View | None:
    """Finds the dims of batch and seq in a tensor; None if it has none.

    Tokens may be flattened into one dim, and so may be their heads if the tensor is `per_head`. If it is known that heads
    come before positions, it does not matter that there may be as many of both.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
        return None
    sizes = tensor.shape
    if sizes[:2] == shape and not (heads_first and sizes[2:3] == shape[1:]):
        return View(lambda whole: whole, lambda shown: shown)
    for first, second in ((0, 2), (1, 2), (0, 3)):
        if len(sizes) > max(second, 2) and (sizes[first], sizes[second]) == tuple(shape):
            return _moved(first, second)
    batch, seq = shape
    if len(sizes) == 3 and sizes[0] == batch and seq < sizes[2] < 2 * seq:  # a causal convolution, and its padding
        ends = sizes[2] - seq
        return View(
            lambda whole: whole[..., :seq].transpose(1, 2),
            lambda shown: torch.cat((shown.transpose(1, 2), shown.new_zeros(batch, sizes[1], ends)), -1),
        )
    if sizes[:1] == (shape.numel(),):
        return View(lambda whole: whole.reshape(*shape, *sizes[1:]), lambda shown: shown.reshape(sizes))
    if per_head and len(sizes) == 2 and sizes[0] % shape.numel() == 0:
        return View(lambda whole: whole.reshape(*shape, -1, sizes[1]), lambda shown: shown.reshape(sizes))
    return None


def _moved(first: int, second: int) -> View:
    return View(
        lambda whole: whole.movedim((first, second), (0, 1)), lambda shown: shown.movedim((0, 1), (first, second))
    )


def _hand_over(name: str, tensor: Any, view: View | None) -> Any:
    """Taps a tensor of floats that has dims of batch and seq."""
    return tensor if view is None or not tensor.is_floating_point() else tap_as(name, tensor, view.show, view.back)


def _module_tap(name: str, shape: torch.Size, untapped: _Untapped | None = None, path: str = "") -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        if untapped:
            untapped.not_run.discard(path)
        if name not in SHAPES and any(output is given for given in args):  # a dropout, or another that does nothing
            return output
        if not _has_first(output):
            return output
        tensor = first_of(output)
        is_norm = "norm" in type(module).__name__.lower()  # others may sort their rows by expert
        view = view_of(tensor, shape, is_norm)
        if untapped and view is None and _has_weights(module):
            untapped.no_tap.add(path)
        handed_over = _hand_over(name, tensor, view)
        if not type(module).__module__.startswith("transformers."):  # but put in its place by a patch, say
            note_place(name, forward_place(module))
        return _with_first(output, handed_over)

    return hook


def _own_tap(name: str, shape: torch.Size) -> Callable:
    def hook(module: nn.Module, args: tuple, output: Any) -> Any:
        tensor = first_of(output)
        view = view_of(tensor, shape)
        if view is None:
            raise StageError(
                f"config.yaml: golden.taps: {name}: its submodule returns {list(tensor.shape)}, and a tap begins with "
                f"[batch, seq], here {list(shape)}. Name another submodule."
            )
        return _with_first(output, tap_as(name, tensor, view.show, view.back))

    return hook


def _context_tap(shape: torch.Size) -> Callable:
    """Taps the input of the output projection: some models first gate or norm the attention function's result."""

    def hook(module: nn.Module, args: tuple) -> tuple | None:
        return (_flat("attn.context", args[0], shape), *args[1:]) if args else None

    return hook


def _flat(name: str, tensor: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Taps a tensor whose first dims are batch and seq, or both in one, as [batch, seq, rest]."""
    return tap_as(name, tensor, lambda whole: whole.reshape(*shape, -1), lambda shown: shown.reshape(tensor.shape))


@contextlib.contextmanager
def _attention_taps(
    wrap: Callable[[Callable], Callable] | None, shape: torch.Size, has_context: bool
) -> Iterator[None]:
    """Taps rotated q and k where transformers calls the attention function, whichever that is.

    With `has_context`, also taps its result as the context.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def tapped(original: Callable | None) -> Callable:
        def attention(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any):
            function = original or sys.modules[type(module).__module__].eager_attention_forward
            function = wrap(function) if wrap else function
            query = _hand_over("attn.q_rot", query, view_of(query, shape, heads_first=True))
            if key.shape[2:3] == query.shape[2:3]:  # otherwise keys are not those of the tokens
                key = _hand_over("attn.k_rot", key, view_of(key, shape, heads_first=True))
            context, weights = function(module, query, key, *args, **kwargs)
            if has_context:
                context = _flat("attn.context", context, shape)
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


def _add_function_taps(
    stack: contextlib.ExitStack, modules: Mapping[str, nn.Module], shape: torch.Size, steps: _Steps, untapped: _Untapped
) -> None:
    """Taps convolutions, scans and delta rules, which transformers has as functions beside its classes.

    Their arguments are taps, too: keys, decay, gates. Modules whose weights such a function gets do not run themselves.
    """
    files = {sys.modules.get(type(module).__module__) for module in modules.values()}
    for modeling in filter(None, files):
        for name, function in list(vars(modeling).items()):
            if inspect.isfunction(function) and MIXING.search(name):  # not torch's own, which have no signature
                stack.callback(setattr, modeling, name, function)
                setattr(modeling, name, _tapped(name, function, shape, steps, untapped))


def _tapped(name: str, function: Callable, shape: torch.Size, steps: _Steps, untapped: _Untapped) -> Callable:
    names = list(inspect.signature(function).parameters)
    is_convolution = "conv" in name  # of channels first; its input is what a projection returned

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        place, owner = steps.name(name), steps.running[-1]
        untapped.not_run.difference_update([path for path in untapped.not_run if path.startswith(f"{owner}.")])

        def shown(argument: str, value: Any) -> Any:
            return _hand_over(f"{place}.{argument}", value, None if is_convolution else view_of(value, shape))

        positional = [shown(argument, value) for argument, value in zip(names, args, strict=False)]
        output = function(
            *positional, *args[len(positional) :], **{key: shown(key, value) for key, value in kwargs.items()}
        )
        if not _has_first(output):
            return output
        first = first_of(output)
        return _with_first(output, _hand_over(place, first, view_of(first, shape, heads_first=is_convolution)))

    return call


class _Steps(TorchFunctionMode):
    """Taps operations of a layer that modules do not show.

    A router has taps at its product, at the result of sigmoid or softmax, and at the input of its top-k. Every other
    top-k has two, and so has the maximum in a router: `MODULE.selection` is its input, and `MODULE.choice` the places
    that it finds, in ascending order. A comparison in a router has `MODULE.margin`, by how much its first operand is
    larger. Where these are nearly tied, noise decides what follows (`measure.routing`).
    """

    def __init__(
        self, shape: torch.Size, router: str | None, num_experts: int, experts_get_choice: bool, lowest: float
    ) -> None:
        """`shape` is [batch, seq], which the router's input no longer has; `router` is the path of the router.

        A choice that experts get is tapped where they get it, and any other where it is made. What is not above `lowest`
        is ruled out.
        """
        super().__init__()
        self.lowest = lowest
        self.experts_get_choice = experts_get_choice
        self.shape = shape
        self.router = router
        self.num_experts = num_experts
        self.running: list[str] = [""]

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        positional, kwargs = cast("Any", args), kwargs or {}
        in_router = self.router is not None and self.running[-1] == self.router
        if name == "topk":
            if in_router and self._is_by_expert(positional[0]) and not self._is_of_groups(positional[0]):
                args = (_flat("router.selection", positional[0], self.shape), *args[1:])
                if self.experts_get_choice:
                    return func(*args, **kwargs)
                return torch.return_types.topk(self._places(func(*args, **kwargs), args[0], "router.choice"))
            dim = positional[2] if len(args) > 2 else kwargs.get("dim", -1)
            return torch.return_types.topk(self._choice(func(*args, **kwargs), positional[0], dim))
        if (
            in_router
            and name == "max"
            and isinstance(dim := positional[1] if len(args) > 1 else kwargs.get("dim"), int)
        ):
            keepdim = bool(positional[2] if len(args) > 2 else kwargs.get("keepdim", False))
            values, places = self._choice(func(positional[0], dim, keepdim=True), positional[0], dim)
            return torch.return_types.max((values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim)))
        if in_router and name in COMPARISONS and len(args) == 2:
            return self._compared(func, COMPARISONS[name], *args)
        result = func(*args, **kwargs)
        if in_router and name == "linear" and self._is_by_expert(result):
            return _flat("router.logits", result, self.shape)
        if in_router and name in ("sigmoid", "softmax") and self._is_by_expert(result):
            return _flat("router.scores", result, self.shape)
        return result

    def _is_by_expert(self, tensor: torch.Tensor) -> bool:
        return tensor.numel() == self.shape.numel() * self.num_experts and tensor.shape[-1] == self.num_experts

    def _is_of_groups(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor by expert has a dim of groups, of size 1: its top-k rates the groups and chooses no expert."""
        return tensor.ndim == 3 and tensor.shape[:2] != self.shape

    def _choice(self, result: Any, taken_of: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps the places of the largest numbers along the last dim of a tensor with dims of batch and seq.

        `result` is what torch found, values and places; so is what is returned.
        """
        view = view_of(taken_of, self.shape)
        if view is None or view_of(result[1], self.shape) is None or dim not in (-1, taken_of.ndim - 1):
            return result
        name = self.name("choice")
        # The lowest number of a dtype, plus a score, is another one in golden and truth.
        selection = taken_of.masked_fill(taken_of <= self.lowest, -torch.inf)
        tap(name.replace("choice", "selection"), view.show(selection))
        return self._places(result, taken_of, name)

    def _places(self, result: Any, taken_of: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Taps the places of `result`, values and places, in ascending order; returns it, or what the tap says instead."""
        values, places = result
        of_places = view_of(places, self.shape)
        assert of_places is not None
        ordered = of_places.show(places).sort(-1).values.int()
        chosen = tap(name, ordered)
        if chosen is ordered:
            return values, places  # another order of the choice would change the order of sums
        places = of_places.back(chosen.long())
        return taken_of.gather(-1, places), places

    def _compared(
        self, compare: Callable, is_true: Callable[[torch.Tensor], torch.Tensor], first: Any, second: Any
    ) -> Any:
        """Compares, or says what the tap of the margin says instead."""
        tensors = [one for one in (first, second) if isinstance(one, torch.Tensor)]
        if not all(one.is_floating_point() for one in tensors):
            return compare(first, second)
        margin = first - second
        view = view_of(margin, self.shape)
        if view is None:
            return compare(first, second)
        after = tap_as(self.name("margin"), margin, view.show, view.back)
        return compare(first, second) if after is margin else is_true(after)

    def name(self, what: str) -> str:
        return f"{self.running[-1]}.{what}".lstrip(".")


COMPARISONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("gt", "__gt__"), lambda margin: margin > 0),
    **dict.fromkeys(("ge", "__ge__"), lambda margin: margin >= 0),
    **dict.fromkeys(("lt", "__lt__"), lambda margin: margin < 0),
    **dict.fromkeys(("le", "__le__"), lambda margin: margin <= 0),
}
"""What comparisons say of the difference of their operands."""


def _add_steps(stack: contextlib.ExitStack, layer: nn.Module, modules: Mapping[str, nn.Module], steps: _Steps) -> None:
    """Turns `_Steps` on while the layer runs, and tells it which module is running."""

    def entering(path: str) -> Callable:
        return lambda module, args: steps.running.append(path)

    def leaving(module: nn.Module, args: Any, output: Any) -> None:
        steps.running.pop()

    for path, module in modules.items():
        if path:
            stack.enter_context(hooked(module.register_forward_pre_hook(entering(path))))
            stack.enter_context(hooked(module.register_forward_hook(leaving)))
    forward = layer.forward

    def in_steps(*args: Any, **kwargs: Any) -> Any:
        with steps:
            return forward(*args, **kwargs)

    stack.enter_context(replaced_forward(layer, in_steps))


def _add_choice_taps(stack: contextlib.ExitStack, experts: nn.Module, shape: torch.Size) -> None:
    """Taps which experts are chosen, and their weights, where transformers hands both to the experts."""
    num_experts = cast("int", experts.num_experts)

    def before_experts(module: nn.Module, args: tuple) -> tuple | None:
        if len(args) != 3 or args[1].is_floating_point() or args[1].numel() != args[2].numel():
            return None
        hidden, choice, weights = args
        ordered = choice.view(*shape, -1).sort(-1).values.int()
        chosen = tap("router.choice", ordered)
        dense = dense_weights(choice.view(*shape, -1), weights.reshape(*shape, -1), num_experts)
        weighted = tap("router.weights", dense)
        if chosen is ordered and weighted is dense:
            return None  # another order of the choice would change the order of a sum
        chosen = chosen.long()
        return hidden, chosen.flatten(0, 1), weighted.gather(-1, chosen).flatten(0, 1).to(weights.dtype)

    stack.enter_context(hooked(experts.register_forward_pre_hook(before_experts)))

"""What a fault is, and a golden stage that faults can be put into and removed from."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerproof.errors import StageError
from layerproof.golden.layer_taps import MODULE_TAPS, usual_name
from layerproof.golden.stage import raw_weight, with_weights
from layerproof.golden.transformers_stage import run_stage, stage_module
from layerproof.model.stages import layer_of
from layerproof.taps import OUT, Edit

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PATHS = {tap: path for path, tap in MODULE_TAPS.items()}
"""For each tap, the path in a layer of the module whose output it is."""


class NotApplicable(Exception):
    """The fault cannot be made in this stage: the model lacks the part that it would change."""


@dataclass(frozen=True)
class Fault:
    """A known porting mistake. `text` follows "it behaves as if the port had"; `tap` is where it shows first.

    `slow` faults need another layer's weights, and are tried only if no other fault explains the tap.
    """

    name: str
    text: str
    tap: str
    make: Callable[[GoldenStage], None]
    slow: bool = False


@dataclass(frozen=True)
class Faults:
    """The faults of one module, in the order of the source."""

    found: list[Fault] = field(default_factory=list)

    def __call__(self, name: str, text: str, *taps: str, slow: bool = False) -> Callable:
        """Registers a function as a fault at a tap; at several taps, it gets the tap as its second argument."""

        def register(make: Callable) -> Callable:
            for tap in taps:
                self.found.append(Fault(name, text, tap, make if len(taps) == 1 else _at(make, tap), slow))
            return make

        return register


def _at(make: Callable, tap: str) -> Callable[[GoldenStage], None]:
    return lambda stage: make(stage, tap)


def rank_zero_only(weight: torch.Tensor, ranks: int, dim: int) -> torch.Tensor:
    """A weight that is sharded along a dim, with zeros in place of the other ranks' shards."""
    first, *others = weight.chunk(ranks, dim)
    return torch.cat((first, *map(torch.zeros_like, others)), dim)


@dataclass
class GoldenStage:
    """One stage of the golden, in its dtype or in fp32, that runs unchanged or with faults.

    `x` is the stage's input [batch, seq, ...], or None for `embed`, and `handed` what earlier stages hand over besides;
    `ids` int64 and `valid` bool are [batch, seq].
    `load` loads the weights of another stage into the model. `read` returns a parameter of this stage as it is loaded
    if its tensors on disk whose names have the given ending are changed. `own_taps` are those of `run_stage`.
    """

    model: PreTrainedModel
    name: str
    x: torch.Tensor | None
    handed: Mapping[str, torch.Tensor]
    ids: torch.Tensor
    valid: torch.Tensor
    load: Callable[[PreTrainedModel, str], None]
    read: Callable[[str, str, Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]
    own_taps: Mapping[str, str]
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _edits: dict[str, Edit] = field(default_factory=dict)
    _attention: Callable[[Callable], Callable] | None = None
    rotations: dict[str, list] = field(default_factory=dict)
    """Changed rotations by tap, in the order of the faults that made them: each starts from the one before."""
    _originals: dict[tuple[nn.Module, str], torch.Tensor] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        return stage_module(self.model, self.name)

    @property
    def is_layer(self) -> bool:
        return layer_of(self.name) is not None

    @property
    def config(self) -> Any:
        return self.model.config.get_text_config()

    def run(
        self,
        forced: Mapping[str, torch.Tensor],
        faults: Sequence[Fault] = (),
        x: torch.Tensor | None = None,
        until: str = OUT,
    ) -> dict[str, torch.Tensor]:
        """Taps of the stage with `faults`, and with all taps in `forced` in place of its own; `x` is another input.

        `until` names the last tap that is needed.

        Raises:
            NotApplicable: if one of the faults cannot be made here.
        """
        with self._with(faults):
            x = self.x if x is None else x
            if self.model.dtype == torch.float32:  # faults compute with forced taps and weights in one dtype
                forced = {name: tap.float() if tap.is_floating_point() else tap for name, tap in forced.items()}
            return run_stage(
                *(self.model, self.name, x, self.ids, self.valid),
                forced=forced,
                edits=self._edits,
                attention=self._attention,
                until=until,
                own_taps=self.own_taps,
                handed=self.handed,
            )

    def are_of_code(self, faults: Sequence[Fault]) -> bool:
        """Whether faults change what the stage computes, and none of its weights."""
        with self._with(faults):
            return not self._originals

    @contextlib.contextmanager
    def _with(self, faults: Sequence[Fault]) -> Iterator[None]:
        with contextlib.ExitStack() as self._stack:
            try:
                for fault in faults:
                    fault.make(self)
                yield
            finally:
                self._edits, self._attention, self.rotations, self._originals = {}, None, {}, {}

    # Building blocks of faults

    def part(self, path: str) -> Any:
        """A module of the stage by its dotted name in a decoder layer, or the stage's own module for ""."""
        if path and not self.is_layer:
            raise NotApplicable(f"{self.name} is not a layer")
        for name, module in self.module.named_modules():
            if path in (name, usual_name(name)):
                return module
        raise NotApplicable(f"{self.name} has no {path}")

    def of_tap(self, tap: str) -> Any:
        """The module whose output the tap is."""
        if tap == "out" and not self.is_layer:
            return self.module
        if tap not in PATHS:
            raise NotApplicable(f"{tap} is not the output of a module")
        return self.part(PATHS[tap])

    def edit(self, tap: str, edit: Edit) -> None:
        """Replaces a tap's tensor by `edit(tensor, taps before it)`; a second edit gets the result of the first."""
        before = self._edits.get(tap)

        def make(tensor: torch.Tensor, seen: Mapping[str, torch.Tensor]) -> torch.Tensor:
            try:
                return edit(tensor if before is None else before(tensor, seen), seen)
            except KeyError as error:
                raise NotApplicable(f"the stage has no tap {error}") from None

        self._edits[tap] = make

    def attention(self, wrap: Callable[[Callable], Callable]) -> None:
        """Replaces the attention function by `wrap` of it, which transformers calls in the same way."""
        before = self._attention
        self._attention = wrap if before is None else lambda function: wrap(before(function))

    def output(self, module: nn.Module, make: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        """Replaces the module's output by `make(its input, its output)`."""

        def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return make(args[0], output)

        self._stack.callback(module.register_forward_hook(hook).remove)

    def input(self, module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces the module's first input by `make(its input)`."""

        def hook(module: nn.Module, args: Any) -> Any:
            return (make(args[0]), *args[1:])

        self._stack.callback(module.register_forward_pre_hook(hook).remove)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute."""
        if not hasattr(owner, name):
            raise NotApplicable(f"{type(owner).__name__} has no {name}")
        self._stack.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def weight(self, module: nn.Module, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces a parameter or buffer by `make` of it; its shape must stay the same."""
        if getattr(module, name, None) is None:
            raise NotApplicable(f"{type(module).__name__} has no {name}")
        old = raw_weight(module, name)
        self._originals.setdefault((module, name), old)
        new = make(old)
        if new.shape != old.shape:
            raise NotApplicable(f"{name} would change its shape")
        self._stack.enter_context(with_weights(module, name, new))

    def reload(self, module: nn.Module, name: str, ending: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replaces a parameter by the one that loads if its tensors on disk with this ending are changed."""
        path = next(path for path, other in self.model.named_modules() if other is module)
        try:
            new = self.read(f"{path}.{name}", ending, change)
        except StageError as error:
            raise NotApplicable(str(error)) from error
        self.weight(module, name, lambda old: new.to(old.dtype))

    def original(self, module: nn.Module, name: str) -> torch.Tensor:
        """A parameter or buffer as it was before any fault."""
        return self._originals.get((module, name), raw_weight(module, name))

    def neighbour(self, offset: int, path: str) -> nn.Module:
        """The module of this name in the layer `offset` further on, with its weights."""
        layer = layer_of(self.name)
        other = None if layer is None else layer + offset
        if other is None or not 0 <= other < self.config.num_hidden_layers:
            raise NotApplicable(f"{self.name} has no neighbour at {offset:+d}")
        name = f"layer_{other:03d}"
        layer_module = stage_module(self.model, name)
        # Frees its memory when the fault is removed.
        self._stack.callback(layer_module._apply, lambda tensor: torch.empty_like(tensor, device="meta"))
        try:
            self.load(self.model, name)
        except StageError as error:
            raise NotApplicable(str(error)) from error
        found = dict(layer_module.named_modules()).get(path)
        if found is None:
            raise NotApplicable(f"{name} has no {path}")
        return found

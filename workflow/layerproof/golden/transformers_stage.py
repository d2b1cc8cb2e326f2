"""One stage of an unmodified transformers model, run by the model's own forward.

The whole causal language model runs, with every layer but one replaced by a pass-through. So masks, positions, rotary
tables, scalings and anything else that depends on the layer's index reach the stage as in the whole model, for any
architecture. What depends on weights of other stages is unknown on the way (`unknowns.Unknowns`). The stage's input is put
in at its boundary, and its output is read where the next stage begins.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from layerproof.errors import UserError
from layerproof.golden.layer_taps import add_taps, first_of
from layerproof.model.parts import (
    Call,
    Dims,
    as_returned,
    from_tap,
    hooked,
    parts_of,
    replaced_forward,
    to_tap,
)
from layerproof.model.stages import EMBED, LM_HEAD, NORM, layer_of, layer_stage
from layerproof.model.unknowns import Unknowns
from layerproof.taps import OUT, Edit, TapsDone, collecting, tap

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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
    handed: Mapping[str, torch.Tensor] = MappingProxyType({}),
    without_weights: bool = False,
) -> dict[str, torch.Tensor]:
    """Runs one stage and returns its taps, including `out`, in the order in which they ran; without taps, `out` alone.

    `token_ids` is int64 and `valid` bool, both [batch, seq], on the model's device; `stage_input` is the previous
    stage's output [batch, seq, ...], or None for `embed`. The run touches no weights except the stage's. `forced`,
    `edits` and `until` are those of `taps.collecting`; `attention` wraps the attention function. `own_taps` maps names of
    further taps to the submodules of a layer whose outputs they are (`golden.taps`).

    What earlier stages hand over besides their output is in `handed`, [batch, seq, ...], by the names of
    `Parts.inputs`; floats are cast to the model's dtype. What this stage hands over to later ones is among the result
    as `out/NAME`, or `out/NAME.STAGE` if later stages get different tensors.

    A run `without_weights`, to measure what it takes, is that of a model on the meta device; `stage_input` is there, too.

    Raises:
        StageError: if an own tap's tensor has no dims for batch and seq.
    """
    handed = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in handed.items()}
    with collecting(forced, edits, until, own=None) as taps, contextlib.ExitStack() as stack, torch.no_grad():
        run = _StageRun(model, stage, stage_input, token_ids, handed, without_weights)
        stack.callback(run.unknowns.stop)
        for index, module in enumerate(run.layers):
            if index != run.layer:
                stack.enter_context(replaced_forward(module, run.passing(index)))
        stack.enter_context(hooked(run.head.register_forward_pre_hook(run.before_head, prepend=True)))
        if run.layer is not None:
            module = run.layers[run.layer]
            # Runs before existing hooks, since those that change the input must change this one.
            stack.enter_context(hooked(module.register_forward_pre_hook(run.feed, prepend=True, with_kwargs=True)))
            if with_taps:
                add_taps(stack, module, token_ids.shape, attention, own_taps)
            stack.enter_context(hooked(module.register_forward_hook(run.after)))
        if stage != EMBED or without_weights:
            run.end()
        try:
            result = model(input_ids=token_ids, attention_mask=valid.long(), use_cache=False)
            tap(OUT, result.logits)
        except TapsDone:
            pass
    return taps


class _StageRun:
    """One run of a stage: puts its input in where it begins, and reads its output where the next stage begins."""

    def __init__(
        self,
        model: PreTrainedModel,
        stage: str,
        stage_input: torch.Tensor | None,
        token_ids: torch.Tensor,
        handed: Mapping[str, torch.Tensor],
        has_no_weights: bool,
    ) -> None:
        self.stage, self.stage_input, self.handed = stage, stage_input, handed
        self.parts = parts_of(model)
        self.layers = cast("nn.ModuleList", model.get_submodule(self.parts.layers))
        self.head = model.get_submodule(self.parts.lm_head)
        self.layer = layer_of(stage)
        self.shape, self.device = token_ids.shape, token_ids.device
        self.unknowns = Unknowns(self.device)
        self.has_all_weights = hasattr(model, "hf_device_map")  # of a full model, which accelerate has loaded
        self.has_no_weights = has_no_weights
        self.found: dict[str, dict[str, tuple[torch.Tensor, Dims]]] = {}

    @property
    def ends_at(self) -> int | None:
        """The layer that gets the output of this stage; None for the last layer and what follows it."""
        following = 0 if self.stage == EMBED else len(self.layers) if self.layer is None else self.layer + 1
        return following if following < len(self.layers) else None

    def begin(self) -> None:
        """What follows is the stage's own and runs with its weights, if there are any."""
        if not self.has_no_weights:
            self.unknowns.stop()

    def end(self) -> None:
        """What follows is not the stage's own, and may depend on weights that are not loaded."""
        if not self.has_all_weights:
            self.unknowns.start()

    def passing(self, index: int) -> Callable:
        """The forward of a layer that is not the stage's and only passes on its hidden states."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            self.unknowns.stop()
            call = Call.of(self.layers[index], args, kwargs)
            hidden = call.hidden
            if index == self.ends_at:
                tap(OUT, self._as_tap(hidden, self.parts.hidden))
                hidden = torch.empty_like(hidden, device="meta")
            if self.ends_at is not None and index >= self.ends_at:
                self._keep(index, call)
            is_before_norm = self.stage == NORM and index == len(self.layers) - 1
            if is_before_norm:
                self._learn(index, call)
                hidden = self._input()
            passed = as_returned(self.parts.returns[index], hidden)
            self.end()
            return passed

        return forward

    def feed(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        self.begin()
        call = Call.of(module, args, kwargs)
        index = cast("int", self.layer)
        self._learn(index, call)
        call.put_in({call.main: self._input(), **self._values(index, call)})
        return call.bound.args[1:], call.bound.kwargs

    def after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if self.ends_at is None:
            tap(OUT, self._as_tap(first_of(output), self.parts.hidden))
            raise TapsDone
        self.end()

    def before_head(self, module: nn.Module, args: tuple) -> tuple | None:
        if self.stage == LM_HEAD:
            self.begin()
            return (cast("torch.Tensor", self.stage_input).to(args[0].dtype), *args[1:])
        tap(OUT, args[0])
        raise TapsDone

    def _as_tap(self, tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
        return to_tap(tensor, dims, self.shape)

    def _input(self) -> torch.Tensor:
        """The stage's input in the layout of the model's hidden states."""
        return from_tap(cast("torch.Tensor", self.stage_input), self.parts.hidden)

    def _values(self, index: int, call: Call) -> dict[str, torch.Tensor]:
        """What earlier stages hand over to a layer, by the names of its arguments."""
        dims = self.parts.inputs.get(layer_stage(index), {})
        found = {name: from_tap(self.handed[name], dims[name]) for name in dims if name in self.handed}
        empty = {name: tensor for name, tensor in call.tensors().items() if tensor.is_meta and not tensor.numel()}
        dtype = cast("torch.Tensor", self.stage_input).dtype
        return {name: torch.empty(one.shape, dtype=dtype, device=self.device) for name, one in empty.items()} | found

    def _learn(self, index: int, call: Call) -> None:
        """Lets what the model computes after a call use what this stage is given."""
        tensors = call.tensors()
        for name, value in self._values(index, call).items():
            if name in tensors:
                self.unknowns.learn(tensors[name], value)

    def _keep(self, index: int, call: Call) -> None:
        """Keeps what a later layer gets of this stage, and ends the run after the last one."""
        stage = layer_stage(index)
        tensors = call.tensors()
        for name, dims in self.parts.inputs.get(stage, {}).items():
            if name in tensors and tensors[name].numel() and not tensors[name].is_meta:
                self.found.setdefault(name, {})[stage] = tensors[name], dims
        if any(_number(later) > index for later in self.parts.inputs):
            return
        first = cast("int", self.ends_at)
        for name, of_stages in self.found.items():
            get_it = [later for later, of in self.parts.inputs.items() if name in of and _number(later) >= first]
            is_one = len({id(tensor) for tensor, _ in of_stages.values()}) == 1 and len(of_stages) == len(get_it)
            for stage, (tensor, dims) in [*of_stages.items()][: 1 if is_one else None]:
                tap(f"{OUT}/{name}" if is_one else f"{OUT}/{name}.{stage}", self._as_tap(tensor, dims))
        raise TapsDone


def _number(stage: str) -> int:
    return cast("int", layer_of(stage))


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
    """The module of a transformers causal language model that a stage runs; an identity for `norm` without a norm."""
    parts = parts_of(model)
    return nn.Identity() if stage == NORM and parts.norm is None else model.get_submodule(parts.path_of(stage))

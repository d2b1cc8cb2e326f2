"""The contract of a port: one stage of the implementation under test, as its user would ship it.

A port is one Python file or dotted module with

    build(stage: Stage) -> torch.nn.Module
        The stage as a module; the meta device is fine. Its forward takes `(x, positions, valid)`: `x` is the previous
        stage's output [batch, seq, hidden] in `stage.dtype` (token ids int64 [batch, seq] for `embed`), `positions`
        int64 [seq] and `valid` bool [batch, seq] (False for padding). It returns the stage's output. Where stages hand
        more to later ones, both are dicts of named tensors, `hidden_states` among them.
    convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] or an iterator of its items
        The stage's tensors as the module's state dict. `weights` maps names on disk to tensors and reads each tensor
        when it is accessed. If convert yields items one by one, each is on the device before convert makes the next
        one.
    TAPS: dict[str, str]    (optional)
        Maps canonical taps to the dotted names of the submodules whose outputs they are. To hand over a tensor that is
        not a module's output, call `layerproof.taps.tap` inside forward.

    PLACEMENTS: dict[str, dict[str, Placement]]    (optional, on several ranks)
        How the ranks of an axis (`tp`, `cp`, `ep`) hold a tap, in the terms of torch.distributed.tensor: `Shard(dim)`,
        `Replicate()`, `Partial()`, or `ZigZag(dim)` of this module. `"*"` stands for all taps that it does not name.

With `port.backend: transformers` it defines one function instead:

    patch(model: transformers.PreTrainedModel, part: torch.nn.Module, stage: Stage) -> None
        Changes transformers' model, of which `part` is this stage's module with its weights.

Weights are inputs of the traced graph, so all stages of one kind share one compilation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import nn

Taps = dict[str, "torch.Tensor"]


@dataclass(frozen=True)
class ZigZag:
    """A placement: of 2n chunks along `dim`, rank r of n has chunk r and then chunk 2n-1-r."""

    dim: int


class Call(Protocol):
    """Runs a prepared stage: without taps, with them, or teacher-forced, with `forced` taps in place of its own."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None
    ) -> Taps: ...


@dataclass(frozen=True)
class Stage:
    """The stage that a port builds.

    `config` is the checkpoint's config.json, `options` the user's `port.options`, `shape` the batch size and sequence
    length of the inputs, and `checkpoint` the folder of the checkpoint.
    """

    name: str
    layer: int | None
    config: Mapping[str, Any]
    dtype: torch.dtype
    options: Mapping[str, Any]
    shape: tuple[int, int]
    checkpoint: Path


class Patch(Protocol):
    """Changes a model of transformers that has the weights of one stage; `part` is the module of that stage in it."""

    def __call__(self, model: nn.Module, part: nn.Module, stage: Stage) -> object: ...


class Port(Protocol):
    """A port: a user's module, or an object that stands in for one."""

    def build(self, stage: Stage) -> nn.Module: ...

    def convert(
        self, stage: Stage, weights: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]: ...

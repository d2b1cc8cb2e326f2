"""What a port is: one stage of the implementation under test, as its user would ship it.

A port is one Python file or dotted module with

    build(stage: Stage) -> torch.nn.Module
        The stage as a module; on the meta device is fine. Its forward takes `(x, positions, valid)`: `x` is the previous
        stage's output [batch, seq, hidden] in `stage.dtype` (token ids int64 [batch, seq] for `embed`), `positions` int64
        [seq] and `valid` bool [batch, seq] (False for padding), and returns the stage's output.
    convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] or an iterator of its items
        The stage's tensors as the module's state dict. `weights` are those on disk, by their names there, each read when it
        is asked for. Of items that are yielded one by one, each is on the device before the next one is made.
    TAPS: dict[str, str]    (optional)
        Canonical tap by dotted name of the submodule whose output it is. What is no module's output is handed over inside
        forward with `layerproof.taps.tap`.

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


class Call(Protocol):
    """Runs a prepared stage: without taps, with them, or with them and `forced` ones going on in their place."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None
    ) -> Taps: ...


@dataclass(frozen=True)
class Stage:
    """What a port is asked to build: `config` is the checkpoint's config.json, `options` the user's `port.options`, `shape`
    batch and sequence of what it will be given, and `checkpoint` the folder with all of it.
    """

    name: str
    layer: int | None
    config: Mapping[str, Any]
    dtype: torch.dtype
    options: Mapping[str, Any]
    shape: tuple[int, int]
    checkpoint: Path


class Port(Protocol):
    """A port: a user's module, or what stands for one."""

    def build(self, stage: Stage) -> nn.Module: ...

    def convert(
        self, stage: Stage, weights: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]: ...

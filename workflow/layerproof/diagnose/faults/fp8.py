"""Block scales of an FP8 checkpoint that a port leaves out, or reads in the wrong order."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerproof.diagnose.faults.experts import MLP, experts_of
from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable
from layerproof.diagnose.faults.linear import MATRICES, part_of

FAULTS = fault = Faults()


def _scales(stage: GoldenStage, tap: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Reloads the weights that make a tap with changed scales [row blocks, column blocks] on disk."""
    try:
        module, names = (experts_of(stage), ("gate_up_proj", "down_proj")) if tap == MLP else (None, ())
    except NotApplicable:
        module = None
    if module is None:
        module, names = part_of(stage, tap), ("weight",)
    for name in names:
        stage.reload(module, name, "_scale_inv", change)


@fault("fp8_scales_ignored", "the FP8 values of this weight without their scales", *MATRICES)
def fp8_scales_ignored(stage: GoldenStage, tap: str) -> None:
    _scales(stage, tap, torch.ones_like)


@fault("fp8_scales_transposed", "the FP8 scales of this weight transposed", *MATRICES)
def fp8_scales_transposed(stage: GoldenStage, tap: str) -> None:
    # If a matrix is not square, its scales can only have been read in the other order.
    _scales(stage, tap, lambda scales: scales.T.reshape(scales.shape))

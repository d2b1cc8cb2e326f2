"""The residual stream: what is added to it, where, and how often."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerproof.diagnose.faults.golden_stage import PATHS, Faults, GoldenStage, NotApplicable
from layerproof.golden.layer_taps import usual_name

BEFORE_MLP = ("post_attn_norm", "pre_mlp_norm")
FAULTS = fault = Faults()

Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _stream(stage: GoldenStage, tap: str, change: Change) -> None:
    """Replaces the input of the norm before the MLP by `change(the stream, the stage's input)`.

    This stream includes the attention's output.
    """
    names = {usual_name(name) for name, _ in stage.module.named_children()}
    if tap == "post_attn_norm" and PATHS["pre_mlp_norm"] in names:
        raise NotApplicable("the norm after the attention is not on the stream")
    x = _input(stage)
    stage.input(stage.part(PATHS[tap]), lambda stream: change(stream, x.to(stream.dtype)))


def _input(stage: GoldenStage) -> torch.Tensor:
    if stage.x is None or not stage.is_layer:
        raise NotApplicable(f"{stage.name} has no residual stream")
    return stage.x


@fault("attention_residual_missing", "no residual around the attention", *BEFORE_MLP)
def attention_residual_missing(stage: GoldenStage, tap: str) -> None:
    _stream(stage, tap, lambda stream, x: stream - x)


@fault("attention_residual_twice", "the residual around the attention added twice", *BEFORE_MLP)
def attention_residual_twice(stage: GoldenStage, tap: str) -> None:
    _stream(stage, tap, lambda stream, x: stream + x)


@fault("attention_output_missing", "the attention's output not added to the stream", *BEFORE_MLP)
def attention_output_missing(stage: GoldenStage, tap: str) -> None:
    _stream(stage, tap, lambda stream, x: x)


@fault("residual_after_norm", "the residual around the attention taken after the norm", *BEFORE_MLP)
def residual_after_norm(stage: GoldenStage, tap: str) -> None:
    norm = stage.part("input_layernorm")
    _stream(stage, tap, lambda stream, x: stream - x + norm.forward(x))  # forward skips the hooks: this is not a tap


def _out(stage: GoldenStage, change: Callable) -> None:
    x = _input(stage)
    stage.edit("out", lambda out, seen: change(out, seen, x.to(out.dtype)).to(out.dtype))


@fault("attention_residual_missing", "no residual around the attention", "out")
def attention_residual_missing_in_out(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: out - x)


@fault("attention_residual_twice", "the residual around the attention added twice", "out")
def attention_residual_twice_in_out(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: out + x)


@fault("mlp_residual_missing", "no residual around the MLP", "out")
def mlp_residual_missing(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: seen["mlp.out"])


@fault("mlp_residual_twice", "the residual around the MLP added twice", "out")
def mlp_residual_twice(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: 2 * out - seen["mlp.out"])


@fault("mlp_output_missing", "the MLP's output not added to the stream", "out")
def mlp_output_missing(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: out - seen["mlp.out"])


@fault("attention_output_missing", "the attention's output not added to the stream", "out")
def attention_output_missing_in_out(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: out - seen["attn.out"])


@fault("residual_after_norm", "the residual around the attention taken after the norm", "out")
def residual_after_norm_in_out(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: out - x + seen["input_norm"])


@fault("mlp_residual_after_norm", "the residual around the MLP taken after the norm", "out")
def mlp_residual_after_norm(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: seen.get("pre_mlp_norm", seen["post_attn_norm"]) + seen["mlp.out"])


@fault("mlp_residual_of_input", "the stage's input as residual around the MLP", "out")
def mlp_residual_of_input(stage: GoldenStage) -> None:
    _out(stage, lambda out, seen, x: x + seen["mlp.out"])

"""Embedding and head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable, rank_zero_only

FAULTS = fault = Faults()


def _at_end(stage: GoldenStage, name: str) -> None:
    if stage.name != name:
        raise NotApplicable(f"{stage.name} is not {name}")


def _rows(name: str, text: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    @fault(name, text, "out")
    def rows(stage: GoldenStage) -> None:
        _at_end(stage, "embed")
        stage.weight(stage.module, "weight", make)


_rows("embedding_rows_shifted", "the embedding of the next token id", lambda weight: weight.roll(-1, 0))
_rows("embedding_rows_shifted", "the embedding of the token id before", lambda weight: weight.roll(1, 0))


def _with_ranks(ranks: int) -> None:
    text = f"only rank 0's rows of the embedding on {ranks} ranks"
    _rows("sharded_sum_missing", text, lambda weight: rank_zero_only(weight, ranks, 0))

    @fault("sharded_sum_twice", f"a sum over {ranks} ranks computed twice", "out")
    def sharded_sum_twice(stage: GoldenStage) -> None:
        _at_end(stage, "embed")
        stage.edit("out", lambda out, seen: out * ranks)


for ranks in (2, 4, 8):
    _with_ranks(ranks)


@fault("embedding_scale_added", "the embedding times the root of the hidden size", "out")
def embedding_scale_added(stage: GoldenStage) -> None:
    _at_end(stage, "embed")
    stage.edit("out", lambda out, seen: out * stage.config.hidden_size**0.5)


@fault("embedding_scale_dropped", "the embedding without its scale", "out")
def embedding_scale_dropped(stage: GoldenStage) -> None:
    _at_end(stage, "embed")
    stage.weight(stage.module, "embed_scale", torch.ones_like)


@fault("padding_embedded_as_zero", "zero for the embedding of the padding token", "out")
def padding_embedded_as_zero(stage: GoldenStage) -> None:
    _at_end(stage, "embed")
    if stage.config.pad_token_id is None:
        raise NotApplicable("the model has no padding token")
    padding = stage.ids == stage.config.pad_token_id
    stage.edit("out", lambda out, seen: out.masked_fill(padding[..., None], 0.0))


@fault("head_tied", "the embedding's weight in the head instead of the head's own", "out", slow=True)
def head_tied(stage: GoldenStage) -> None:
    _at_end(stage, "lm_head")
    stage.load(stage.model, "embed")
    table: Any = stage.model.get_input_embeddings().weight
    stage.weight(stage.module, "weight", lambda weight: table.detach().to(weight.dtype))


@fault("logits_softcap_dropped", "no soft cap on the logits", "out")
def logits_softcap_dropped(stage: GoldenStage) -> None:
    _at_end(stage, "lm_head")
    stage.set(stage.config, "final_logit_softcapping", None)


@fault("logits_scale_dropped", "the logits without their scale", "out")
def logits_scale_dropped(stage: GoldenStage) -> None:
    _at_end(stage, "lm_head")
    scale = getattr(stage.config, "logit_scale", None) or 1 / getattr(stage.config, "logits_scaling", 1)
    if scale == 1:
        raise NotApplicable("the logits have no scale")
    stage.edit("out", lambda out, seen: out / scale)


@fault("final_norm_twice", "the norm after the last layer applied twice", "out", slow=True)
def final_norm_twice(stage: GoldenStage) -> None:
    from layerproof.golden.transformers_stage import stage_module

    _at_end(stage, "lm_head")
    stage.load(stage.model, "norm")
    norm = stage_module(stage.model, "norm").forward  # run_stage replaces the module's own forward
    stage.input(stage.module, lambda x: norm(x))

"""Names of stages: `embed`, `layer_000` ..., `norm`, `lm_head`, and the selections of them that a user writes."""

import re
from collections.abc import Sequence

from layerproof.errors import UserError

EMBED, NORM, LM_HEAD = "embed", "norm", "lm_head"


def layer_stage(layer: int) -> str:
    """Stage name of decoder layer `layer` (from 0): `layer_007`."""
    return f"layer_{layer:03d}"


def layer_of(stage: str) -> int | None:
    """Index of the decoder layer that `stage` runs, or None for `embed`, `norm` and `lm_head`."""
    return int(stage.removeprefix("layer_")) if stage.startswith("layer_") else None


def all_stages(num_layers: int) -> list[str]:
    """Every stage of a model with `num_layers` decoder layers, in the order data flows."""
    return [EMBED, *map(layer_stage, range(num_layers)), NORM, LM_HEAD]


def parse_ranges(text: str, num_layers: int, key: str) -> list[int]:
    """Layers named by `all`, `3` or `0-5,30`, sorted and without repeats.

    Raises:
        UserError: names `key` when the text cannot be read or reaches beyond the model.
    """
    if text == "all":
        return list(range(num_layers))
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*-\s*(\d+))?\s*", part)
        if not match:
            raise UserError(f'config.yaml: {key}: "{text}" is not a list of layers. Write "all", "3" or "0-5,30".')
        first = int(match[1])
        last = int(match[2] or first)
        if last < first:
            raise UserError(f'config.yaml: {key}: "{part}" counts backwards. Write "{last}-{first}".')
        if last >= num_layers:
            raise UserError(
                f'config.yaml: {key}: "{text}" reaches beyond the model, which has {num_layers} layers '
                f'(0 to {num_layers - 1}). Write "0-{num_layers - 1}" or "all".'
            )
        layers.update(range(first, last + 1))
    return sorted(layers)


def selected_stages(layers: Sequence[int], num_layers: int) -> list[str]:
    """Stages to port and compare: the layers, `embed` with the first layer, `norm` and `lm_head` with the last.

    The golden streams from `embed` to the last of them, so leaving the end out saves its time.
    """
    chosen = set(layers)
    return [
        *([EMBED] if 0 in chosen else []),
        *map(layer_stage, sorted(chosen)),
        *([NORM, LM_HEAD] if num_layers - 1 in chosen else []),
    ]


def chain_stages(chain: str, num_layers: int) -> list[str]:
    """Stages of one entry of `chains`: `all` runs from `embed` to `lm_head`, `2-4` these layers, `3` that one.

    Raises:
        UserError: if the text is not one unbroken range inside the model.
    """
    if chain == "all":
        return all_stages(num_layers)
    layers = parse_ranges(chain, num_layers, "chains")
    if not re.fullmatch(r"\d+(-\d+)?", chain):
        raise UserError(f'config.yaml: chains: "{chain}" is not one range of layers. Write "all" or "0-5".')
    return list(map(layer_stage, layers))


def previous_stage(stage: str, num_layers: int) -> str | None:
    """The stage whose output feeds `stage`, or None for `embed`."""
    order = all_stages(num_layers)
    position = order.index(stage)
    return order[position - 1] if position else None


def related_stages(stage: str, num_layers: int) -> list[str]:
    """Stages whose weights a port may have loaded in place of those of `stage`: the layers beside it, for `lm_head` the
    embedding and the last norm.
    """
    layer = layer_of(stage)
    if layer is not None:
        return [layer_stage(other) for other in (layer - 1, layer + 1) if 0 <= other < num_layers]
    return [EMBED, NORM] if stage == LM_HEAD else []


def first_run(stages: Sequence[str], num_layers: int) -> list[str]:
    """The stages from the first on that follow one another in the model without a gap."""
    order = all_stages(num_layers)
    start = order.index(stages[0])
    return [stage for stage, following in zip(stages, order[start:], strict=False) if stage == following]


def ranges(stages: Sequence[str]) -> str:
    """Names of stages with runs of layers put together: `embed, layer_000 to layer_005, norm`."""
    runs: list[list[str]] = []
    for stage in stages:
        before = layer_of(runs[-1][-1]) if runs else None
        if before is not None and layer_of(stage) == before + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)

"""Names of stages: `embed`, `layer_000` ..., `norm`, `lm_head`, and how users select them."""

import re
from collections.abc import Hashable, Mapping, Sequence

from layerproof.errors import UserError

EMBED, NORM, LM_HEAD = "embed", "norm", "lm_head"


def layer_stage(layer: int) -> str:
    """Returns the stage name of decoder layer `layer` (from 0): `layer_007`."""
    return f"layer_{layer:03d}"


def layer_of(stage: str) -> int | None:
    """Returns the index of the decoder layer that `stage` runs, or None for `embed`, `norm` and `lm_head`."""
    return int(stage.removeprefix("layer_")) if stage.startswith("layer_") else None


def all_stages(num_layers: int) -> list[str]:
    """Returns every stage of a model with `num_layers` decoder layers, in the order of data flow."""
    return [EMBED, *map(layer_stage, range(num_layers)), NORM, LM_HEAD]


def parse_ranges(text: str, num_layers: int, key: str) -> list[int]:
    """Returns the layers that `all`, `3` or `0-5,30` selects, sorted and without repeats.

    Raises:
        UserError: naming `key`, if the text cannot be parsed or reaches beyond the model.
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
    """Returns the stages to port and compare.

    These are the layers, plus `embed` if the first layer is among them, and `norm` and `lm_head` if the last one is.
    The golden runs from `embed` to the last selected stage, so leaving out the end saves time.
    """
    chosen = set(layers)
    return [
        *([EMBED] if 0 in chosen else []),
        *map(layer_stage, sorted(chosen)),
        *([NORM, LM_HEAD] if num_layers - 1 in chosen else []),
    ]


def chain_stages(chain: str, num_layers: int) -> list[str]:
    """Returns the stages of one entry of `chains`.

    `all` runs from `embed` to `lm_head`; `2-4` selects these layers, `3` that layer.

    Raises:
        UserError: if the text is not one contiguous range inside the model.
    """
    if chain == "all":
        return all_stages(num_layers)
    layers = parse_ranges(chain, num_layers, "chains")
    if not re.fullmatch(r"\d+(-\d+)?", chain):
        raise UserError(f'config.yaml: chains: "{chain}" is not one range of layers. Write "all" or "0-5".')
    return list(map(layer_stage, layers))


def previous_stage(stage: str, num_layers: int) -> str | None:
    """Returns the stage whose output feeds `stage`, or None for `embed`."""
    order = all_stages(num_layers)
    position = order.index(stage)
    return order[position - 1] if position else None


def related_stages(stage: str, num_layers: int) -> list[str]:
    """Returns the stages whose weights a port may have loaded by mistake instead of those of `stage`.

    These are the neighbouring layers; for `lm_head`, the embedding and the last norm.
    """
    layer = layer_of(stage)
    if layer is not None:
        return [layer_stage(other) for other in (layer - 1, layer + 1) if 0 <= other < num_layers]
    return [EMBED, NORM] if stage == LM_HEAD else []


def sibling(stage: str, stages: Sequence[str], kinds: Mapping[str, Hashable]) -> str | None:
    """Returns the nearest of `stages` before this one that is of its kind, or else the nearest after it, if any."""
    own = stages.index(stage)
    candidates = [*reversed(stages[:own]), *stages[own + 1 :]]
    return next((other for other in candidates if kinds[other] == kinds[stage]), None)


def first_run(stages: Sequence[str], num_layers: int) -> list[str]:
    """Returns the leading stages that follow one another in the model without a gap."""
    order = all_stages(num_layers)
    start = order.index(stages[0])
    return [stage for stage, following in zip(stages, order[start:], strict=False) if stage == following]


def ranges(stages: Sequence[str]) -> str:
    """Lists stages, with consecutive layers joined: `embed, layer_000 to layer_005, norm`."""
    runs: list[list[str]] = []
    for stage in stages:
        before = layer_of(runs[-1][-1]) if runs else None
        if before is not None and layer_of(stage) == before + 1:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    return ", ".join(run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)

"""Buffers that a model computes when it is built, such as rotary frequencies: no checkpoint contains them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from layerproof.errors import UserError


def make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint contains, with the model's `_init_weights` as in `from_pretrained`.

    A module may leave its buffer to one around it, which needs all layers (Falcon H1's `mup_vector`).

    Raises:
        UserError: if transformers leaves a buffer as it is.
    """
    buffers = [name for name, _ in model.named_non_persistent_buffers()]
    left = _compute(model, buffers, device, lambda owner: [owner])
    if not left:
        return
    with torch.device("meta"):
        whole = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    not_computed = _compute(whole, left, device, _and_around)
    if not_computed:
        raise UserError(
            f"{type(model).__name__}: transformers does not compute the buffer {not_computed[0]} again. Compute it in "
            "_init_weights, too, as the models of transformers do."
        )
    for name in left:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_buffer(leaf, whole.get_buffer(name), persistent=False)


def _compute(
    model: PreTrainedModel, buffers: Sequence[str], device: torch.device, by: Callable[[str], list[str]]
) -> list[str]:
    """Computes buffers by initialising the modules that `by` finds for their owners; returns those still not computed."""
    bools = [name for name in buffers if model.get_buffer(name).dtype == torch.bool]
    _initialise(model, bools, device, by, missing=True)
    filled = {name: model.get_buffer(name) for name in bools}
    _initialise(model, buffers, device, by)
    of_both = {name: torch.equal(filled[name], model.get_buffer(name)) for name in bools}
    return [name for name in buffers if not of_both.get(name, True) or _is_missing(model.get_buffer(name))]


def _initialise(
    model: PreTrainedModel,
    buffers: Sequence[str],
    device: torch.device,
    by: Callable[[str], list[str]],
    missing: bool | None = None,
) -> None:
    """Fills buffers with `missing`, or a value that no model computes, and initialises the modules of `by`."""
    modules: dict[str, None] = {}
    for name in buffers:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        buffer = torch.empty_like(owner.get_buffer(leaf), device=device)
        value = _missing(buffer.dtype) if missing is None else missing
        owner.register_buffer(leaf, buffer.fill_(value), persistent=False)
        modules |= dict.fromkeys(by(path))
    for path in modules:
        module = model.get_submodule(path)
        for parameter in module.parameters():
            cast("Any", parameter)._is_hf_initialized = True  # loaded or meant to stay on meta: not to draw at random
        _innermost_model(model, path)._init_weights(module)


def _and_around(path: str) -> list[str]:
    """A module and those that contain it, the innermost first."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names), -1, -1)]


def _missing(dtype: torch.dtype) -> float | int | bool:
    """A value that no model computes; a bool has none."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_missing(buffer: torch.Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return False
    return bool(
        (
            buffer.isnan() if buffer.is_floating_point() or buffer.is_complex() else buffer == _missing(buffer.dtype)
        ).all()
    )


def _innermost_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The part of a model that transformers initialises a submodule with."""
    inside = map(model.get_submodule, _and_around(path))
    return next(module for module in inside if isinstance(module, PreTrainedModel))

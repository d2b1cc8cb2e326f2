"""Mistakes drawn at random, for one stage of any model of transformers: what `make families` puts into each.

A mistake is a patch of the stage's module (docs/ports.md): one of its weights is another one, or the forward of one of its
modules computes something else. No list of the product knows these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

FACTORS = (0.25, 0.5, 0.8, 1.25, 2.0, 8.0)
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")


@dataclass(frozen=True)
class Mistake:
    """A kind of mistake, at a module or parameter of the stage's module (`at`), and what makes it in such a module."""

    kind: str
    at: str
    text: str
    put: Callable[[nn.Module], None]


class NoMistakeFits(Exception):
    """The module has no parameters and no modules of its own."""


Place = Callable[[np.random.Generator], Mistake]


def draw(part: nn.Module, random: np.random.Generator) -> Mistake:
    """A mistake that this stage's module can have: first the kind is drawn, then the place, then the value.

    Raises:
        NoMistakeFits: if no kind of mistake fits the module.
    """
    places: dict[str, list[Place]] = {}
    for kind, place in (*_of_weights(part), *_of_modules(part)):
        places.setdefault(kind, []).append(place)
    if not places:
        raise NoMistakeFits
    of_kind = places[list(places)[random.integers(len(places))]]
    return of_kind[random.integers(len(of_kind))](random)


def _of_weights(part: nn.Module) -> Iterator[tuple[str, Place]]:
    weights = {name: one for name, one in part.named_parameters() if one.numel() > 1 and one.is_floating_point()}
    for name, weight in weights.items():
        rows = len(weight)
        yield "weight scaled", partial(_scaled, name)
        if rows > 1:
            yield "weight shifted", partial(_shifted, name, rows)
        if weight.ndim == 2 and weight.shape[0] == weight.shape[1]:
            yield "weight transposed", partial(_transposed, name)
        if weight.ndim == 3 and rows > 1:
            yield "parts exchanged", partial(_parts, name, rows)
        alike = [other for other, one in weights.items() if other != name and one.shape == weight.shape]
        if alike:
            yield "weights exchanged", partial(_exchanged, name, alike)


def _scaled(name: str, random: np.random.Generator) -> Mistake:
    factor = float(random.choice(FACTORS))

    def put(part: nn.Module) -> None:
        part.get_parameter(name).data.mul_(factor)

    return Mistake("weight scaled", name, f"{name} is multiplied by {factor:g}", put)


def _shifted(name: str, rows: int, random: np.random.Generator) -> Mistake:
    by = int(random.integers(1, rows))

    def put(part: nn.Module) -> None:
        weight = part.get_parameter(name)
        weight.data = weight.data.roll(by, 0)

    return Mistake("weight shifted", name, f"the rows of {name} are shifted by {by}", put)


def _transposed(name: str, random: np.random.Generator) -> Mistake:
    def put(part: nn.Module) -> None:
        weight = part.get_parameter(name)
        weight.data = weight.data.T.contiguous()

    return Mistake("weight transposed", name, f"{name} is transposed", put)


def _parts(name: str, parts: int, random: np.random.Generator) -> Mistake:
    pair = random.choice(parts, 2, replace=False).tolist()

    def put(part: nn.Module) -> None:
        weight = part.get_parameter(name)
        changed = weight.data.clone()
        changed[pair] = weight.data[pair[::-1]]
        weight.data = changed

    of = "channels" if "conv" in name else "experts"
    return Mistake("parts exchanged", name, f"{of} {pair[0]} and {pair[1]} of {name} are exchanged", put)


def _exchanged(name: str, alike: Sequence[str], random: np.random.Generator) -> Mistake:
    other = str(random.choice(alike))

    def put(part: nn.Module) -> None:
        mine, its = part.get_parameter(name), part.get_parameter(other)
        mine.data, its.data = its.data, mine.data

    return Mistake("weights exchanged", name, f"{name} and {other} are exchanged", put)


def _of_modules(part: nn.Module) -> Iterator[tuple[str, Place]]:
    for path, module in part.named_modules():
        if name := next((name for name in EPSILONS if isinstance(getattr(module, name, None), float)), None):
            yield "epsilon", partial(_epsilon, path, name)
        if isinstance(getattr(module, "bias", None), nn.Parameter):
            yield "bias dropped", partial(_bias, path)
        if _rotates(module):
            yield "position", partial(_position, path)
        if path and _has_weights(module) and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield "output scaled", partial(_times, path)
    for path, module in part.named_children():
        if _has_weights(module) and any(True for _ in module.children()):
            yield "branch dropped", partial(_dropped, path)


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _rotates(module: nn.Module) -> bool:
    names = inspect.signature(module.forward).parameters
    return "position_embeddings" in names and not any(_rotates(child) for child in module.children())


def _epsilon(path: str, name: str, random: np.random.Generator) -> Mistake:
    value = float(10 ** random.uniform(-3, 0))

    def put(part: nn.Module) -> None:
        setattr(part.get_submodule(path), name, value)

    return Mistake("epsilon", path, f"{path or 'the norm'} has an epsilon of {value:.2g}", put)


def _bias(path: str, random: np.random.Generator) -> Mistake:
    def put(part: nn.Module) -> None:
        part.get_parameter(f"{path}.bias" if path else "bias").data.zero_()

    return Mistake("bias dropped", path, f"the bias of {path or 'the module'} is left out", put)


def _position(path: str, random: np.random.Generator) -> Mistake:
    positions = int(random.integers(1, 5))

    def later(tensor: Any) -> Any:
        return tensor.roll(positions, -2) if isinstance(tensor, torch.Tensor) and tensor.ndim > 1 else tensor

    def put(part: nn.Module) -> None:
        module = part.get_submodule(path)
        forward, signature = module.forward, inspect.signature(module.forward)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            given = bound.arguments.get("position_embeddings")
            angles = type(given)(map(later, given)) if isinstance(given, tuple | list) else later(given)
            bound.arguments["position_embeddings"] = angles
            return forward(*bound.args, **bound.kwargs)

        module.forward = wrapped

    return Mistake("position", path, f"{path or 'the layer'} gets the angles of {positions} positions before", put)


def _times(path: str, random: np.random.Generator) -> Mistake:
    factor = float(random.choice(FACTORS))
    return Mistake("output scaled", path, f"the output of {path} is multiplied by {factor:g}", _scaling(path, factor))


def _dropped(path: str, random: np.random.Generator) -> Mistake:
    return Mistake("branch dropped", path, f"the output of {path} is left out", _scaling(path, 0.0))


def _scaling(path: str, factor: float) -> Callable[[nn.Module], None]:
    """Multiplies the first tensor that a module returns."""

    def put(part: nn.Module) -> None:
        module = part.get_submodule(path)
        forward = module.forward

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            if isinstance(output, tuple):
                return (output[0] * factor, *output[1:])
            return output * factor

        module.forward = wrapped

    return put

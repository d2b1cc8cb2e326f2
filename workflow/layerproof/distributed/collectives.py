"""What has to be the same on all ranks of a collective, and the group that it belongs to."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from .groups import named

ALIKE: dict[str, tuple[str, ...]] = {
    "all_reduce": ("tensor", "op"),
    "all_reduce_coalesced": ("tensors", "op"),
    "broadcast": ("tensor", "src"),
    "reduce": ("tensor", "dst", "op"),
    "all_gather": ("tensor_list",),
    "all_gather_into_tensor": ("output_tensor",),
    "gather": ("tensor", "dst"),
    "scatter": ("tensor", "src"),
    "reduce_scatter": ("input_list", "op"),
    "reduce_scatter_tensor": ("input", "op"),
    "all_to_all": (),
    "all_to_all_single": (),
    "barrier": (),
    "monitored_barrier": (),
}
"""The collectives of torch.distributed, and their arguments that must not differ between ranks."""
ROOTS = ("src", "dst")
BETWEEN_TWO = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}
"""Those of a sender and a receiver, and the argument that names the other one."""


@dataclass(frozen=True)
class Call:
    """A call of a collective: its group, the ranks that have to come, and what has to be the same on all of them."""

    group: str
    members: tuple[int, ...]
    detail: str


def call_of(function: Callable, *args: Any, **kwargs: Any) -> Call | None:
    """What is called, or None if this rank is no member of the group or the arguments are wrong, which torch then says."""
    names, defaults = _parameters(function)
    values, name = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}, function.__name__
    if not set(names) <= set(values):
        return None
    group, members = named(values["group"])
    if dist.get_rank() not in members:
        return None
    for role in ROOTS:  # which can be given by its number in the group, too
        if values.get(role) is None and values.get(f"group_{role}") is not None:
            values[role] = members[values[f"group_{role}"]]
    if name in BETWEEN_TWO:
        return _between_two(name, values, group, members)
    alike = {key: _said(values[key]) for key in ALIKE[name] if values[key] is not None}
    return Call(group, members, ", ".join(f"{key}={said}" if key in ROOTS else said for key, said in alike.items()))


def _between_two(name: str, values: Mapping[str, Any], group: str, members: tuple[int, ...]) -> Call | None:
    role = BETWEEN_TWO[name]
    other = values[role]
    if other is None:  # it takes what comes from any rank
        return None
    pair = (dist.get_rank(), other) if role == "dst" else (other, dist.get_rank())
    return Call(f"{group}: {pair[0]}>{pair[1]}, tag {values.get('tag', 0)}", pair, _said(values["tensor"]))


@functools.cache
def _parameters(function: Callable) -> tuple[tuple[str, ...], dict[str, Any]]:
    """The names of a function's parameters, and the defaults of those that have one."""
    parameters = inspect.signature(function).parameters
    return tuple(parameters), {name: one.default for name, one in parameters.items() if one.default is not one.empty}


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, list | tuple):
        said = list(map(_said, value))
        return f"{len(said)} x {said[0]}" if said and len(set(said)) == 1 else f"[{', '.join(said)}]"
    return str(value).removeprefix("RedOpType.")

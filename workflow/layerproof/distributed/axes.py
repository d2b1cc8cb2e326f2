"""The axes that ranks are spread over, and where a rank is in them; without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from . import MESH
from .errors import DistributedError

AXES = ("pp", "dp", "cfg", "ep", "cp", "ring", "ulysses", "tp")
"""The axes in the order in which ranks are numbered, the last one fastest: what talks most lies on neighbouring ranks.

Pipeline stages, data, classifier-free guidance (one half each for both prompts), experts, context (`cp`, or its two parts as
yunchang splits it: a `ring` of key-value chunks, and heads by `ulysses`), tensors.
"""


def of_variable() -> dict[str, int]:
    """The sizes that the launcher of this rank has set by MESH; empty without it.

    Raises:
        DistributedError: if the variable is no list of axes.
    """
    text = os.environ.get(MESH, "")
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if not all(size.isdecimal() for _, _, size in pairs):
        raise DistributedError(f"{MESH}={text}: write axes with their sizes, such as dp=2,tp=4.")
    return {axis: int(size) for axis, _, size in pairs}


def as_variable(sizes: Mapping[str, int]) -> str:
    """What MESH has to be for these axes."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items())


def coordinates(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Where a rank is in each axis, from 0; the last axis runs fastest."""
    found = {}
    for axis, size in list(sizes.items())[::-1]:
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in sizes}


def place_of(rank: int, sizes: Mapping[str, int]) -> str:
    """The same in words, such as `pp 3 of 4, tp 1 of 2`."""
    return ", ".join(f"{axis} {at} of {sizes[axis]}" for axis, at in coordinates(rank, sizes).items())


def checked(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The sizes of the axes above 1, in the order of AXES.

    Raises:
        DistributedError: if an axis is unknown, a size is below 1, or the product is not the number of ranks.
    """
    if unknown := [axis for axis in sizes if axis not in AXES]:
        raise DistributedError(f"no axis is called {unknown[0]}. Use {', '.join(AXES)}.")
    if below := [axis for axis, size in sizes.items() if size < 1]:
        raise DistributedError(f"{below[0]} = {sizes[below[0]]}: an axis has at least 1 rank.")
    ordered = {axis: sizes[axis] for axis in AXES if axis in sizes}
    product = math.prod(ordered.values())
    if product != world_size:
        said = " x ".join(f"{axis} {size}" for axis, size in ordered.items())
        raise DistributedError(f"{said} = {product} ranks, but there are {world_size}. Change an axis or WORLD_SIZE.")
    return {axis: size for axis, size in ordered.items() if size > 1} or {"dp": 1}

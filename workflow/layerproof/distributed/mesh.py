"""Meshes of ranks over named axes, such as tensor, pipeline and data parallelism.

All groups come from torch's device meshes, so every rank creates them in the same order. Each has a group of gloo beside it
with the same ranks, for control messages that must not go by the device.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .axes import checked, of_variable, place_of
from .errors import DistributedError


@dataclass(frozen=True)
class Mesh:
    """The groups of this rank over each axis."""

    sizes: Mapping[str, int]
    device: DeviceMesh
    control: DeviceMesh

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one in this axis alone."""
        return self.device.get_group(self._known(axis))

    def control_group(self, axis: str) -> dist.ProcessGroup:
        """The same ranks, over gloo."""
        return self.control.get_group(self._known(axis))

    def at(self, axis: str) -> int:
        """Where this rank is in an axis, from 0."""
        return self.device.get_local_rank(self._known(axis))

    def __str__(self) -> str:
        """The coordinates of this rank, such as `pp 3 of 4, tp 1 of 2`, from 0."""
        return place_of(dist.get_rank(), self.sizes)

    def _known(self, axis: str) -> str:
        if axis not in self.sizes:
            raise DistributedError(f"no axis {axis} in this mesh, which has {', '.join(self.sizes)}.")
        return axis


def create(device_type: str, **sizes: int) -> Mesh:
    """Creates the groups of all axes; all ranks of the default group have to call it with the same sizes.

    `device_type` is that of the default group's device, such as `cuda` or `cpu`. Axes of size 1 are left out; a
    world of one rank has the axis `dp`.

    Raises:
        DistributedError: if an axis is unknown, or the sizes do not make up the number of ranks.
    """
    axes = checked(sizes, dist.get_world_size())
    shape, names = tuple(axes.values()), tuple(axes)
    device = init_device_mesh(device_type, shape, mesh_dim_names=names)
    if dist.get_backend() == "gloo":
        return Mesh(axes, device, device)
    gloo: Any = dict.fromkeys(names, "gloo")
    return Mesh(axes, device, init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=gloo))


@functools.cache
def launched(device_type: str) -> Mesh:
    """The mesh of the axes that this rank's launcher has set (MESH); without them all ranks are in one axis, `dp`.

    Created by the first call, which all ranks have to come to, and the same mesh for all calls after it.

    Raises:
        DistributedError: if the variable is no list of axes, or its sizes do not make up the number of ranks.
    """
    sizes = of_variable()
    return create(device_type, **(sizes or {"dp": dist.get_world_size()}))


def sequence_groups(
    ulysses: int, ring: int, world_size: int, ulysses_is_low: bool = True
) -> dict[str, list[list[int]]]:
    """The groups that yunchang makes for sequence parallelism, as lists of ranks: `ulysses`, `ring` and both, `sp`.

    With `ulysses_is_low`, as by default there, neighbouring ranks share a Ulysses group.

    Raises:
        DistributedError: if the ranks cannot be split evenly.
    """
    both = ulysses * ring
    if world_size % both:
        raise DistributedError(
            f"ulysses {ulysses} x ring {ring} = {both} ranks, which {world_size} cannot be split into."
        )
    sp = [list(range(first, first + both)) for first in range(0, world_size, both)]
    near = ulysses if ulysses_is_low else ring
    close = [ranks[first : first + near] for ranks in sp for first in range(0, both, near)]
    apart = [ranks[first::near] for ranks in sp for first in range(near)]
    return (
        {"ulysses": close, "ring": apart, "sp": sp} if ulysses_is_low else {"ulysses": apart, "ring": close, "sp": sp}
    )


def check_groups(wanted: Mapping[str, Sequence[Sequence[int]]], made: Mapping[str, dist.ProcessGroup]) -> None:
    """Checks process groups that another library made for this rank, such as those of yunchang, by their names.

    Raises:
        DistributedError: if a group has other ranks than the list in `wanted` that this rank is in.
    """
    rank = dist.get_rank()
    for name, group in made.items():
        there = sorted(dist.get_process_group_ranks(group))
        here = next((sorted(ranks) for ranks in wanted[name] if rank in ranks), [])
        if there != here:
            raise DistributedError(f"rank {rank}: its group {name} has ranks {there}, but should have {here}.")

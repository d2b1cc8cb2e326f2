"""How the ranks along an axis of the mesh hold a tap: a part of it each, a summand each, or all of it.

A port says so in PLACEMENTS, in the terms of torch's DTensor; what it does not say is known from the tap's name and shape.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerproof.errors import StageError
from layerproof.taps import SHAPES, SPLIT_BY_RANKS, check_known

SHARD, ZIGZAG, PARTIAL, REPLICATE = "shard", "zigzag", "partial", "replicate"
AXES = ("ep", "cp", "tp")
"""The axes that a stage is split over, in the order in which ranks are numbered."""
ALL = "*"
"""In PLACEMENTS, all taps that it does not name."""
SEQ, FEATURES = 1, 2
"""Dims of [batch, seq, heads or features...]."""

Declared = Mapping[str, Mapping[str, Any]]
"""By tap and axis, a placement as JSON: `{"kind": "shard", "dim": 1}`."""


@dataclass(frozen=True)
class Placement:
    """`kind` is SHARD or ZIGZAG (each rank has a part along `dim`), PARTIAL (the ranks sum to the tap) or REPLICATE.

    With ZIGZAG, of 2n chunks rank r of n has chunk r and then chunk 2n-1-r, as ring attention balances a causal mask.
    """

    kind: str
    dim: int = FEATURES

    @property
    def is_split(self) -> bool:
        return self.kind in (SHARD, ZIGZAG)


def declared(port: Any, where: str, own_taps: Collection[str] = ()) -> Declared:
    """What a port's PLACEMENTS say, as JSON; empty without them.

    Raises:
        StageError: if they do not map taps to axes and placements; the message says where.
    """
    given = getattr(port, "PLACEMENTS", {})
    form = f'{where}: PLACEMENTS must map taps to axes and placements: {{"attn.q": {{"tp": Shard(2)}}}}.'
    if not isinstance(given, Mapping) or not all(isinstance(axes, Mapping) for axes in given.values()):
        raise StageError(form)
    check_known([name for name in given if name != ALL], f"{where}: PLACEMENTS", own_taps)
    found: dict[str, dict[str, Any]] = {}
    for name, axes in given.items():
        for axis, placement in axes.items():
            if axis not in AXES:
                raise StageError(f"{where}: PLACEMENTS of {name}: {axis} is no axis of a stage. Use {', '.join(AXES)}.")
            described = _described(placement)
            if described is None:
                raise StageError(
                    f"{where}: PLACEMENTS of {name}: {placement!r} is no placement. Use Shard(dim), Replicate() and "
                    "Partial() of torch.distributed.tensor, or ZigZag(dim) of layerproof.port.contract."
                )
            found.setdefault(name, {})[axis] = described
    return found


def _described(placement: Any) -> dict[str, Any] | None:
    from torch.distributed.tensor import Partial, Replicate, Shard

    from layerproof.port.contract import ZigZag

    if isinstance(placement, Shard | ZigZag):
        return {"kind": SHARD if isinstance(placement, Shard) else ZIGZAG, "dim": placement.dim}
    if isinstance(placement, Replicate):
        return {"kind": REPLICATE}
    return {"kind": PARTIAL} if isinstance(placement, Partial) and placement.reduce_op == "sum" else None


PartKey = tuple[tuple[int, ...], str]
"""The shape of a rank's part, and the digest of its values."""


def placement_of(name: str, axis: str, along: Sequence[Sequence[PartKey]], seq: int, said: Declared) -> Placement:
    """The placement of a tap along an axis. `along` are the parts of all ranks, in groups that differ in this axis alone;
    `seq` is the tokens of a prompt.

    Undeclared: tensor parallelism splits the taps of SPLIT_BY_RANKS, and taps of the user's own whose parts differ, by
    features; context parallelism splits by tokens what has fewer of them; everything else is whole on each rank.
    """
    axes = said.get(name, said.get(ALL, {}))
    if axis in axes:
        return Placement(**axes[axis])
    if axis == "tp":
        is_split = name in SPLIT_BY_RANKS if name in SHAPES else any(len(set(keys)) > 1 for keys in along)
        return Placement(SHARD) if is_split else Placement(REPLICATE)
    if axis == "cp" and any(len(shape) > SEQ and shape[SEQ] != seq for keys in along for shape, _ in keys):
        return Placement(SHARD, SEQ)
    return Placement(REPLICATE)

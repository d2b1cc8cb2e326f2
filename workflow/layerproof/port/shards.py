"""Joins the files that a stage's ranks wrote into one file.

Taps that an axis of the mesh splits are put together. For the others, which every rank has whole, it checks that the ranks
agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from layerproof.distributed.axes import coordinates
from layerproof.errors import StageError
from layerproof.port.placements import (
    PARTIAL,
    REPLICATE,
    SEQ,
    ZIGZAG,
    Declared,
    PartKey,
    Placement,
    placement_of,
)
from layerproof.taps import in_order
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

LARGEST_CHANGE = 2**-6
"""Largest relative L2 of a token between ranks that should agree.

It is twice the rounding of a bf16 layer, as in the audit of compiled stages.
"""

SMALL_TOKEN = 2**-8
"""A token whose norm is below this share of the median norm is measured against that share of the median norm."""


def join(
    parts: Sequence[Path],
    output: Path,
    valid: np.ndarray,
    axes: Mapping[str, int],
    graphs: Sequence[tuple[Mapping[str, Any], str]] = (),
) -> None:
    """Writes a stage's file from those of its ranks, in rank order.

    `axes` are the sizes of the mesh of the ranks, the last one fastest. `graphs` are the results of `compiled.graph_of` on
    each rank, if the ranks traced the stage.

    Along each axis parts are put together, summands are summed, and of a tap that each rank has whole, the first rank's is
    kept (see `placements`). A part that several ranks share appears once, such as key/value heads when there are fewer of
    them than ranks. The document `ranks` has the `count` of ranks and their `axes`; for each tap that is split, its
    `parts`: along which axis and dim, of which sizes, in zigzag or not, and how many ranks share each (`copies`); and the
    taps that `differ` between ranks that should have the same: the rank that is furthest from the `first` one along an
    axis, and its `change`. For floats, that is the largest relative L2 of a valid token; for other dtypes, the share of
    valid tokens that differ (null if shapes or non-finite values differ). A float tap that differs by more than rounding is
    also written as the sum over the ranks of that axis, `summed/TAP`.

    Raises:
        StageError: if a rank's file cannot be read, a rank lacks a tap of another, or this file cannot be written.
    """
    joined: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    differ: dict[str, dict[str, Any]] = {}
    split: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        files: list[h5py.File] = [stack.enter_context(hdf5.reading(path)) for path in parts]
        by_rank = [hdf5.taps(file, "port") for file in files]
        said = hdf5.document_if_there(files[0], hdf5.PLACEMENTS) or {}
        for name in in_order({name for taps in by_rank for name in taps}):
            lacking = [rank for rank, taps in enumerate(by_rank) if name not in taps]
            if lacking:
                raise StageError(
                    f"rank {lacking[0]} does not hand over {name}, but other ranks do. Tap it on all ranks."
                )
            of_ranks = [Tensor(taps[name].data[...], taps[name].dtype) for taps in by_rank]
            found = _gathered(name, of_ranks, axes, valid, said)
            joined[name] = found.tensor
            if found.parts:
                split[name] = found.parts
            if found.differ:
                differ[name] = found.differ
            if found.summed:
                summed[name] = found.summed
        attributes = hdf5.attributes(files[0])
        conversions = [hdf5.document_if_there(file, hdf5.CONVERSION) for file in files]
        places = hdf5.document_if_there(files[0], hdf5.PLACES)
    documents = {hdf5.RANKS: {"count": len(parts), "axes": dict(axes), "parts": split, "differ": differ}}
    if conversions[0]:
        documents[hdf5.CONVERSION] = _converted(conversions)
    if places:
        documents[hdf5.PLACES] = places
    if graphs:
        documents[hdf5.COMPILED] = _traced(graphs)
    groups = {"port": joined} | ({"summed": summed} if summed else {})
    hdf5.write(output, groups, valid=valid, attributes=attributes, documents=documents)


@dataclass
class _Gathered:
    """A tap of all ranks; see `join`."""

    tensor: Tensor
    parts: list[dict[str, Any]] = field(default_factory=list)
    differ: dict[str, Any] | None = None
    summed: Tensor | None = None


def whole(name: str, of_ranks: Sequence[Tensor], axes: Mapping[str, int], valid: np.ndarray, said: Declared) -> Tensor:
    """A tap of which these ranks have parts, as `join` puts it together."""
    return _gathered(name, of_ranks, axes, valid, said).tensor


def _gathered(
    name: str, of_ranks: Sequence[Tensor], axes: Mapping[str, int], valid: np.ndarray, said: Declared
) -> _Gathered:
    found = _Gathered(of_ranks[0])
    keys = list(map(part_key, of_ranks))
    held = list(enumerate(of_ranks))
    at = [coordinates(rank, axes) for rank, _ in held]
    placed = {
        axis: placement_of(name, axis, _keys_along(axis, at, keys), valid.shape[1], said)
        for axis, size in axes.items()
        if size > 1
    }
    for axis in sorted(placed, key=lambda axis: placed[axis].kind == REPLICATE):  # compared are whole tensors
        along = _along(axis, [at[rank] for rank, _ in held])
        groups = [[held[index] for index in group] for group in along]
        held = [(group[0][0], _combined(axis, placed[axis], group, valid, found)) for group in groups]
    found.tensor = held[0][1]
    return found


def _along(axis: str, at: Sequence[Mapping[str, int]]) -> list[list[int]]:
    """The places in a list of coordinates of those that differ in this axis alone, one list for each such group."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for index, one in enumerate(at):
        groups.setdefault(tuple(place for other, place in one.items() if other != axis), []).append(index)
    return list(groups.values())


def _keys_along(axis: str, at: Sequence[Mapping[str, int]], keys: Sequence[PartKey]) -> list[list[PartKey]]:
    return [[keys[index] for index in group] for group in _along(axis, at)]


def _combined(
    axis: str, placement: Placement, group: Sequence[tuple[int, Tensor]], valid: np.ndarray, found: _Gathered
) -> Tensor:
    """One tensor of those of the ranks along an axis. Adds to `found` what the first of such groups shows."""
    tensors = [tensor for _, tensor in group]
    if placement.is_split:
        whole, copies = _together(tensors, placement)
        sizes = [tensor.shape[placement.dim] if len(tensor.shape) > placement.dim else 0 for tensor in tensors]
        described = {"axis": axis, "dim": placement.dim, "sizes": sizes, "copies": copies}
        if all(one["axis"] != axis for one in found.parts):
            found.parts.append(described | {"zigzag": placement.kind == ZIGZAG})
        return whole
    if placement.kind == PARTIAL:
        return _sum(tensors)
    furthest = _furthest(group, valid)
    if furthest and not _is_further(found.differ, furthest):
        found.differ = furthest | {"axis": axis}
        is_rounding = (furthest["change"] or 0) <= LARGEST_CHANGE
        found.summed = None if tensors[0].dtype_class != "float" or is_rounding else _sum(tensors)
    return tensors[0]


def _is_further(one: Mapping[str, Any] | None, other: Mapping[str, Any]) -> bool:
    """Whether one rank is as far from what it should have as another; None as a change is further than any."""
    if one is None:
        return False
    return one["change"] is None or (other["change"] is not None and one["change"] >= other["change"])


def part_key(tensor: Tensor) -> PartKey:
    """The shape and digest of a part, by which other ranks recognise it."""
    return tensor.shape, hashlib.sha256(_values(tensor).tobytes()).hexdigest()


def part(
    name: str,
    whole: Tensor,
    of_ranks: Sequence[PartKey],
    rank: int,
    axes: Mapping[str, int],
    seq: int,
    said: Declared | None = None,
) -> Tensor:
    """What a rank holds of a tap, given the parts of all ranks, in rank order; `axes` and the placements are as in `join`.

    As many ranks share each part along an axis as the sizes imply: adjacent ranks, unless the digests show that every so
    many ranks share one. Of summands the first rank has the whole tap, the others zeros. Returns the whole tap if it is not
    split like this.
    """
    at = [coordinates(other, axes) for other in range(len(of_ranks))]
    own = whole
    for axis, size in axes.items():
        placement = placement_of(name, axis, _keys_along(axis, at, of_ranks), seq, said or {})
        if size == 1 or placement.kind == REPLICATE:
            continue
        group = next(group for group in _along(axis, at) if rank in group)
        if placement.kind == PARTIAL:
            own = own if group[0] == rank else Tensor(np.zeros_like(_values(own)), own.dtype)
        else:
            own = _own_part(own, [of_ranks[other] for other in group], group.index(rank), placement)
    return own


def _own_part(whole: Tensor, of_ranks: Sequence[PartKey], at: int, placement: Placement) -> Tensor:
    dim = placement.dim
    if any(len(shape) <= dim for shape in (whole.shape, *(one[0] for one in of_ranks))):
        return whole
    if placement.kind == ZIGZAG:
        chunks = np.array_split(_values(whole), 2 * len(of_ranks), dim)
        return Tensor(np.concatenate([chunks[at], chunks[-1 - at]], dim), whole.dtype)
    sizes, digests = [shape[dim] for shape, _ in of_ranks], [digest for _, digest in of_ranks]
    copies, rest = divmod(sum(sizes), whole.shape[dim])
    if rest or not copies or len(sizes) % copies:
        return whole
    pieces = len(sizes) // copies
    is_strided = pieces > 1 < copies and _first(digests) == _strided(len(sizes), pieces)
    own, before = (at % pieces, sizes[:pieces]) if is_strided else (at // copies, sizes[::copies])
    begin = sum(before[:own])
    return Tensor(_values(whole)[(slice(None),) * dim + (slice(begin, begin + sizes[at]),)], whole.dtype)


def _first(digests: Sequence[str]) -> list[int]:
    """For each rank, the first rank with the same part."""
    return list(map(list(digests).index, digests))


def _strided(count: int, pieces: int) -> list[int]:
    return [rank % pieces for rank in range(count)]


def _converted(conversions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's parameters, and the largest number of times that any rank read a tensor: each rank may read its own.

    The sources of a parameter are those on any rank, and it is initial if any rank left it as built.
    """
    parameters = {name: dict(entry) for name, entry in conversions[0]["parameters"].items()}
    for name, entry in parameters.items():
        same = [one["parameters"][name] for one in conversions if name in one["parameters"]]
        entry["of"] = sorted({source for other in same for source in other["of"]})
        entry["initial"] = any(other["initial"] for other in same)
    reads = {name: max(one["reads"][name] for one in conversions) for name in conversions[0]["reads"]}
    return {"reads": reads, "parameters": parameters, "ranks": len(conversions)}


def allowed_change(tensor: Tensor) -> float:
    return LARGEST_CHANGE if tensor.dtype_class == "float" else 0.0


def change_in_words(change: float | None, tensor: Tensor) -> str:
    if change is None:
        return "in shape or in non-finite values"
    return (
        f"relative L2 {change:.2g} at the worst token"
        if tensor.dtype_class == "float"
        else f"at {change:.2%} of the tokens"
    )


def _traced(graphs: Sequence[tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    """Like `compiled.describe`, but without outputs, which do not exist here.

    Describes rank 0's graph, and lists the ranks whose graph differs.
    """
    facts, first = graphs[0]
    other = [rank for rank, (_, digest) in enumerate(graphs) if digest != first]
    return {"change": {}, "dtypes": {}, **facts, "other_on_ranks": other}


def _together(parts: Sequence[Tensor], placement: Placement) -> tuple[Tensor, int]:
    """Puts parts together in rank order. Returns also how many ranks share each: adjacent ranks, or every so many.

    Of tokens none are shared: those of two ranks may be alike because the prompt repeats them.
    """
    if placement.kind == ZIGZAG:
        halves = [np.array_split(_values(part), 2, placement.dim) for part in parts]
        in_turn = [half[0] for half in halves] + [half[1] for half in reversed(halves)]
        return _concatenated([Tensor(half, parts[0].dtype) for half in in_turn], placement.dim), 1
    count = len(parts)
    first = _first([part_key(part)[1] for part in parts])
    for copies in range(count, 0, -1) if placement.dim != SEQ else ():
        pieces = count // copies
        if count % copies == 0:
            if first == [rank // copies * copies for rank in range(count)]:
                return _concatenated(parts[::copies], placement.dim), copies
            if first == _strided(count, pieces):
                return _concatenated(parts[:pieces], placement.dim), copies
    return _concatenated(parts, placement.dim), 1


def _values(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.data)


def _concatenated(parts: Sequence[Tensor], dim: int) -> Tensor:
    others = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}
    if len(parts) == 1 or len(others) > 1 or len(parts[0].shape) <= dim:
        return parts[0]  # the comparison rejects its shape
    return Tensor(np.concatenate(list(map(_values, parts)), dim), parts[0].dtype)


def _furthest(group: Sequence[tuple[int, Tensor]], valid: np.ndarray) -> dict[str, Any] | None:
    """The rank that is furthest from the first one, and its change; None if all ranks agree."""
    first, wanted = group[0]
    found = [{"rank": rank, "first": first, "change": _change(tensor, wanted, valid)} for rank, tensor in group]
    unlike = [one for one in found if one["change"] is None]
    furthest = unlike[0] if unlike else max(found, key=lambda one: one["change"])
    return None if furthest["change"] == 0 else furthest


def _change(tensor: Tensor, first: Tensor, valid: np.ndarray) -> float | None:
    """How far a rank's tap is from the first rank's at valid tokens; see `join`."""
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        return None
    where = valid if first.shape[:2] == valid.shape else np.ones(first.shape[:2], bool)
    mine, other = (one.floats(_values(one)[where]).reshape(where.sum(), -1) for one in (tensor, first))
    if first.dtype_class != "float":
        return float((mine != other).any(axis=1).mean()) if len(mine) else 0.0
    finite = np.isfinite(mine) & np.isfinite(other)
    if not np.array_equal(mine[~finite], other[~finite], equal_nan=True):
        return None
    mine, other = np.where(finite, mine, 0.0), np.where(finite, other, 0.0)
    sizes = np.linalg.norm(other, axis=1)
    largest = np.maximum(sizes, np.linalg.norm(mine, axis=1))  # a rank may have zeros where another has the values
    floor = max(SMALL_TOKEN * float(np.median(largest)), np.finfo(np.float64).tiny) if len(sizes) else 1.0
    return float((np.linalg.norm(mine - other, axis=1) / np.maximum(sizes, floor)).max(initial=0.0))


def _sum(of_ranks: Sequence[Tensor]) -> Tensor:
    total = np.sum([one.floats(_values(one)) for one in of_ranks], axis=0)
    return Tensor(total.astype(np.float32), "float32")

"""One file of a stage out of those that its ranks wrote: taps that tensor parallelism splits are put together, and of the
others, which every rank has whole, it is found out whether they are alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from layerproof.errors import StageError
from layerproof.taps import SPLIT_BY_RANKS, in_order
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

AXIS = 2
"""Of [batch, seq, heads or features...], where a tap is split."""

LARGEST_CHANGE = 2**-6
"""Relative L2 of a token by which ranks that should have the same may differ: twice the rounding of a bf16 layer, as in the
audit of compiled stages.
"""

SMALL_TOKEN = 2**-8
"""Tokens whose norm is below this share of the median one's are held against that share."""


def join(
    parts: Sequence[Path], output: Path, valid: np.ndarray, graphs: Sequence[tuple[Mapping[str, Any], str]] = ()
) -> None:
    """Writes a stage's file from those of its ranks, in their order, and what was found of their `graphs`, if they were
    traced (`compiled.graph_of`).

    Of taps in SPLIT_BY_RANKS the ranks' parts are put together; parts that several ranks hold, such as key/value heads of
    which there are fewer than ranks, are there once. Of other taps the file has rank 0's. The document `ranks` says how many
    ranks there were, of which taps each part was held by several of them (`copies`), and which taps `differ` between ranks:
    the rank that is furthest from rank 0 and by what `change`: of floats the relative L2 of the valid token where it is
    largest, of others the share of valid tokens (null if shapes differ, or what is not finite). A tap of floats that differs
    by more than rounding is also there summed over the ranks, as `summed/TAP`.

    Raises:
        StageError: if a rank's file cannot be read, a rank lacks a tap of another, or this file cannot be written.
    """
    joined: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    differ: dict[str, dict[str, Any]] = {}
    copies: dict[str, int] = {}
    with ExitStack() as stack:
        files: list[h5py.File] = [stack.enter_context(hdf5.reading(path)) for path in parts]
        by_rank = [hdf5.taps(file, "port") for file in files]
        for name in in_order({name for taps in by_rank for name in taps}):
            lacking = [rank for rank, taps in enumerate(by_rank) if name not in taps]
            if lacking:
                raise StageError(f"rank {lacking[0]} hands no {name} over, and other ranks do. Tap it on all ranks.")
            of_ranks = [Tensor(taps[name].data[...], taps[name].dtype) for taps in by_rank]
            if name in SPLIT_BY_RANKS:
                joined[name], copies[name] = _together(of_ranks)
                continue
            joined[name] = of_ranks[0]
            if furthest := _furthest(of_ranks, valid):
                differ[name] = furthest
                if of_ranks[0].kind == "float" and (furthest["change"] or 0) > LARGEST_CHANGE:
                    summed[name] = _sum(of_ranks)
        attributes = hdf5.attributes(files[0])
        conversions = [hdf5.document_if_there(file, hdf5.CONVERSION) for file in files]
    several = {name: count for name, count in copies.items() if count > 1}
    documents = {hdf5.RANKS: {"count": len(parts), "copies": several, "differ": differ}}
    if conversions[0]:
        documents[hdf5.CONVERSION] = _converted(conversions)
    if graphs:
        documents[hdf5.COMPILED] = _traced(graphs)
    groups = {"port": joined} | ({"summed": summed} if summed else {})
    hdf5.write(output, groups, valid=valid, attributes=attributes, documents=documents)


Held = tuple[tuple[int, ...], str]
"""Of a rank's part its shape and the digest of its values."""


def held(tensor: Tensor) -> Held:
    """What other ranks have to know of a part."""
    return tensor.shape, hashlib.sha256(_values(tensor).tobytes()).hexdigest()


def part(name: str, whole: Tensor, of_ranks: Sequence[Held], rank: int) -> Tensor:
    """What a rank should hold of a tap, where ranks hold these: parts in their order, each one held by as many ranks as it
    takes, adjacent ones unless it is seen to be every so many. The whole tap if it is not split so.
    """
    if name not in SPLIT_BY_RANKS or any(len(shape) <= AXIS for shape in (whole.shape, *(one[0] for one in of_ranks))):
        return whole
    sizes, digests = [shape[AXIS] for shape, _ in of_ranks], [digest for _, digest in of_ranks]
    copies, rest = divmod(sum(sizes), whole.shape[AXIS])
    if rest or not copies or len(sizes) % copies:
        return whole
    pieces = len(sizes) // copies
    is_strided = pieces > 1 < copies and _first(digests) == _strided(len(sizes), pieces)
    own, before = (rank % pieces, sizes[:pieces]) if is_strided else (rank // copies, sizes[::copies])
    begin = sum(before[:own])
    return Tensor(whole.data[:, :, begin : begin + sizes[rank]], whole.dtype)


def _first(digests: Sequence[str]) -> list[int]:
    """Of each rank the first one that holds the same."""
    return list(map(list(digests).index, digests))


def _strided(count: int, pieces: int) -> list[int]:
    return [rank % pieces for rank in range(count)]


def _converted(conversions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Rank 0's parameters, with what went into them on any rank, and whether any left them as they were built; and the
    largest number of times that a rank read a tensor: each may read its own.
    """
    parameters = {name: dict(entry) for name, entry in conversions[0]["parameters"].items()}
    for name, entry in parameters.items():
        same = [one["parameters"][name] for one in conversions if name in one["parameters"]]
        entry["of"] = sorted({source for other in same for source in other["of"]})
        entry["initial"] = any(other["initial"] for other in same)
    reads = {name: max(one["reads"][name] for one in conversions) for name in conversions[0]["reads"]}
    return {"reads": reads, "parameters": parameters, "ranks": len(conversions)}


def allowed_change(tensor: Tensor) -> float:
    return LARGEST_CHANGE if tensor.kind == "float" else 0.0


def change_in_words(change: float | None, tensor: Tensor) -> str:
    if change is None:
        return "in shape or in what is not finite"
    return (
        f"relative L2 {change:.2g} at the worst token" if tensor.kind == "float" else f"at {change:.2%} of the tokens"
    )


def _traced(graphs: Sequence[tuple[Mapping[str, Any], str]]) -> dict[str, Any]:
    """As `compiled.describe` tells of a stage, but without outputs, which are not there: that of rank 0, and on which ranks
    the graph is another.
    """
    facts, first = graphs[0]
    other = [rank for rank, (_, digest) in enumerate(graphs) if digest != first]
    return {"change": {}, "dtypes": {}, **facts, "other_on_ranks": other}


def _together(parts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """The parts in the order of their ranks, and how many ranks hold the same one: adjacent ranks, or every so many."""
    count = len(parts)
    first = _first([held(part)[1] for part in parts])
    for copies in range(count, 0, -1):
        pieces = count // copies
        if count % copies == 0:
            if first == [rank // copies * copies for rank in range(count)]:
                return _concatenated(parts[::copies]), copies
            if first == _strided(count, pieces):
                return _concatenated(parts[:pieces]), copies
    return _concatenated(parts), 1


def _values(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.data)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    others = {(*part.shape[:AXIS], *part.shape[AXIS + 1 :]) for part in parts}
    if len(parts) == 1 or len(others) > 1 or len(parts[0].shape) <= AXIS:
        return parts[0]  # whose shape is for the comparison to refuse
    return Tensor(np.concatenate(list(map(_values, parts)), AXIS), parts[0].dtype)


def _furthest(of_ranks: Sequence[Tensor], valid: np.ndarray) -> dict[str, Any] | None:
    """The rank that is furthest from rank 0, and how far; None if all have the same."""
    found = [{"rank": rank, "change": _change(tensor, of_ranks[0], valid)} for rank, tensor in enumerate(of_ranks)]
    unlike = [one for one in found if one["change"] is None]
    furthest = unlike[0] if unlike else max(found, key=lambda one: one["change"])
    return None if furthest["change"] == 0 else furthest


def _change(tensor: Tensor, first: Tensor, valid: np.ndarray) -> float | None:
    """By what a rank's tap is another than the first one's, at valid tokens: see `join`."""
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        return None
    where = valid if first.shape[:2] == valid.shape else np.ones(first.shape[:2], bool)
    mine, other = (one.floats(_values(one)[where]).reshape(where.sum(), -1) for one in (tensor, first))
    if first.kind != "float":
        return float((mine != other).any(axis=1).mean()) if len(mine) else 0.0
    finite = np.isfinite(mine) & np.isfinite(other)
    if not np.array_equal(mine[~finite], other[~finite], equal_nan=True):
        return None
    mine, other = np.where(finite, mine, 0.0), np.where(finite, other, 0.0)
    sizes = np.linalg.norm(other, axis=1)
    floor = max(SMALL_TOKEN * float(np.median(sizes)), np.finfo(np.float64).tiny) if len(sizes) else 1.0
    return float((np.linalg.norm(mine - other, axis=1) / np.maximum(sizes, floor)).max(initial=0.0))


def _sum(of_ranks: Sequence[Tensor]) -> Tensor:
    total = np.sum([one.floats(_values(one)) for one in of_ranks], axis=0)
    return Tensor(total.astype(np.float32), "float32")

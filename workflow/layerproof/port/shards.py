"""Joins the files that a stage's ranks wrote into one file.

Taps that tensor parallelism splits are put together. For the other taps, which every rank has whole, it checks that the
ranks agree.
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
from layerproof.taps import SHAPES, SPLIT_BY_RANKS, in_order
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

SPLIT_DIM = 2
"""The dim of [batch, seq, heads or features...] along which a tap is split."""

LARGEST_CHANGE = 2**-6
"""Largest relative L2 of a token between ranks that should agree.

It is twice the rounding of a bf16 layer, as in the audit of compiled stages.
"""

SMALL_TOKEN = 2**-8
"""A token whose norm is below this share of the median norm is measured against that share of the median norm."""


def join(
    parts: Sequence[Path], output: Path, valid: np.ndarray, graphs: Sequence[tuple[Mapping[str, Any], str]] = ()
) -> None:
    """Writes a stage's file from those of its ranks, in rank order.

    `graphs` are the results of `compiled.graph_of` on each rank, if the ranks traced the stage.

    For taps in SPLIT_BY_RANKS, and for taps of the user's own whose parts differ, the ranks' parts are put together. A
    part that several ranks share appears once, such as key/value heads when there are fewer of them than ranks. For
    other taps, the file contains rank 0's tensor. The document `ranks` has the `count` of ranks, the number of ranks
    that share each part of a tap (`copies`), and the taps that `differ` between ranks: the rank that is furthest from
    rank 0, and its `change`. For floats, that is the largest relative L2 of a valid token; for other dtypes, the share
    of valid tokens that differ (null if shapes or non-finite values differ). A float tap that differs by more than
    rounding is also written as the sum over the ranks,
    `summed/TAP`.

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
                raise StageError(
                    f"rank {lacking[0]} does not hand over {name}, but other ranks do. Tap it on all ranks."
                )
            of_ranks = [Tensor(taps[name].data[...], taps[name].dtype) for taps in by_rank]
            if _is_split(name, of_ranks):
                joined[name], copies[name] = _together(of_ranks)
                continue
            joined[name] = of_ranks[0]
            if furthest := _furthest(of_ranks, valid):
                differ[name] = furthest
                if of_ranks[0].dtype_class == "float" and (furthest["change"] or 0) > LARGEST_CHANGE:
                    summed[name] = _sum(of_ranks)
        attributes = hdf5.attributes(files[0])
        conversions = [hdf5.document_if_there(file, hdf5.CONVERSION) for file in files]
        places = hdf5.document_if_there(files[0], hdf5.PLACES)
    several = {name: count for name, count in copies.items() if count > 1}
    documents = {hdf5.RANKS: {"count": len(parts), "copies": several, "differ": differ}}
    if conversions[0]:
        documents[hdf5.CONVERSION] = _converted(conversions)
    if places:
        documents[hdf5.PLACES] = places
    if graphs:
        documents[hdf5.COMPILED] = _traced(graphs)
    groups = {"port": joined} | ({"summed": summed} if summed else {})
    hdf5.write(output, groups, valid=valid, attributes=attributes, documents=documents)


PartKey = tuple[tuple[int, ...], str]
"""The shape of a rank's part, and the digest of its values."""


def part_key(tensor: Tensor) -> PartKey:
    """The shape and digest of a part, by which other ranks recognise it."""
    return tensor.shape, hashlib.sha256(_values(tensor).tobytes()).hexdigest()


def part(name: str, whole: Tensor, of_ranks: Sequence[PartKey], rank: int) -> Tensor:
    """The part of a tap that belongs to a rank, given the parts of all ranks.

    The parts are in rank order. As many ranks share each part as the sizes imply: adjacent ranks, unless the digests
    show that every so many ranks share one. Returns the whole tap if it is not split like this.
    """
    if name in SHAPES and name not in SPLIT_BY_RANKS:
        return whole
    if any(len(shape) <= SPLIT_DIM for shape in (whole.shape, *(one[0] for one in of_ranks))):
        return whole
    sizes, digests = [shape[SPLIT_DIM] for shape, _ in of_ranks], [digest for _, digest in of_ranks]
    copies, rest = divmod(sum(sizes), whole.shape[SPLIT_DIM])
    if rest or not copies or len(sizes) % copies:
        return whole
    pieces = len(sizes) // copies
    is_strided = pieces > 1 < copies and _first(digests) == _strided(len(sizes), pieces)
    own, before = (rank % pieces, sizes[:pieces]) if is_strided else (rank // copies, sizes[::copies])
    begin = sum(before[:own])
    return Tensor(whole.data[:, :, begin : begin + sizes[rank]], whole.dtype)


def _is_split(name: str, of_ranks: Sequence[Tensor]) -> bool:
    """Whether ranks have parts of a tap. Nobody said so of a tap that is not canonical, so its values decide."""
    return name in SPLIT_BY_RANKS if name in SHAPES else len(set(map(part_key, of_ranks))) > 1


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


def _together(parts: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Puts parts together in rank order. Returns also how many ranks share each: adjacent ranks, or every so many."""
    count = len(parts)
    first = _first([part_key(part)[1] for part in parts])
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
    others = {(*part.shape[:SPLIT_DIM], *part.shape[SPLIT_DIM + 1 :]) for part in parts}
    if len(parts) == 1 or len(others) > 1 or len(parts[0].shape) <= SPLIT_DIM:
        return parts[0]  # the comparison rejects its shape
    return Tensor(np.concatenate(list(map(_values, parts)), SPLIT_DIM), parts[0].dtype)


def _furthest(of_ranks: Sequence[Tensor], valid: np.ndarray) -> dict[str, Any] | None:
    """The rank that is furthest from rank 0, and its change; None if all ranks agree."""
    found = [{"rank": rank, "change": _change(tensor, of_ranks[0], valid)} for rank, tensor in enumerate(of_ranks)]
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
    floor = max(SMALL_TOKEN * float(np.median(sizes)), np.finfo(np.float64).tiny) if len(sizes) else 1.0
    return float((np.linalg.norm(mine - other, axis=1) / np.maximum(sizes, floor)).max(initial=0.0))


def _sum(of_ranks: Sequence[Tensor]) -> Tensor:
    total = np.sum([one.floats(_values(one)) for one in of_ranks], axis=0)
    return Tensor(total.astype(np.float32), "float32")

"""One file of a stage out of those that its ranks wrote: taps that tensor parallelism splits are put together, and of the
others, which every rank has whole, it is found out whether they are alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from layerproof import tensors
from layerproof.metrics import Tensor
from layerproof.taps import SPLIT_BY_RANKS, in_order

AXIS = 2
"""Of [batch, seq, heads or features...], where a tap is split."""


LARGEST_CHANGE = 2**-8
"""Relative L2 by which ranks that should have the same may differ: as taps may change an output, what bf16 can tell."""


@dataclass(frozen=True)
class Ranks:
    """What several ranks made of a stage: their `count`, how many of them hold each part of a tap (`copies`), which taps
    `differ` between them, and the sums of these over all (`shards.join`).
    """

    count: int
    copies: Mapping[str, int]
    differ: Mapping[str, Mapping[str, Any]]
    summed: Mapping[str, Tensor]

    @classmethod
    def of(cls, file: h5py.File) -> Ranks | None:
        """That of a port's file; None if one rank made it."""
        content = tensors.document_if_there(file, tensors.RANKS)
        return content and cls(**content, summed=tensors.taps(file, "summed"))

    def reason(self, name: str, found: Tensor, wanted: Tensor, is_sum_right: bool) -> str | None:
        """Why a tap fails for what is wrong between the ranks, if it does: ranks that should have the same differ by more
        than bf16 can tell, or have the same part where each should have its own.
        `is_sum_right`: whether the sum over the ranks passes.
        """
        differs, copies = self.differ.get(name), self.copies.get(name, 1)
        if differs and (differs["change"] is None or differs["change"] > LARGEST_CHANGE):
            change = differs["change"]
            by = "in shape or in what is not finite" if change is None else f"relative L2 {change:.2g}"
            missing = "; their sum is right, so it is the sum over the ranks that is missing" if is_sum_right else ""
            return f"ranks 0 and {differs['rank']} differ ({by}), where all should have the same{missing}"
        if copies > 1 and found.shape[:AXIS] == wanted.shape[:AXIS] and found.shape[AXIS] < wanted.shape[AXIS]:
            held = "all" if copies == self.count else f"each {copies} of the"
            return f"{held} {self.count} ranks have the same part of it, and the others are nowhere"
        return None


def join(
    parts: Sequence[Path], output: Path, valid: np.ndarray, graphs: Sequence[tuple[Mapping[str, Any], str]] = ()
) -> None:
    """Writes a stage's file from those of its ranks, in their order, and what was found of their `graphs`, if they were
    traced (`compiled.graph_of`).

    Of taps in SPLIT_BY_RANKS the ranks' parts are put together; parts that several ranks hold, such as key/value heads of
    which there are fewer than ranks, are there once. Of other taps the file has rank 0's. The document `ranks` says how many
    ranks there were, of which taps each part was held by several of them (`copies`), and which taps `differ` between ranks:
    the rank that is furthest from rank 0 and the relative L2 by which it is (null if shapes differ, or what is not finite).
    Such a tap is also there summed over the ranks, as `summed/TAP`.

    Raises:
        StageError: if a rank's file cannot be read, or this one not be written.
    """
    joined: dict[str, Tensor] = {}
    summed: dict[str, Tensor] = {}
    differ: dict[str, dict[str, Any]] = {}
    copies: dict[str, int] = {}
    with ExitStack() as stack:
        files: list[h5py.File] = [stack.enter_context(tensors.reading(path)) for path in parts]
        by_rank = [tensors.taps(file, "port") for file in files]
        for name in in_order(by_rank[0]):
            of_ranks = [Tensor(taps[name].data[...], taps[name].dtype) for taps in by_rank if name in taps]
            if name in SPLIT_BY_RANKS:
                joined[name], copies[name] = _together(of_ranks)
                continue
            joined[name] = of_ranks[0]
            if furthest := _furthest(of_ranks):
                differ[name] = furthest
                if furthest["change"] is not None and of_ranks[0].kind == "float":
                    summed[name] = _sum(of_ranks)
        attributes = tensors.attributes(files[0])
        conversion = tensors.document_if_there(files[0], tensors.CONVERSION)
    several = {name: count for name, count in copies.items() if count > 1}
    documents = {tensors.RANKS: {"count": len(parts), "copies": several, "differ": differ}}
    if conversion:
        documents[tensors.CONVERSION] = conversion | {"ranks": len(parts)}
    if graphs:
        documents[tensors.COMPILED] = _traced(graphs)
    groups = {"port": joined} | ({"summed": summed} if summed else {})
    tensors.write(output, groups, valid=valid, attributes=attributes, documents=documents)


def part(name: str, whole: Tensor, shapes: Sequence[Sequence[int]], rank: int) -> Tensor:
    """What a rank holds of a tap, where those of the ranks have these shapes: parts in their order, each one held by as many
    adjacent ranks as it takes. The whole tap if it is not split so.
    """
    if name not in SPLIT_BY_RANKS or any(len(shape) <= AXIS for shape in (whole.shape, *shapes)):
        return whole
    sizes = [shape[AXIS] for shape in shapes]
    copies, rest = divmod(sum(sizes), whole.shape[AXIS])
    if rest or not copies:
        return whole
    begin = sum(sizes[: rank // copies * copies : copies])
    return Tensor(whole.data[:, :, begin : begin + sizes[rank]], whole.dtype)


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
    held = [hashlib.sha256(_values(part).tobytes()).digest() for part in parts]
    first = list(map(held.index, held))
    for copies in range(count, 0, -1):
        pieces = count // copies
        if count % copies == 0:
            if first == [rank // copies * copies for rank in range(count)]:
                return _concatenated(parts[::copies]), copies
            if first == [rank % pieces for rank in range(count)]:
                return _concatenated(parts[:pieces]), copies
    return _concatenated(parts), 1


def _values(tensor: Tensor) -> np.ndarray:
    return np.asarray(tensor.data)


def _concatenated(parts: Sequence[Tensor]) -> Tensor:
    others = {(*part.shape[:AXIS], *part.shape[AXIS + 1 :]) for part in parts}
    if len(parts) == 1 or len(others) > 1 or len(parts[0].shape) <= AXIS:
        return parts[0]  # whose shape is for the comparison to refuse
    return Tensor(np.concatenate(list(map(_values, parts)), AXIS), parts[0].dtype)


def _furthest(of_ranks: Sequence[Tensor]) -> dict[str, Any] | None:
    """The rank that is furthest from rank 0, and how far; None if all have the same."""
    found = [{"rank": rank, "change": _change(tensor, of_ranks[0])} for rank, tensor in enumerate(of_ranks)]
    unlike = [one for one in found if one["change"] is None]
    furthest = unlike[0] if unlike else max(found, key=lambda one: one["change"])
    return None if furthest["change"] == 0 else furthest


def _change(tensor: Tensor, first: Tensor) -> float | None:
    if tensor.shape != first.shape or tensor.dtype != first.dtype:
        return None
    mine, other = (one.floats(_values(one)) for one in (tensor, first))
    finite = np.isfinite(mine) & np.isfinite(other)
    if not np.array_equal(mine[~finite], other[~finite], equal_nan=True):
        return None
    size = float(np.linalg.norm(other[finite]))
    return float(np.linalg.norm(mine[finite] - other[finite])) / max(size, np.finfo(np.float64).tiny)


def _sum(of_ranks: Sequence[Tensor]) -> Tensor:
    total = np.sum([one.floats(_values(one)) for one in of_ranks], axis=0)
    return Tensor(total.astype(np.float32), "float32")

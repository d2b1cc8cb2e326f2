"""The results of several ranks for one stage, and the errors between ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from layerproof.distributed.axes import place_of
from layerproof.port.placements import SEQ
from layerproof.port.shards import allowed_change, change_in_words
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

SAME = 2.0**-5
"""Relative L2 of two parts that are taken for the same: four times what bf16 leaves of a stage."""
MOST_TOKENS, MOST_ELEMENTS = 4096, 1 << 26
"""Tokens up to which each is looked for among all others, and elements up to which a tap is held in memory for it."""
FAR = 4.0
"""A part is another rank's if it is this many times nearer to that than to its own."""


@dataclass(frozen=True)
class Ranks:
    """Facts about the ranks that computed a stage, from `shards.join`.

    `count` is the number of ranks, `axes` the sizes of their mesh. `parts` says, by tap, along which axes ranks have parts
    of it, and how many of them have the same. `differ` describes the taps that differ between ranks. `summed` contains
    sums over ranks of the float taps that differ by more than rounding.
    """

    count: int
    axes: Mapping[str, int]
    parts: Mapping[str, Sequence[Mapping[str, Any]]]
    differ: Mapping[str, Mapping[str, Any]]
    summed: Mapping[str, Tensor]

    @classmethod
    def of(cls, file: h5py.File) -> Ranks | None:
        """Reads the ranks of a port's file; None if a single rank wrote it."""
        content = hdf5.document_if_there(file, hdf5.RANKS)
        return content and cls(**content, summed=hdf5.taps(file, "summed"))

    def reason(self, name: str, found: Tensor, wanted: Tensor, is_sum_right: bool) -> str | None:
        """Says why a tap fails because of its ranks; None if it does not.

        It fails if ranks that should have the same tensor differ by more than rounding, or if ranks have the same part
        where each should have its own. `is_sum_right` says whether the sum over the ranks passes.
        """
        differs = self.differ.get(name)
        if differs and (differs["change"] is None or differs["change"] > allowed_change(found)):
            by, axis = change_in_words(differs["change"], found), differs["axis"]
            over = "the ranks" if len(self._axes) == 1 else axis
            missing = f"; their sum is right, so the sum over {over} is missing" if is_sum_right else ""
            pair = f"ranks {differs['first']} and {differs['rank']}{self._where(differs['rank'])}"
            return f"{pair} differ ({by}), but should have the same tensor{missing}"
        for part in self.parts.get(name, ()):
            dim, copies, size = part["dim"], part["copies"], len(part["sizes"])
            has_parts = min(len(found.shape), len(wanted.shape)) > dim and found.shape[:dim] == wanted.shape[:dim]
            if copies > 1 and has_parts and found.shape[dim] < wanted.shape[dim]:
                sharing = f"all {size}" if copies == size else f"each {copies} of the {size}"
                along = f" along {part['axis']}" if len(self._axes) > 1 else ""
                return f"{sharing} ranks{along} have the same part of it, and no rank has the other parts"
        return None

    def explanation(self, name: str, found: Tensor, wanted: Tensor, valid: np.ndarray) -> str | None:
        """Says what ranks have to do with a tap that fails by its numbers; None if nothing is seen.

        Ranks may have each other's parts, tokens may be in another order, or a sum over an axis may be computed twice.
        """
        if found.dtype_class != "float" or found.shape != wanted.shape or found.shape[:2] != valid.shape:
            return None
        if math.prod(found.shape) > MOST_ELEMENTS:
            return None
        mine, its = (one.floats(np.asarray(one.data)) for one in (found, wanted))
        if not np.isfinite(mine[valid]).all():
            return None
        for part in self.parts.get(name, ()):
            if said := _in_another_order(part, mine, its, valid):
                return said
        for axis, size in self._axes.items():
            if _change(mine[valid], its[valid] * size) <= SAME:
                return f"it is {size} times what it should be: the sum over {axis} is computed twice"
            if _change(mine[valid] * size, its[valid]) <= SAME:
                return f"it is 1/{size} of what it should be: a mean over {axis} in place of the sum"
        return _moved_tokens(mine, its, valid)

    @property
    def _axes(self) -> dict[str, int]:
        return {axis: size for axis, size in self.axes.items() if size > 1}

    def _where(self, rank: int) -> str:
        """The coordinates of a rank, if the mesh has more than one axis."""
        return f" ({place_of(rank, self._axes)})" if len(self._axes) > 1 else ""


def _in_another_order(part: Mapping[str, Any], mine: np.ndarray, its: np.ndarray, valid: np.ndarray) -> str | None:
    """Says which ranks along an axis have another's part; of tokens, chunks are half as large as a rank's part."""
    axis, dim, size = part["axis"], part["dim"], len(part["sizes"])
    is_tokens = dim == SEQ
    pieces = 2 * size if is_tokens else size // part["copies"]
    if pieces < 2 or mine.shape[dim] % pieces:
        return None
    of_mine, of_its = (np.split(one, pieces, dim) for one in (mine, its))
    counted = np.split(valid, pieces, SEQ) if is_tokens else [valid] * pieces
    taken = [_taken_from(piece, index, of_its, counted) for index, piece in enumerate(of_mine)]
    if taken == list(range(pieces)) or None in taken:
        return None
    if is_tokens:
        order = ", ".join(map(str, taken))
        return f"over {axis}, its {pieces} chunks of tokens are those that belong at {order}, counted from 0"
    wrong = [f"{axis} {index} has the part of {axis} {other}" for index, other in enumerate(taken) if index != other]
    return f"ranks have each other's parts: {'; '.join(wrong)}"


def _taken_from(piece: np.ndarray, own: int, pieces: Sequence[np.ndarray], counted: Sequence[np.ndarray]) -> int | None:
    """The place of the piece that this one is; its own if it is at least as near to that; None if it is none. A piece's own
    valid tokens count, wherever it lies.
    """
    far = [_change(piece[valid], other[valid]) for other, valid in zip(pieces, counted, strict=True)]
    nearest = int(np.argmin(far))
    if far[own] <= SAME or far[nearest] > SAME:
        return own if far[own] <= SAME else None
    return nearest if far[own] > FAR * far[nearest] else own


def _moved_tokens(mine: np.ndarray, its: np.ndarray, valid: np.ndarray) -> str | None:
    """Says if at least half of the wrong tokens are those of other places."""
    places = np.argwhere(valid)
    if len(places) > MOST_TOKENS:
        return None
    a, b = (one[valid].reshape(len(places), -1) for one in (mine, its))
    squares = np.square(a).sum(1)[:, None] + np.square(b).sum(1)[None, :] - 2 * a @ b.T
    far = np.sqrt(np.maximum(squares, 0.0)) / np.maximum(np.linalg.norm(b, axis=1), np.finfo(np.float64).tiny)
    wrong = np.flatnonzero(far.diagonal() > SAME)
    nearest = far.argmin(1)
    moved = [index for index in wrong if far[index, nearest[index]] <= SAME]
    if not len(wrong) or 2 * len(moved) < len(wrong):  # valid places may have what belongs to padding
        return None
    first = moved[0]
    here, there = ("[{},{}]".format(*places[index]) for index in (first, nearest[first]))
    count = f"{len(moved)} of {len(wrong)} wrong ones"
    return f"its tokens are in another order: {count} belong elsewhere, first {here} at {there}"


def _change(one: np.ndarray, other: np.ndarray) -> float:
    """The relative L2; infinite if there is nothing to compare with."""
    size = float(np.linalg.norm(other))
    return float(np.linalg.norm(one - other)) / size if size else np.inf

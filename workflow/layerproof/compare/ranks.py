"""The results of several ranks for one stage, and the errors between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py

from layerproof.port.shards import SPLIT_DIM, allowed_change, change_in_words
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor


@dataclass(frozen=True)
class Ranks:
    """Facts about the ranks that computed a stage, from `shards.join`.

    `count` is the number of ranks. `copies` is, by tap, the number of ranks with the same part of it. `differ`
    describes the taps that differ between ranks. `summed` contains sums over all ranks of the float taps that differ by
    more than rounding.
    """

    count: int
    copies: Mapping[str, int]
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
        differs, copies = self.differ.get(name), self.copies.get(name, 1)
        if differs and (differs["change"] is None or differs["change"] > allowed_change(found)):
            by = change_in_words(differs["change"], found)
            missing = "; their sum is right, so the sum over the ranks is missing" if is_sum_right else ""
            return f"ranks 0 and {differs['rank']} differ ({by}), but should have the same tensor{missing}"
        has_parts = (
            min(len(found.shape), len(wanted.shape)) > SPLIT_DIM and found.shape[:SPLIT_DIM] == wanted.shape[:SPLIT_DIM]
        )
        if copies > 1 and has_parts and found.shape[SPLIT_DIM] < wanted.shape[SPLIT_DIM]:
            sharing = "all" if copies == self.count else f"each {copies} of the"
            return f"{sharing} {self.count} ranks have the same part of it, and no rank has the other parts"
        return None

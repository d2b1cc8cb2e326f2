"""What several ranks made of a stage, and what is wrong between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import h5py

from layerproof.port.shards import AXIS, allowed_change, change_in_words
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor


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
        content = hdf5.document_if_there(file, hdf5.RANKS)
        return content and cls(**content, summed=hdf5.taps(file, "summed"))

    def reason(self, name: str, found: Tensor, wanted: Tensor, is_sum_right: bool) -> str | None:
        """Why a tap fails for what is wrong between the ranks, if it does: ranks that should have the same differ by more
        than rounding, or have the same part where each should have its own.
        `is_sum_right`: whether the sum over the ranks passes.
        """
        differs, copies = self.differ.get(name), self.copies.get(name, 1)
        if differs and (differs["change"] is None or differs["change"] > allowed_change(found)):
            by = change_in_words(differs["change"], found)
            missing = "; their sum is right, so it is the sum over the ranks that is missing" if is_sum_right else ""
            return f"ranks 0 and {differs['rank']} differ ({by}), where all should have the same{missing}"
        has_parts = min(len(found.shape), len(wanted.shape)) > AXIS and found.shape[:AXIS] == wanted.shape[:AXIS]
        if copies > 1 and has_parts and found.shape[AXIS] < wanted.shape[AXIS]:
            held = "all" if copies == self.count else f"each {copies} of the"
            return f"{held} {self.count} ranks have the same part of it, and the others are nowhere"
        return None

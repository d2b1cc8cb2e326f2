"""Finds the first stage at which a port goes wrong if only the end of a chain is visible, as in a compiled full model.

The port runs from the first stage to some later stage as one graph without taps, and its output is compared with the
golden's trajectory there. A variant of the golden that ran on its own outputs shows how far a correct port may stray. A
chain that has gone wrong stays wrong in all later stages, so bisection finds the stage in O(log n) runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerproof.compare.relaid import at_last_tokens
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor

SCHEMA_VERSION = 1
STRAYS = 2.0
"""A chain is wrong if its median token's error is more than this many times the variant's."""
STRAYS_IN_ALL = 4.0
"""A chain is also wrong if the error of all tokens together is more than this many times the variant's.

Experts flip at some tokens in any chain, and these tokens may dominate this error.
"""
ROUNDING = 2.0**-9
"""Relative error of rounding to bf16, allowed where the variant equals the golden bit for bit, as after embed."""


@dataclass(frozen=True)
class Strayed:
    """How far an output is from the golden's: the relative L2 of the median token and of all tokens."""

    median: float
    whole: float

    @classmethod
    def measure(cls, found: Tensor, golden: Tensor, valid: np.ndarray) -> Strayed:
        """Measures tensors [batch, seq, features...] at the tokens in `valid`, bool [batch, seq].

        NaN, Inf or a different shape count as infinitely far.
        """
        if found.shape != golden.shape:
            return cls(np.inf, np.inf)
        mine, its = (tensor.floats(tensor.data[...])[valid].reshape(int(valid.sum()), -1) for tensor in (found, golden))
        error, size = np.square(mine - its).sum(axis=1), np.square(its).sum(axis=1)
        with np.errstate(invalid="ignore", divide="ignore"):
            median, whole = np.median(np.sqrt(error / size)), np.sqrt(error.sum() / size.sum())
        return cls(*(float(np.nan_to_num(value, nan=np.inf, posinf=np.inf)) for value in (median, whole)))

    def is_wrong(self, allowed: Strayed) -> bool:
        """Whether the output strays further than a correct port may if a variant strays as far as `allowed`."""
        median, whole = allowed.median or ROUNDING, allowed.whole or ROUNDING
        return self.median > STRAYS * median or self.whole > STRAYS_IN_ALL * whole

    def numbers(self, side: str) -> dict[str, float | None]:
        """Returns the numbers for JSON, with None for infinity."""
        return {f"{side}_{key}": value if np.isfinite(value) else None for key, value in vars(self).items()}


def bisect(
    stages: Sequence[str],
    run: Callable[[Sequence[str]], Tensor],
    golden: Mapping[str, Path],
    noise: Mapping[str, Path],
    valid: np.ndarray,
) -> dict[str, Any]:
    """Bisects a chain and returns the content of results/bisect.json.

    `first_wrong` is the first stage after which the chain is wrong, or None. `last_right` is the stage before it, or
    None if there is none; if nothing is wrong, it is the last stage. `runs` lists each run with its last stage and its
    result.

    `run` runs the port through the given stages, from the first on, and returns the output of the last.

    Raises:
        StageError: if a file of the golden is missing or damaged.
    """
    runs: list[dict[str, Any]] = []

    def is_wrong(index: int) -> bool:
        stage = stages[index]
        wanted = hdf5.read(golden[stage], "golden/out")
        mine, counted = at_last_tokens(stage, run(stages[: index + 1]), wanted, valid)
        found = Strayed.measure(mine, wanted, counted)
        allowed = Strayed.measure(hdf5.read(noise[stage], "chained/out"), wanted, counted)
        wrong = found.is_wrong(allowed)
        runs.append({"to": stage, "wrong": wrong, **found.numbers("port"), **allowed.numbers("variant")})
        print(
            f"{stages[0]} to {stage}: {'wrong' if wrong else 'right'}, {found} where a variant has {allowed}",
            flush=True,
        )
        return wrong

    first = first_true(len(stages), is_wrong)
    return {
        "schema_version": SCHEMA_VERSION,
        "stages": list(stages),
        "first_wrong": None if first is None else stages[first],
        "last_right": stages[-1] if first is None else stages[first - 1] if first else None,
        "runs": runs,
    }


def first_true(count: int, holds: Callable[[int], bool]) -> int | None:
    """Returns the first of `count` indices for which `holds` is True; None if there is none.

    Once `holds` is True, it must stay True for all later indices. Calls `holds` at most 1 + ceil(log2(count)) times.
    """
    if not count or not holds(count - 1):
        return None
    false, true = -1, count - 1
    while true - false > 1:
        middle = (false + true) // 2
        false, true = (false, middle) if holds(middle) else (middle, true)
    return true

"""Error sums over groups of elements (tokens, channel blocks, heads, experts), and R, the ratio of error to noise."""

from __future__ import annotations

import math

import numpy as np

from layerproof.tensors.tensor import bf16_ulp

MAX_BLOCKS = 64  # channel blocks of a tap
R_MAX = 1e9  # R is capped here instead of becoming infinite
CLOSE_ABSOLUTE, CLOSE_RELATIVE = 1e-3, 1e-2


# Dropping the low 13 of 32 bits keeps the sign, 8 exponent bits and 10 mantissa bits: steps of 2^-10 < 0.1 %.
PATTERN_SHIFT = 13
PATTERN_BINS = 0x7F800000 >> PATTERN_SHIFT


def bf16_rounding(values: np.ndarray) -> np.ndarray:
    """Returns the error of rounding each fp64 value to the nearest bf16, ties to even."""
    step = np.where(values == 0, 1.0, bf16_ulp(values))
    return np.rint(values / step) * step - values


def error_squares(port: np.ndarray, golden: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns four squared errors of each element, fp64 [4, ...].

    In this order: port, golden, rounding the truth to bf16, and the expectation of that rounding. The last is ulp^2 /
    12, the mean if rounding errors are uniform.
    """
    return np.stack((np.square(port - truth), np.square(golden - truth), *rounding_squares(truth)))


def rounding_squares(truth: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the actual and the expected squared errors of rounding fp64 values to bf16."""
    return np.square(bf16_rounding(truth)), np.square(bf16_ulp(truth)) / 12


def noise_of(squares: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns noise and floor of each group as sums of squares, given its sums of `error_squares`, [4, ...].

    The floor is the rounding of the truth to bf16. Where golden and rounding are both exact (a constant, a lookup), the
    floor is the expected rounding, so one ulp there does not become infinitely many times the noise. Elsewhere the
    expected rounding does not count: one massive channel that happens to be exact would raise the floor of all others.
    """
    _, golden, rounding, expected = squares
    floor = np.where(np.maximum(golden, rounding) > 0, rounding, expected)
    return np.maximum(golden, floor), floor


def noise_ratio(squares: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns R of each group, fp64 in the shape of `count`; NaN where `count` is 0.

    `squares` are the sums of `error_squares` over each group, [4, ...]; `count` is the number of elements in the group.
    R is at most R_MAX. Where the noise is zero, R is R_MAX, or 0 if the port is exact too.
    """
    port = squares[0]
    noise, _ = noise_of(squares)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        ratio = np.minimum(np.sqrt(port / noise), R_MAX)
    ratio = np.where(noise > 0, ratio, np.where(port > 0, R_MAX, 0.0))
    return np.where(count > 0, ratio, np.nan)


def relative(squares: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """Returns squared errors in units of `noise`, a mean squared error; at most R_MAX squared."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        return np.where(squares > 0, np.minimum(squares / noise, R_MAX**2), 0.0)


def unit_ratio(units: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Returns R of each group from its squared errors in units of the noise, [1, groups]; NaN where count is 0."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(count > 0, np.sqrt(units[0] / count), np.nan)


GROUPS = ("token", "block", "head", "expert")
"""Types of groups for which we report the worst R."""


def block_size(features: int) -> int:
    """Returns the number of channels per block if at most MAX_BLOCKS equal blocks cover them."""
    return max(1, math.ceil(features / MAX_BLOCKS))


def groups_of(
    channels: np.ndarray, counts: np.ndarray, shape: tuple[int, ...]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Adds up sums by channel [rows, features] and counts [features] by block, and by head if the tap has heads."""
    features = len(counts)
    sizes = {"block": block_size(features), **({"head": shape[3]} if len(shape) == 4 else {})}
    starts = {group: np.arange(0, features, max(1, size)) for group, size in sizes.items()}
    return {
        group: (np.add.reduceat(channels, start, axis=1), np.add.reduceat(counts, start))
        if features
        else (channels, counts)
        for group, start in starts.items()
    }


def by_expert(tokens: np.ndarray, count: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Adds up sums [rows, tokens] and counts [tokens] over the tokens routed to each expert."""
    goes = experts.reshape(-1, experts.shape[-1]).astype(np.float64)
    return tokens @ goes, count @ goes

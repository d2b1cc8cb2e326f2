"""Compiled passes over a tap that fit its noise; the squared errors of a token stay in the processor's cache.

Everything is fp64. numba recompiles only when this file changes, so constants of other modules are arguments
(`Constants`), and this file repeats some loops of kernel.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerproof.measure.groups import R_MAX
from layerproof.measure.kernel import (
    BF16_STEPS,
    numba,  # kernel.py sets the cache directory before importing it
)
from layerproof.tensors.tensor import FLOAT32_MAX

ALIKE = 4.0
"""Two numbers that differ by so many standard deviations of the rounding to bf16, about a step, or less count as one."""


class Constants(NamedTuple):
    """Separate from `kernel.Constants`, so that an edit of a comparison's constants does not rerun the golden."""

    largest_ratio: float = R_MAX
    largest: float = FLOAT32_MAX
    alike: float = ALIKE
    steps: np.ndarray = BF16_STEPS


class Block(NamedTuple):
    """Some tokens of a tap.

    `numbers` int64 [tokens] are the token numbers; `kept` bool [tokens] marks the tokens to use. `truth` [tokens,
    features] and `draws` [draws, tokens, features] are fp32 or fp64. If `are_bits`, draws are uint16, the bits of bf16.
    """

    numbers: np.ndarray
    kept: np.ndarray
    truth: np.ndarray
    draws: np.ndarray
    are_bits: bool


class Fit(NamedTuple):
    """Sums over a tap's tokens [tokens] and channels [features]; fp64 unless stated otherwise.

    Rows are the draws and, as the last row, the rounding of the truth to bf16.

    token_counts: int64 [tokens], channel_counts: int64 [features]: elements that are finite in all draws and the truth
    inexact_counts: int64 [features]: those of them that are not exact in all rows
    seen: [few, features]: the first few numbers of the truth among these that are not `ALIKE`; NaN where there are no more
    token: [rows, tokens], channel: [rows, features]: means of squared errors, each in units of the other
    squares: [rows + 1]: sums of squared errors; the last is the expected sum for the rounding, of elements that are not
        exact in all rows, such as the ones and zeros of a softmax behind a mask
    share: how much of a token's factor is its own; prior: [rows]: the rest of it, the same for all tokens
    """

    token_counts: np.ndarray
    channel_counts: np.ndarray
    inexact_counts: np.ndarray
    seen: np.ndarray
    token: np.ndarray
    channel: np.ndarray
    squares: np.ndarray
    share: float
    prior: np.ndarray

    @classmethod
    def zero(cls, draws: int, tokens: int, features: int, few: int) -> Fit:
        """Returns empty sums."""
        rows = draws + 1
        return cls(
            token_counts=np.zeros(tokens, np.int64),
            channel_counts=np.zeros(features, np.int64),
            inexact_counts=np.zeros(features, np.int64),
            seen=np.full((few, features), np.nan),
            token=np.zeros((rows, tokens)),
            channel=np.zeros((rows, features)),
            squares=np.zeros(rows + 1),
            share=1.0,
            prior=np.zeros(rows),
        )


def count(fit: Fit, expected: np.ndarray, block: Block) -> None:
    """Adds a block to the counts and to the sums of squares, both in total and by channel in `fit.channel`.

    Adds the expected squares of the rounding by channel to `expected` [features].
    """
    _count(fit, expected, Constants(), block)


def balance(fit: Fit, following: np.ndarray, is_exact: bool, block: Block) -> None:
    """Fits `fit.token` of a block's tokens to `fit.channel`, and adds these tokens' share of the next `fit.channel`.

    The share goes into `following` [rows, features]; the caller divides it by the counts. If all draws are exact
    (`is_exact`), their errors count as the expected errors of a rounding. Also fills `fit.seen`.
    """
    _balance(fit, following, fit.channel.mean(axis=0), is_exact, Constants(), block)


def in_units(
    fit: Fit, by_token: np.ndarray, by_channel: np.ndarray, rounding: float, is_exact: bool, block: Block
) -> None:
    """Fits `fit.token` as `balance` does, and sums squared errors in units of the noise of the other rows.

    The sums go into `by_token` [rows, tokens] and `by_channel` [rows, features]. `rounding` is `Noise.rounding`.
    """
    channel = fit.channel.mean(axis=0)
    others = np.stack([np.delete(fit.channel, row, axis=0).mean(axis=0) for row in range(len(fit.channel))])
    _in_units(fit, by_token, by_channel, channel, others, rounding, is_exact, Constants(), block)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_squares(block, row, constants, exact, squares, keep):
    """Computes the squared errors [rows + 1, features] of a token and returns the number of finite elements.

    An element is finite (`keep`) if it is finite in the truth and in all draws; the squares of the others are 0. As in
    kernel.py, each loop writes only one array, so the compiler can vectorise it.
    """
    draws, patterns = block.draws, exact.view(np.int64)
    rounding, expected = squares[len(draws)], squares[len(draws) + 1]
    single = np.empty(len(exact), np.float32)
    keep[:] = True
    _set_values(block.truth[row], False, single, exact)
    _keep_finite(exact, constants.largest, keep)
    for draw in range(len(draws)):
        _set_values(draws[draw, row], block.are_bits, single, squares[draw])
        _keep_finite(squares[draw], constants.largest, keep)
    found = 0
    for c in range(len(keep)):
        found += keep[c]
    if found < len(keep):
        for c in range(len(keep)):
            if not keep[c]:
                exact[c] = 0.0
                squares[: len(draws), c] = 0.0
    for draw in range(len(draws)):
        _square_difference(squares[draw], exact)
    for c in range(len(exact)):
        expected[c] = constants.steps[(patterns[c] >> 52) & 0x7FF]
    for c in range(len(exact)):
        error = np.rint(exact[c] / expected[c]) * expected[c] - exact[c]  # for 0, the step of the smallest numbers
        rounding[c] = error * error
    for c in range(len(exact)):
        expected[c] = expected[c] * expected[c] / 12 if exact[c] != 0 else 0.0
    return found


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_values(values, are_bits, single, wide):
    """Converts a token's elements to fp64; bf16 is the upper half of fp32."""
    if are_bits:
        patterns = single.view(np.uint32)
        for c in range(len(wide)):
            patterns[c] = np.uint32(values[c]) << np.uint32(16)
        for c in range(len(wide)):
            wide[c] = single[c]
    else:
        for c in range(len(wide)):
            wide[c] = values[c]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _keep_finite(values, largest, keep):
    for c in range(len(values)):
        keep[c] &= abs(values[c]) <= largest


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _square_difference(values, exact):
    for c in range(len(values)):
        values[c] = (values[c] - exact[c]) * (values[c] - exact[c])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_units(squares, noise, most, units):
    """Computes `groups.relative`."""
    for c in range(len(units)):
        unit = squares[c] / noise[c]
        unit = most if unit > most else unit  # NaN stays
        units[c] = unit if squares[c] > 0 else 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _total(values):
    total = 0.0
    for c in range(len(values)):
        total += values[c]
    return total


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add_to(totals, values):
    for c in range(len(values)):
        totals[c] += values[c]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _count(fit, expected, constants, block):
    features, rows = len(fit.channel_counts), len(fit.channel)
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    one, units, inexact = np.ones(features), np.empty(features), np.empty(features, np.bool_)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        fit.token_counts[block.numbers[row]] = _set_squares(block, row, constants, exact, squares, keep)
        for c in range(features):
            fit.channel_counts[c] += keep[c]
        inexact[:] = False
        for of in range(rows):
            for c in range(features):
                inexact[c] |= squares[of, c] > 0
        for c in range(features):
            fit.inexact_counts[c] += inexact[c]
            exact[c] = squares[rows, c] if inexact[c] else 0.0
        for of in range(rows + 1):
            fit.squares[of] += _total(squares[of] if of < rows else exact)
            _set_units(squares[of], one, most, units)
            _add_to(fit.channel[of] if of < rows else expected, units)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _see(seen, exact, squares, alike):
    """Adds a token's numbers that are not exact in all rows of `squares` to those seen of their channels, if none is alike.

    Numbers that differ by less than a rounding have the same errors, as those of a token that a prompt repeats.
    """
    rows = len(squares) - 1
    for c in range(len(exact)):
        if not np.isnan(seen[-1, c]):
            continue
        inexact = False
        for of in range(rows):
            inexact |= squares[of, c] > 0
        if not inexact:
            continue
        near = alike * alike * squares[rows, c]
        for place in range(len(seen)):
            if np.isnan(seen[place, c]):
                seen[place, c] = exact[c]
            if (seen[place, c] - exact[c]) ** 2 <= near:
                break


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_token(fit, number, channel, is_exact, squares, most, units):
    """Fits a token's factors to the channels' factors and returns their mean."""
    rows = len(fit.channel)
    mean = 0.0
    for of in range(rows):
        _set_units(squares[rows if is_exact else of], channel, most, units)
        fit.token[of, number] = fit.share * (_total(units) / fit.token_counts[number]) + fit.prior[of]
        mean += fit.token[of, number] / rows
    return mean


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _balance(fit, following, channel, is_exact, constants, block):
    rows, features = fit.channel.shape
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    of_token, units = np.empty(features), np.empty(features)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        _set_squares(block, row, constants, exact, squares, keep)
        _see(fit.seen, exact, squares, constants.alike)
        of_token[:] = _set_token(fit, block.numbers[row], channel, is_exact, squares, most, units)
        for of in range(rows):
            _set_units(squares[rows if is_exact else of], of_token, most, units)
            _add_to(following[of], units)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _in_units(fit, by_token, by_channel, channel, others, rounding, is_exact, constants, block):
    rows, features = fit.channel.shape
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    noise, units = np.empty(features), np.empty(features)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        number = block.numbers[row]
        _set_squares(block, row, constants, exact, squares, keep)
        _set_token(fit, number, channel, is_exact, squares, most, units)
        for of in range(rows):
            other = 0.0  # a sum, because subtracting from the total would lose small ones beside a large one
            for draw in range(rows):
                other += fit.token[draw, number] / (rows - 1) if draw != of else 0.0
            _set_noise(other, others[of], rounding, squares[rows], noise)
            _set_units(squares[of], noise, most, units)
            _add_to(by_channel[of], units)
            by_token[of, number] = _total(units)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_noise(of_token, of_channel, rounding, expected, noise):
    for c in range(len(noise)):
        noise[c] = (of_token * of_channel[c] + rounding * expected[c]) / 2

"""The passes over a tap in which its noise is fitted, compiled: squared errors of a token stay in the processor's cache.

Everything is fp64. numba keeps compiled code until this file is edited and does not look at others, so what comes from
metrics.py is an argument (`Constants`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerproof.fingerprint import unrecorded
from layerproof.kernel import BF16_STEPS, numba  # which says where compiled code is kept
from layerproof.metrics import FLOAT32_MAX, R_MAX


class Constants(NamedTuple):
    """Not `kernel.Constants`: what only concerns comparisons is no reason to run the golden again."""

    largest_ratio: float = R_MAX
    largest: float = FLOAT32_MAX
    steps: np.ndarray = BF16_STEPS


class Block(NamedTuple):
    """Tokens of a tap: `numbers` int64 [tokens] and `kept` bool [tokens], whether to look at them; `truth` [tokens,
    features] and `draws` [draws, tokens, features] in one dtype, fp32 or fp64.
    """

    numbers: np.ndarray
    kept: np.ndarray
    truth: np.ndarray
    draws: np.ndarray


class Fit(NamedTuple):
    """What is summed over a tap's tokens [tokens] and channels [features]. Rows are the draws and, last, the rounding of the
    truth to bf16; fp64 where nothing else is said.

    token_counts: int64 [tokens], channel_counts: int64 [features]: elements that are finite in all
    token: [rows, tokens], channel: [rows, features]: means of squared errors, each in units of the other
    squares: [rows + 1]: sums of squared errors; the last is what is expected of the rounding
    """

    token_counts: np.ndarray
    channel_counts: np.ndarray
    token: np.ndarray
    channel: np.ndarray
    squares: np.ndarray

    @classmethod
    def zero(cls, draws: int, tokens: int, features: int) -> Fit:
        """Of nothing yet."""
        rows = draws + 1
        return cls(
            token_counts=np.zeros(tokens, np.int64),
            channel_counts=np.zeros(features, np.int64),
            token=np.zeros((rows, tokens)),
            channel=np.zeros((rows, features)),
            squares=np.zeros(rows + 1),
        )


def count(fit: Fit, expected: np.ndarray, block: Block) -> None:
    """Adds a block to the counts and to the sums of squares: in all, and by channel in `fit.channel`; what is expected of
    the rounding by channel to `expected` [features].
    """
    with unrecorded():  # the first call compiles, here and below
        _count(fit, expected, Constants(), block)


def balance(fit: Fit, following: np.ndarray, is_exact: bool, block: Block) -> None:
    """Sets `fit.token` of a block's tokens by `fit.channel`, and adds to `following` [rows, features] what, divided by the
    counts, is the next `fit.channel` by these tokens. If all draws are exact, their errors are taken to be those expected of
    a rounding.
    """
    with unrecorded():
        _balance(fit, following, fit.channel.mean(axis=0), is_exact, Constants(), block)


def in_units(
    fit: Fit, by_token: np.ndarray, by_channel: np.ndarray, rounding: float, is_exact: bool, block: Block
) -> None:
    """Sets `fit.token` as `balance` does, and adds to `by_token` [rows, tokens] and `by_channel` [rows, features] the sums
    of squared errors in units of the noise of the other rows; `rounding` is `Noise.rounding`.
    """
    channel = fit.channel.mean(axis=0)
    others = np.stack([np.delete(fit.channel, row, axis=0).mean(axis=0) for row in range(len(fit.channel))])
    with unrecorded():
        _in_units(fit, by_token, by_channel, channel, others, rounding, is_exact, Constants(), block)


@numba.njit(cache=True, error_model="numpy")
def _set_squares(block, row, constants, exact, squares, keep):
    """Squared errors [rows + 1, features] of a token, 0 where one of them is not finite, and how many are `keep`."""
    truth, draws = block.truth, block.draws
    bits = exact.view(np.int64)
    found = 0
    for c in range(len(exact)):
        exact[c] = truth[row, c]
        keep[c] = abs(exact[c]) <= constants.largest
    for draw in range(len(draws)):
        for c in range(len(exact)):
            keep[c] &= abs(draws[draw, row, c]) <= constants.largest
    for c in range(len(exact)):
        found += keep[c]
        exact[c] = exact[c] if keep[c] else 0.0
    for draw in range(len(draws)):
        for c in range(len(exact)):
            error = np.float64(draws[draw, row, c]) - exact[c] if keep[c] else 0.0
            squares[draw, c] = error * error
    for c in range(len(exact)):
        step = constants.steps[(bits[c] >> 52) & 0x7FF] if exact[c] != 0 else 0.0
        error = np.rint(exact[c] / step) * step - exact[c] if exact[c] != 0 else 0.0
        squares[len(draws), c] = error * error
        squares[len(draws) + 1, c] = step * step / 12
    return found


@numba.njit(cache=True, error_model="numpy")
def _relative(square, noise, most):
    """`metrics.relative` of one element."""
    if square > 0:
        units = square / noise
        return most if units > most else units  # NaN stays
    return 0.0


@numba.njit(cache=True, error_model="numpy")
def _count(fit, expected, constants, block):
    features, rows = len(fit.channel_counts), len(fit.channel)
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        fit.token_counts[block.numbers[row]] = _set_squares(block, row, constants, exact, squares, keep)
        for c in range(features):
            fit.channel_counts[c] += keep[c]
            expected[c] += _relative(squares[rows, c], 1.0, most)
        for of in range(rows + 1):
            total = 0.0
            for c in range(features):
                total += squares[of, c]
            fit.squares[of] += total
        for of in range(rows):
            for c in range(features):
                fit.channel[of, c] += _relative(squares[of, c], 1.0, most)


@numba.njit(cache=True, error_model="numpy")
def _set_token(fit, number, channel, is_exact, squares, most):
    """A token's factors by those of the channels, and their mean."""
    rows, features = fit.channel.shape
    mean = 0.0
    for of in range(rows):
        known = rows if is_exact else of
        total = 0.0
        for c in range(features):
            total += _relative(squares[known, c], channel[c], most)
        fit.token[of, number] = total / fit.token_counts[number]
        mean += fit.token[of, number] / rows
    return mean


@numba.njit(cache=True, error_model="numpy")
def _balance(fit, following, channel, is_exact, constants, block):
    rows, features = fit.channel.shape
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        _set_squares(block, row, constants, exact, squares, keep)
        mean = _set_token(fit, block.numbers[row], channel, is_exact, squares, most)
        for of in range(rows):
            known = rows if is_exact else of
            for c in range(features):
                following[of, c] += _relative(squares[known, c], mean, most)


@numba.njit(cache=True, error_model="numpy")
def _in_units(fit, by_token, by_channel, channel, others, rounding, is_exact, constants, block):
    rows, features = fit.channel.shape
    exact, squares, keep = np.empty(features), np.empty((rows + 1, features)), np.empty(features, np.bool_)
    most = constants.largest_ratio * constants.largest_ratio
    for row in range(len(block.numbers)):
        if not block.kept[row]:
            continue
        number = block.numbers[row]
        _set_squares(block, row, constants, exact, squares, keep)
        _set_token(fit, number, channel, is_exact, squares, most)
        for of in range(rows):
            other = 0.0  # summed, since a difference would lose small ones beside a large one
            for draw in range(rows):
                other += fit.token[draw, number] / (rows - 1) if draw != of else 0.0
            total = 0.0
            for c in range(features):
                noise = (other * others[of, c] + rounding * squares[rows, c]) / 2
                units = _relative(squares[of, c], noise, most)
                total += units
                by_channel[of, c] += units
            by_token[of, number] = total

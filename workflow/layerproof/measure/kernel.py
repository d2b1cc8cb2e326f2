"""All sums of a comparison over one block of a tap, in one compiled pass.

The pass reads each element once and keeps a token's numbers in the processor's cache; numpy would go through memory
some sixty times. All sums are fp64 and accumulate token by token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

if not os.access(Path(__file__).parent, os.W_OK):  # in a container: cache compiled code where jobs may write
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.cwd() / ".layerproof/numba"))

import numba

from layerproof.measure.groups import CLOSE_ABSOLUTE, CLOSE_RELATIVE, PATTERN_BINS, PATTERN_SHIFT, R_MAX
from layerproof.tensors.tensor import FLOAT32_MAX, bf16_ulp

SPREADS = ("abs", "rel", "port", "golden", "ulp")
"""Quantities whose distribution we collect.

In this order: |port - golden|, |port - golden| / |golden|, |port - truth|, |golden - truth|, and the number of
representable steps between port and golden.
"""
ABS, REL, PORT, GOLDEN, ULP = range(len(SPREADS))

LANES = 4
"""Counters per bin, used in turn: many errors are alike, and adding twice in a row to the same counter stalls."""

BF16_STEPS = bf16_ulp(np.ldexp(1.0, np.arange(2047) - 1023))
"""The bf16 step for each biased exponent of a finite fp64 number."""


class Constants(NamedTuple):
    """Constants of other modules, passed as arguments: numba does not recompile this file when those modules change."""

    close: tuple[float, float] = (CLOSE_ABSOLUTE, CLOSE_RELATIVE)
    largest_ratio: float = R_MAX
    largest: float = FLOAT32_MAX
    shift: int = PATTERN_SHIFT
    steps: np.ndarray = BF16_STEPS


class Sums(NamedTuple):
    """Sums over a tap's valid tokens [tokens] and its channels [features]; fp64 unless stated otherwise.

    counts: int64 [features], token_counts: int64 [tokens]: elements compared
    channels: [4, features], tokens: [4, tokens]: sums of `groups.error_squares`
    unit_channels: [features], unit_tokens: [tokens]: sums of the port's squared errors in units of the noise
    bins: int64 [5, PATTERN_BINS * LANES]: by SPREADS, counts over the top bits of fp32 patterns, LANES counters per bin
    spreads: [5, 4]: by SPREADS, the number of zeros, the sum, the smallest value above 0 and the largest
    moments: [6]: count, means of port and golden, and their centred second moments pp, pg, gg
    first: [2]: the first element of port and of golden; varied: int64 [2], how many elements differ from it
    totals: [3]: squares of the truth, squares of port - golden, number of close elements
    worst: [6]: the largest |port - truth|, then its token number, channel, port, golden and truth
    """

    counts: np.ndarray
    token_counts: np.ndarray
    channels: np.ndarray
    tokens: np.ndarray
    unit_channels: np.ndarray
    unit_tokens: np.ndarray
    bins: np.ndarray
    spreads: np.ndarray
    moments: np.ndarray
    first: np.ndarray
    varied: np.ndarray
    totals: np.ndarray
    worst: np.ndarray

    @classmethod
    def zero(cls, tokens: int, features: int) -> Sums:
        """Returns empty sums."""
        return cls(
            counts=np.zeros(features, np.int64),
            token_counts=np.zeros(tokens, np.int64),
            channels=np.zeros((4, features)),
            tokens=np.zeros((4, tokens)),
            unit_channels=np.zeros(features),
            unit_tokens=np.zeros(tokens),
            bins=np.zeros((len(SPREADS), PATTERN_BINS * LANES), np.int64),
            spreads=np.tile([0.0, 0.0, np.inf, 0.0], (len(SPREADS), 1)),
            moments=np.zeros(6),
            first=np.zeros(2),
            varied=np.zeros(2, np.int64),
            totals=np.zeros(3),
            worst=np.array([-1.0, 0, 0, 0, 0, 0]),
        )

    def spread(self, name: str) -> tuple[int, float, float, np.ndarray, np.ndarray]:
        """Returns the number of zeros, sum, maximum, used bins (0 first) and their counts for one of SPREADS."""
        spread = SPREADS.index(name)
        zeros, total, lowest, largest = self.spreads[spread].tolist()
        bounds = np.minimum([lowest, largest], FLOAT32_MAX).astype(np.float32).view(np.int32)
        start, end = np.maximum(bounds >> PATTERN_SHIFT, [1, 0])
        bins = self.bins[spread].reshape(-1, LANES)
        counts = bins[start : end + 1].sum(axis=1)
        used = np.flatnonzero(counts)
        return int(zeros), total, largest, np.append(0, used + start), np.append(bins[0].sum(), counts[used])

    def add(
        self,
        numbers: np.ndarray,
        kept: np.ndarray,
        values: Sequence[np.ndarray],
        patterns: Sequence[np.ndarray] | None,
        noise: tuple[np.ndarray, np.ndarray, float] | None,
    ) -> bool:
        """Adds a block of valid tokens and returns whether all of its elements are finite.

        `numbers` int64 [rows] are the token numbers; `kept` bool [rows] marks the tokens to compare. `values` are port,
        golden and truth [rows, features], each fp32, fp64, or uint16 with the bits of bf16. `patterns` are the bits of
        port and golden as signed integers of the same width, or None if their dtypes differ. `noise` is the noise of
        tokens [tokens], of channels [features], and of rounding.
        """
        token, channel, rounding = noise or (self.unit_tokens, self.unit_channels, 0.0)
        return _add(
            self,
            Constants(),
            np.ascontiguousarray(numbers, np.int64),
            np.ascontiguousarray(kept),
            tuple(np.ascontiguousarray(of) for of in values),
            tuple(of.dtype == np.uint16 for of in values),
            tuple(np.ascontiguousarray(of) for of in patterns or [np.zeros((0, 0), np.int16)] * 2),
            patterns is not None,
            (np.ascontiguousarray(token), np.ascontiguousarray(channel), float(rounding)),
            noise is not None,
        )


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add(sums, constants, numbers, kept, values, are_bits, patterns, has_patterns, noise, has_noise):
    """Does the work of `Sums.add`. Each loop below writes only one array, so the compiler can vectorise it."""
    rows, features = values[0].shape
    p, g, x = np.empty(features), np.empty(features), np.empty(features)
    keep = np.empty(features, np.bool_)
    squares, units = np.empty((4, features)), np.empty(features)
    errors = np.empty((len(SPREADS), features))
    single = np.empty(features, np.float32)
    all_finite = True
    whole = 0
    for row in range(rows):
        _set_values(values[0][row], are_bits[0], single, p)
        _set_values(values[1][row], are_bits[1], single, g)
        _set_values(values[2][row], are_bits[2], single, x)
        found = _set_finite(constants.largest, p, g, x, keep)
        all_finite &= found == features
        if not kept[row] or not found:
            continue
        number = numbers[row]
        sums.token_counts[number] = found
        whole += found == features
        if found < features:
            for c in range(features):
                sums.counts[c] += keep[c]
        _set_squares(constants.steps, p, g, x, squares[0], squares[1], squares[2], squares[3])
        for of in range(4):
            sums.tokens[of, number] = _add_to(sums.channels[of], squares[of])
        if has_noise:
            _set_units(constants, noise[0][number], noise[1], noise[2], squares[0], squares[3], units)
            sums.unit_tokens[number] = _add_to(sums.unit_channels, units)
        _set_errors(constants, p, g, x, errors[ABS], errors[REL], errors[PORT], errors[GOLDEN])
        if has_patterns:
            _set_steps(patterns[0][row], patterns[1][row], keep, errors[ULP])
        for spread in range(len(SPREADS) if has_patterns else ULP):
            _add_spread(sums.spreads[spread], sums.bins[spread], constants, errors[spread], features - found, single)
        if sums.spreads[PORT, 3] > sums.worst[0]:
            _set_worst(sums, number, p, g, x, keep, errors[PORT])
        _add_totals(sums, constants, g, x, errors[ABS], features - found)
        _add_moments(sums, p, g, keep, found)
    for c in range(features):
        sums.counts[c] += whole
    return all_finite


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_values(values, are_bits, single, exact):
    """Converts a token's elements to fp64; bf16 is the upper half of fp32."""
    if are_bits:
        patterns = single.view(np.uint32)
        for c in range(len(exact)):
            patterns[c] = np.uint32(values[c]) << np.uint32(16)
        for c in range(len(exact)):
            exact[c] = single[c]
    else:
        for c in range(len(exact)):
            exact[c] = values[c]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_finite(largest, p, g, x, keep):
    """Finds the elements that are finite in all three tensors and returns their number.

    The other elements become 0, which adds nothing to sums of errors.
    """
    found = 0
    for c in range(len(keep)):
        keep[c] = (abs(p[c]) <= largest) & (abs(g[c]) <= largest) & (abs(x[c]) <= largest)
    for c in range(len(keep)):
        found += keep[c]
    if found < len(keep):
        for c in range(len(keep)):
            if not keep[c]:
                p[c] = g[c] = x[c] = 0.0
    return found


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_squares(steps, p, g, x, of_port, of_golden, of_rounding, expected):
    """Computes `groups.error_squares` of a token."""
    patterns = x.view(np.int64)
    for c in range(len(x)):
        of_port[c] = (p[c] - x[c]) * (p[c] - x[c])
    for c in range(len(x)):
        of_golden[c] = (g[c] - x[c]) * (g[c] - x[c])
    for c in range(len(x)):
        expected[c] = steps[(patterns[c] >> 52) & 0x7FF]
    for c in range(len(x)):
        rounded = np.rint(x[c] / expected[c]) * expected[c] - x[c]  # for x = 0, the step of the smallest numbers
        of_rounding[c] = rounded * rounded
    for c in range(len(x)):
        expected[c] = expected[c] * expected[c] / 12 if x[c] != 0 else 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_units(constants, of_token, of_channel, rounding, squares, expected, units):
    """Computes a token's squared errors in units of the noise."""
    most = constants.largest_ratio * constants.largest_ratio
    for c in range(len(units)):
        unit = squares[c] / ((of_token * of_channel[c] + rounding * expected[c]) / 2)
        unit = most if unit > most else unit  # NaN stays
        units[c] = unit if squares[c] > 0 else 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_errors(constants, p, g, x, of_both, relative, of_port, of_golden):
    """Computes the SPREADS of a token, except the steps."""
    for c in range(len(p)):
        of_both[c] = abs(p[c] - g[c])
    for c in range(len(p)):
        # Where the golden is zero, any other value is entirely wrong: its relative error is 1.
        reference = abs(g[c]) if g[c] != 0 else abs(p[c])
        quotient = of_both[c] / reference if reference > 0 else 0.0
        relative[c] = quotient if quotient < constants.largest else constants.largest
    for c in range(len(p)):
        of_port[c] = abs(p[c] - x[c])
    for c in range(len(p)):
        of_golden[c] = abs(g[c] - x[c])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_steps(port, golden, keep, steps):
    """Counts the representable steps between port and golden from their bits.

    Neighbouring floats are one step apart; -0 and +0 are both 0.
    """
    lowest = np.int64(np.iinfo(port.dtype).min)
    for c in range(len(port)):
        a, b = np.int64(port[c]), np.int64(golden[c])
        a, b = a if a >= 0 else lowest - a, b if b >= 0 else lowest - b
        # unsigned, because two fp64 can be more than 2^63 steps apart
        apart = np.uint64(a) - np.uint64(b) if a > b else np.uint64(b) - np.uint64(a)
        steps[c] = np.float64(apart) if keep[c] else 0.0


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add_spread(spread, bins, constants, values, left_out, single):
    """Counts values by their fp32 patterns, using `single` as scratch space for the rounded values.

    `left_out` of the zeros stand for elements that are not compared, so the counts exclude them.
    """
    patterns = single.view(np.uint32)
    _look_through(values, spread)
    spread[0] -= left_out
    for c in range(len(values)):
        single[c] = min(values[c], constants.largest)
    # Unsigned, so that numba does not check each index for being negative.
    shift, lanes, in_turn = np.uint32(constants.shift), np.uint32(LANES), len(values) // LANES * LANES
    for start in range(0, in_turn, LANES):
        for lane in range(LANES):
            bins[(patterns[start + lane] >> shift) * lanes + np.uint32(lane)] += 1
    for c in range(in_turn, len(values)):
        bins[(patterns[c] >> shift) * lanes] += 1
    bins[0] -= left_out


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _look_through(values, spread):
    """Adds non-negative numbers to one of `Sums.spreads`.

    Non-negative floats sort like their bits, and the compiler can vectorise comparisons of integers.
    """
    patterns, bits = values.view(np.uint64), spread.view(np.uint64)
    zeros, total, lowest, largest = 0, 0.0, np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(0)
    for c in range(len(values)):
        zeros += patterns[c] == 0
        total += values[c]
        lowest = min(lowest, patterns[c] - np.uint64(1))  # 0 wraps to the largest integer
        largest = max(largest, patterns[c])
    spread[0] += zeros
    spread[1] += total
    if zeros < len(values):
        bits[2] = min(bits[2], lowest + np.uint64(1))
    bits[3] = max(bits[3], largest)


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _add_totals(sums, constants, g, x, differences, left_out):
    absolute, of_golden = constants.close
    truth_squares = difference_squares = 0.0
    close = 0
    for c in range(len(x)):
        truth_squares += x[c] * x[c]
        difference_squares += differences[c] * differences[c]
        close += differences[c] <= absolute + of_golden * abs(g[c])
    sums.totals[0] += truth_squares
    sums.totals[1] += difference_squares
    sums.totals[2] += close - left_out


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _set_worst(sums, number, p, g, x, keep, errors):
    largest = sums.spreads[PORT, 3]
    for c in range(len(errors)):
        if keep[c] and errors[c] == largest:
            sums.worst[0], sums.worst[1], sums.worst[2] = largest, number, c
            sums.worst[3], sums.worst[4], sums.worst[5] = p[c], g[c], x[c]
            return


@numba.njit(cache=True, nogil=True, error_model="numpy")
def _add_moments(sums, p, g, keep, found):
    """Merges a token's moments, centred within the token.

    Raw sums of squares would cancel where the mean is large compared with the spread.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    moments = sums.moments
    if moments[0] == 0:
        sums.first[0], sums.first[1] = p[np.argmax(keep)], g[np.argmax(keep)]
    port_total, golden_total, port_varied, golden_varied = _look_at_both(p, g, keep, sums.first[0], sums.first[1])
    sums.varied[0] += port_varied
    sums.varied[1] += golden_varied
    port_mean, golden_mean = port_total / found, golden_total / found
    pp, pg, gg = _centred(p, g, keep, port_mean, golden_mean)
    a, b, total = port_mean - moments[1], golden_mean - moments[2], moments[0] + found
    weight = moments[0] * (found / total)
    moments[0] = total
    moments[1] += a * (found / total)
    moments[2] += b * (found / total)
    moments[3] += pp + a * a * weight
    moments[4] += pg + a * b * weight
    moments[5] += gg + b * b * weight


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _add_to(totals, values):
    """Adds values to totals element by element and returns the sum of the values."""
    total = 0.0
    for c in range(len(values)):
        totals[c] += values[c]
        total += values[c]
    return total


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _look_at_both(p, g, keep, port_first, golden_first):
    """Returns the sums of a token's elements, and how many kept elements differ from the first one.

    Elements that are not kept are 0 already.
    """
    port_total = golden_total = 0.0
    port_varied = golden_varied = 0
    for c in range(len(keep)):
        port_total += p[c]
        golden_total += g[c]
        port_varied += (p[c] != port_first) & keep[c]
        golden_varied += (g[c] != golden_first) & keep[c]
    return port_total, golden_total, port_varied, golden_varied


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath={"reassoc"})
def _centred(p, g, keep, port_mean, golden_mean):
    """Returns the sums of squares and products of the kept elements, after subtracting the means."""
    pp = pg = gg = 0.0
    for c in range(len(p)):
        a = p[c] - port_mean if keep[c] else 0.0
        b = g[c] - golden_mean if keep[c] else 0.0
        pp += a * a
        pg += a * b
        gg += b * b
    return pp, pg, gg

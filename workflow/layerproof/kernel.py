"""All sums of a comparison over one block of a tap, in one compiled pass.

Elements are read once and each token's numbers stay in the processor's cache, where numpy would go through memory some
sixty times. Everything is fp64, summed token by token.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

if not os.access(Path(__file__).parent, os.W_OK):  # as in a container: compiled code is kept where jobs may write
    os.environ.setdefault("NUMBA_CACHE_DIR", str(Path.cwd() / ".layerproof/numba"))

import numba

from layerproof.fingerprint import unrecorded
from layerproof.metrics import CLOSE_ABSOLUTE, CLOSE_RELATIVE, FLOAT32_MAX, PATTERN_BINS, PATTERN_SHIFT, R_MAX, bf16_ulp

SPREADS = ("abs", "rel", "port", "golden", "ulp")
"""Numbers whose spread is gathered: |port - golden|, that relative to the golden, |port - truth|, |golden - truth| and the
steps between port and golden.
"""
ABS, REL, PORT, GOLDEN, ULP = range(len(SPREADS))

BF16_STEPS = bf16_ulp(np.ldexp(1.0, np.arange(2047) - 1023))
"""The step of bf16 by the biased exponent of a finite fp64 number."""


class Constants(NamedTuple):
    """Those of metrics.py: numba would keep compiled code with the old ones after an edit there, were they not arguments."""

    close: tuple[float, float] = (CLOSE_ABSOLUTE, CLOSE_RELATIVE)
    largest_ratio: float = R_MAX
    largest: float = FLOAT32_MAX
    shift: int = PATTERN_SHIFT
    steps: np.ndarray = BF16_STEPS


class Sums(NamedTuple):
    """What is summed over a tap's valid tokens [tokens] and its channels [features]; fp64 where nothing else is said.

    counts: int64 [features], token_counts: int64 [tokens]: elements compared
    channels: [4, features], tokens: [4, tokens]: sums of the squares of `metrics.error_squares`
    unit_channels: [features], unit_tokens: [tokens]: sums of the port's squared errors in units of the noise
    bins: int64 [5, PATTERN_BINS]: by SPREADS, counts over the top bits of fp32 patterns
    spreads: [5, 3]: by SPREADS, how many are zero, their sum and the largest
    moments: [6]: count, means of port and golden, and their centred second moments pp, pg, gg
    ranges: [2, 2]: smallest and largest of port and of golden
    totals: [3]: squares of the truth, squares of port - golden, elements that are close
    worst: [6]: the largest |port - truth|; number of its token, channel, port, golden and truth
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
    ranges: np.ndarray
    totals: np.ndarray
    worst: np.ndarray

    @classmethod
    def zero(cls, tokens: int, features: int) -> Sums:
        """Of nothing yet."""
        return cls(
            counts=np.zeros(features, np.int64),
            token_counts=np.zeros(tokens, np.int64),
            channels=np.zeros((4, features)),
            tokens=np.zeros((4, tokens)),
            unit_channels=np.zeros(features),
            unit_tokens=np.zeros(tokens),
            bins=np.zeros((len(SPREADS), PATTERN_BINS), np.int64),
            spreads=np.zeros((len(SPREADS), 3)),
            moments=np.zeros(6),
            ranges=np.array([[np.inf, -np.inf]] * 2),
            totals=np.zeros(3),
            worst=np.array([-1.0, 0, 0, 0, 0, 0]),
        )

    def spread(self, name: str) -> tuple[int, float, float, np.ndarray]:
        """Of one of SPREADS how many are zero, their sum, the largest, and their bins."""
        kind = SPREADS.index(name)
        zeros, total, largest = self.spreads[kind].tolist()
        return int(zeros), total, largest, self.bins[kind]

    def add(
        self,
        numbers: np.ndarray,
        kept: np.ndarray,
        values: Sequence[np.ndarray],
        patterns: Sequence[np.ndarray] | None,
        noise: tuple[np.ndarray, np.ndarray, float] | None,
    ) -> bool:
        """Adds a block of valid tokens, and returns whether all of its elements are finite.

        `numbers` int64 [rows] are the tokens' numbers, `kept` bool [rows] those to compare. `values` are port, golden and
        truth, fp32 or fp64 [rows, features]; `patterns` the bits of port and golden as signed integers of their width,
        None if their dtypes differ; `noise` is that of tokens [tokens], of channels [features] and of rounding.
        """
        wide = np.float64 if any(of.dtype == np.float64 for of in values) else np.float32
        token, channel, rounding = noise or (self.unit_tokens, self.unit_channels, 0.0)
        with unrecorded():  # the first call compiles
            return _add(
                self,
                Constants(),
                np.ascontiguousarray(numbers, np.int64),
                np.ascontiguousarray(kept),
                tuple(np.ascontiguousarray(of, wide) for of in values),
                tuple(np.ascontiguousarray(of) for of in patterns or [np.zeros((0, 0), np.int16)] * 2),
                patterns is not None,
                (np.ascontiguousarray(token), np.ascontiguousarray(channel), float(rounding)),
                noise is not None,
            )


@numba.njit(cache=True, error_model="numpy")
def _add(sums, constants, numbers, kept, values, patterns, has_patterns, noise, has_noise):
    """`Sums.add`."""
    port, golden, truth = values
    largest = constants.largest
    rows, features = port.shape
    p, g, x = np.empty(features), np.empty(features), np.empty(features)
    exponents = x.view(np.int64)
    keep = np.empty(features, np.bool_)
    errors = np.zeros((len(SPREADS), features))
    single = np.zeros(features, np.float32)
    all_finite = True
    for row in range(rows):
        found = 0
        for c in range(features):
            p[c], g[c], x[c] = port[row, c], golden[row, c], truth[row, c]
            keep[c] = abs(p[c]) <= largest and abs(g[c]) <= largest and abs(x[c]) <= largest
            found += keep[c]
        all_finite &= found == features
        if not kept[row] or not found:
            continue
        sums.token_counts[numbers[row]] = found
        _add_groups(sums, constants, numbers[row], p, g, x, exponents, keep, noise, has_noise)
        _add_elements(sums, constants, numbers[row], p, g, x, keep, errors)
        if has_patterns:
            _set_steps(patterns[0][row], patterns[1][row], errors[ULP])
        for kind in range(len(SPREADS) if has_patterns else ULP):
            _add_spread(sums, constants, kind, errors[kind], keep, single, single.view(np.int32))
        _add_moments(sums, p, g, keep, found)
    return all_finite


@numba.njit(cache=True, error_model="numpy")
def _add_groups(sums, constants, number, p, g, x, exponents, keep, noise, has_noise):
    """Squared errors of a token by channel and in all, also in units of the noise."""
    noise_of_token, noise_of_channel, rounding = noise[0][number], noise[1], noise[2]
    most = constants.largest_ratio * constants.largest_ratio
    of_port = of_golden = of_rounding = of_expected = in_units = 0.0
    for c in range(len(p)):
        if not keep[c]:
            continue
        port, golden = (p[c] - x[c]) * (p[c] - x[c]), (g[c] - x[c]) * (g[c] - x[c])
        step = constants.steps[(exponents[c] >> 52) & 0x7FF] if x[c] != 0 else 0.0
        rounded = np.rint(x[c] / step) * step - x[c] if x[c] != 0 else 0.0
        rounded, expected = rounded * rounded, step * step / 12
        sums.counts[c] += 1
        sums.channels[0, c] += port
        sums.channels[1, c] += golden
        sums.channels[2, c] += rounded
        sums.channels[3, c] += expected
        of_port += port
        of_golden += golden
        of_rounding += rounded
        of_expected += expected
        if has_noise and port > 0:
            units = port / ((noise_of_token * noise_of_channel[c] + rounding * expected) / 2)
            units = most if units > most else units  # NaN stays
            sums.unit_channels[c] += units
            in_units += units
    sums.tokens[0, number] = of_port
    sums.tokens[1, number] = of_golden
    sums.tokens[2, number] = of_rounding
    sums.tokens[3, number] = of_expected
    if has_noise:
        sums.unit_tokens[number] = in_units


@numba.njit(cache=True, error_model="numpy")
def _add_elements(sums, constants, number, p, g, x, keep, errors):
    """Errors of a token's elements; those of which the spread is wanted are left in `errors`."""
    absolute, of_golden = constants.close
    truth_squares = difference_squares = 0.0
    close = 0
    for c in range(len(p)):
        if not keep[c]:
            continue
        difference, magnitude = abs(p[c] - g[c]), abs(g[c])
        # Where the golden is zero any other value is wholly wrong: divided by itself, it counts 1.
        reference = magnitude if magnitude > 0 else abs(p[c])
        errors[ABS, c] = difference
        errors[REL, c] = min(difference / reference, constants.largest) if reference > 0 else 0.0
        errors[PORT, c], errors[GOLDEN, c] = abs(p[c] - x[c]), abs(g[c] - x[c])
        truth_squares += x[c] * x[c]
        difference_squares += difference * difference
        close += difference <= absolute + of_golden * magnitude
        if errors[PORT, c] > sums.worst[0]:
            sums.worst[0], sums.worst[1], sums.worst[2] = errors[PORT, c], number, c
            sums.worst[3], sums.worst[4], sums.worst[5] = p[c], g[c], x[c]
        for side, value in ((0, p[c]), (1, g[c])):
            sums.ranges[side, 0] = min(sums.ranges[side, 0], value)
            sums.ranges[side, 1] = max(sums.ranges[side, 1], value)
    sums.totals[0] += truth_squares
    sums.totals[1] += difference_squares
    sums.totals[2] += close


@numba.njit(cache=True, error_model="numpy")
def _set_steps(port, golden, steps):
    """Steps between floats by their patterns: in the order of values neighbours are one apart, -0 and +0 are both 0."""
    lowest = np.int64(np.iinfo(port.dtype).min)
    for c in range(len(port)):
        a, b = np.int64(port[c]), np.int64(golden[c])
        a, b = a if a >= 0 else lowest - a, b if b >= 0 else lowest - b
        # unsigned, since two fp64 can be more than 2^63 steps apart
        steps[c] = np.float64(np.uint64(a) - np.uint64(b) if a > b else np.uint64(b) - np.uint64(a))


@numba.njit(cache=True, error_model="numpy")
def _add_spread(sums, constants, kind, values, keep, single, patterns):
    """Counts values by their fp32 patterns; `patterns` are the bits of `single`, in which they are rounded."""
    spread, bins = sums.spreads[kind], sums.bins[kind]
    zeros, total, largest = 0, 0.0, spread[2]
    for c in range(len(values)):
        if keep[c]:
            single[c] = min(values[c], constants.largest)
            zeros += values[c] == 0
            total += values[c]
            largest = max(largest, values[c])
    for c in range(len(values)):
        if keep[c]:
            bins[patterns[c] >> constants.shift] += 1
    spread[0] += zeros
    spread[1] += total
    spread[2] = largest


@numba.njit(cache=True, error_model="numpy")
def _add_moments(sums, p, g, keep, found):
    """Centred within each token, since raw sums of squares cancel where the mean is large against the spread.

    Source: Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for computing sample variances, 1979.
    """
    port_mean = golden_mean = pp = pg = gg = 0.0
    for c in range(len(p)):
        if keep[c]:
            port_mean += p[c]
            golden_mean += g[c]
    port_mean, golden_mean = port_mean / found, golden_mean / found
    for c in range(len(p)):
        if keep[c]:
            a, b = p[c] - port_mean, g[c] - golden_mean
            pp += a * a
            pg += a * b
            gg += b * b
    moments = sums.moments
    a, b, total = port_mean - moments[1], golden_mean - moments[2], moments[0] + found
    weight = moments[0] * (found / total)
    moments[0] = total
    moments[1] += a * (found / total)
    moments[2] += b * (found / total)
    moments[3] += pp + a * a * weight
    moments[4] += pg + a * b * weight
    moments[5] += gg + b * b * weight

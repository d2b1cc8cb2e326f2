"""How far legitimate variants of the golden are from the truth: the noise that we compare a port's error with.

The golden, its variants (variants.py) and the truth rounded to bf16 are draws of the same noise. The model of its
squared error at token t and channel c is the mean of two terms. The first is token[t] * channel[c]: a massive channel
does not hide the other channels of a token, and a massive token does not hide the other tokens of a channel. The second
depends on the size of the number alone, because a few draws of a few numbers may all be small by chance.

R of a group (a token, a head, a block of channels, the tokens of an expert) is the rms of its errors in units of this
noise. The band of a type of group is the largest R that any draw reaches against the noise of the others, over all
groups of that type. So the band allows for the number of groups, whatever the distribution of the errors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from layerproof.measure.groups import by_expert, groups_of, relative, unit_ratio
from layerproof.measure.routing import AFTER_ROUTER, CHOICE, choice_flips, choices_of_taps, experts_chosen, reached
from layerproof.taps import Fed
from layerproof.tensors.tensor import CHUNK_ELEMENTS, Tensor, blocks, is_finite, is_same, token_numbers
from layerproof.threads import mapped

if TYPE_CHECKING:
    from layerproof.measure.noise_kernel import Block, Fit

BALANCING = 3
"""Rounds of fitting token and channel factors, at least 2; two or three make the fit accurate to a percent."""

SILENT = 2.0**-5
"""A single number as large as the noise, in a block of 128 numbers, then stays below four times the noise of the block."""

FEW = 4
"""Numbers of a token or channel that are too few to tell its noise: at one token of a thousand, the mean square of 4 is
below a fortieth of the expected one (chi-squared with 4 degrees of freedom), that of 16 a quarter."""


@dataclass(frozen=True)
class Noise:
    """Noise of one tap of floats.

    `compared`, bool [batch, seq], marks the tokens that the noise was measured on. The squared error of a draw is about
    half of `token` [batch, seq] times `channel` [features], plus half of `rounding` times the expected squared error of
    rounding to bf16. These are fp64, and NaN where nothing was compared. `band` is the largest R of a draw, at least 1:
    `weighted` for all elements in units of their noise, and `token`, `block`, `head` and `expert` for groups. All bands
    are 1 if the golden has no variants.
    """

    compared: np.ndarray
    token: np.ndarray
    channel: np.ndarray
    rounding: float
    band: Mapping[str, float]

    def units(self, squares: np.ndarray, expected: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Returns squared errors [tokens, features] in units of the noise, at tokens with the numbers in `where`.

        `expected` are the expected squared errors of rounding the truth at these tokens to bf16.
        """
        return relative(squares, _model(self.token.reshape(-1)[where], self.channel, self.rounding * expected))


def _model(token: np.ndarray, channel: np.ndarray, rounding: np.ndarray) -> np.ndarray:
    return (token[:, None] * channel + rounding) / 2


def noise_of_taps(
    golden: Mapping[str, Tensor],
    variants: Sequence[Mapping[str, Tensor]],
    truth: Mapping[str, Tensor],
    valid: np.ndarray,
    fed: Sequence[Fed] = (),
) -> dict[str, Noise]:
    """Measures the noise of every tap of floats; `fed` says what feeds each tap.

    Taps after a choice, such as that of the router, leave out tokens for which the golden or a variant chooses
    otherwise than the truth: a flip is not noise, and `routing` distinguishes it from a mistake. Taps are measured on
    the declared threads.
    """
    draws = [golden, *variants]
    before = choices_of_taps(list(golden), fed)
    flipped = {
        choice: np.logical_or.reduce([choice_flips(draw, truth, choice) for draw in draws])
        for choice in dict.fromkeys(choice for of in before.values() for choice in of)
    }
    reach = {one.name: one.reach for one in fed}
    experts = experts_chosen(truth) if CHOICE in truth else None

    def of_tap(name: str) -> Noise:
        left_out = np.logical_or.reduce([np.zeros_like(valid), *(flipped[choice] for choice in before[name])])
        left_out = reached(left_out, reach.get(name, 0))
        compared = valid & ~left_out
        return measure(
            _distinct([draw[name] for draw in draws], compared),
            truth[name],
            compared,
            experts if name in AFTER_ROUTER else None,
        )

    names = [name for name in golden if golden[name].dtype_class == "float"]
    return dict(zip(names, mapped(of_tap, names), strict=True))


def _distinct(draws: Sequence[Tensor], compared: np.ndarray) -> list[Tensor]:
    """Returns the draws that are not copies of earlier ones and are finite wherever the golden, the first draw, is.

    A variant that changes only attention, for example, copies the norm before it. A variant that overflows is not a
    legitimate variant.
    """
    kept = [draws[0]]
    for draw in draws[1:]:
        if not any(is_same(draw, earlier) for earlier in kept) and _as_finite(draw, draws[0], compared):
            kept.append(draw)
    return kept


def _as_finite(draw: Tensor, golden: Tensor, compared: np.ndarray) -> bool:
    """Whether a draw is finite wherever the golden is, at the tokens that are compared."""
    for piece in blocks(golden.shape, CHUNK_ELEMENTS):
        mine = is_finite(draw.floats(draw.read(*piece))) | ~compared[piece].reshape(-1, 1)
        if not mine.all() and (is_finite(golden.floats(golden.read(*piece))) & ~mine).any():
            return False
    return True


def measure(draws: Sequence[Tensor], truth: Tensor, compared: np.ndarray, experts: np.ndarray | None = None) -> Noise:
    """Measures the noise of a tap from the golden, which is the first draw, and its variants.

    Draws and truth have shape [batch, seq, features...]. `compared`, bool [batch, seq], marks the tokens to measure;
    `experts`, bool [batch, seq, experts], marks the experts that each token goes to. Elements that are not finite in
    all draws and the truth do not count.
    """
    from layerproof.measure import noise_kernel

    tap = _Tap(draws, truth, compared)
    features = math.prod(truth.shape[2:])
    fit, expected = noise_kernel.Fit.zero(len(draws), compared.size, features, FEW), np.zeros(features)
    for block in tap.blocks():
        noise_kernel.count(fit, expected, block)
    is_exact = not fit.squares[:-1].any()
    rounding = 1.0 if is_exact or not fit.squares[-1] else float(fit.squares[:-1].mean() / fit.squares[-1])
    by_token, by_channel = np.zeros_like(fit.token), np.zeros_like(fit.channel)
    with np.errstate(invalid="ignore", divide="ignore"):
        following = np.broadcast_to(expected, fit.channel.shape) if is_exact else fit.channel
        fit = fit._replace(channel=following / fit.channel_counts)
        for _ in range(BALANCING - 1):
            following = np.zeros_like(fit.channel)
            for block in tap.blocks():
                noise_kernel.balance(fit, following, is_exact, block)
            fit = fit._replace(channel=following / fit.channel_counts)
        if not is_exact:
            different = (~np.isnan(fit.seen)).sum(axis=0)
            numbers = np.where(different < FEW, different, fit.inexact_counts)
            fit = fit._replace(channel=_not_quiet(_not_silent(fit.channel), numbers))
            per_token = fit.inexact_counts.sum() / (fit.token_counts > 0).sum()
            if per_token < FEW:  # as a router's weights, of which most are 0
                fit = _steadied(fit, per_token)
        for block in tap.blocks():
            noise_kernel.in_units(fit, by_token, by_channel, rounding, is_exact, block)
    fit.token[:, fit.token_counts == 0] = np.nan
    groups = {
        "weighted": (by_token.sum(axis=1, keepdims=True), fit.token_counts.sum(keepdims=True)),
        "token": (by_token, fit.token_counts),
        **groups_of(by_channel, fit.channel_counts, truth.shape),
        **({} if experts is None else {"expert": by_expert(by_token, fit.token_counts, experts)}),
    }
    # A single draw, as for a lookup, has no other draws to compare with: its band is 1.
    band = {
        group: max(_worst(unit_ratio(row[None], count)) for row in sums) if len(draws) > 1 else 1.0
        for group, (sums, count) in groups.items()
    }
    token, channel = fit.token.mean(axis=0).reshape(compared.shape), fit.channel.mean(axis=0)
    return Noise(compared, token, channel, rounding, {group: max(1.0, R) for group, R in band.items()})


def _steadied(fit: Fit, numbers: float) -> Fit:
    """Moves what is fitted to tokens, of so many numbers each, towards the typical token, as if `FEW` more were known.

    A few numbers may all be small by chance, and the next one is not.
    """
    typical = _typical(np.nanmedian(np.where(fit.token_counts > 0, fit.token, np.nan), axis=1), numbers)
    known = len(fit.token) * numbers
    return fit._replace(share=known / (known + FEW), prior=typical * FEW / (known + FEW))


def _not_silent(channel: np.ndarray) -> np.ndarray:
    """Gives channels [rows, features] that are zero in all draws but one a noise of `SILENT` of that of the median channel.

    Behind a threshold, such as that of a ReLU, all draws may be zero by chance, and the next one is not.
    """
    mean = channel.mean(axis=0)
    is_silent = (channel[-1] == 0) & ((channel > 0).sum(axis=0) <= 1) & ~np.isnan(mean)
    if is_silent.all() or not is_silent.any():
        return channel
    return np.where(is_silent, np.maximum(channel, SILENT**2 * np.median(mean[mean > 0])), channel)


def _not_quiet(channel: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Raises channels [rows, features] of a few different `numbers` towards the typical one of those that have more.

    A few numbers may all be small by chance, as the weights of an expert that two tokens choose. The typical channel counts
    as `FEW` further ones. If all channels have few, as of a prompt that repeats one token, it is the typical one of all.
    """
    has_few, others = (numbers > 0) & (numbers < FEW), numbers >= FEW
    if not has_few.any():
        return channel
    known = others if others.any() else has_few
    typical = _typical(np.median(channel[:, known], axis=1, keepdims=True), float(np.median(numbers[known])))
    raised = (numbers * channel + FEW * typical) / (numbers + FEW)
    return np.where(has_few, np.maximum(channel, raised), channel)


def _typical(median: np.ndarray, numbers: float) -> np.ndarray:
    """The mean of chi-squared distributions of so many numbers, given their median (Wilson and Hilferty, PNAS 17, 1931)."""
    return median / (1 - 2 / 9 / max(numbers, 1)) ** 3


def _worst(ratios: np.ndarray) -> float:
    return 1.0 if np.isnan(ratios).all() else float(np.nanmax(ratios))


@dataclass(frozen=True)
class _Tap:
    """The draws of a tap and their truth; every pass reads them again, block by block."""

    draws: Sequence[Tensor]
    truth: Tensor
    compared: np.ndarray

    def blocks(self) -> Iterator[Block]:
        from layerproof.measure.noise_kernel import Block

        for rows, columns in blocks(self.truth.shape, CHUNK_ELEMENTS):
            are_bits = {draw.dtype for draw in self.draws} == {"bfloat16"}
            draws = np.stack(
                [
                    draw.read(rows, columns) if are_bits else draw.as_numpy(draw.read(rows, columns))
                    for draw in self.draws
                ]
            )
            yield Block(
                np.ascontiguousarray(token_numbers(rows, columns, self.compared.shape[1]), np.int64),
                self.compared[rows, columns].reshape(-1),
                np.ascontiguousarray(_wide(self.truth.as_numpy(self.truth.read(rows, columns)))),
                draws if are_bits else _wide(draws),
                are_bits,
            )


def _wide(values: np.ndarray) -> np.ndarray:
    """Converts fp16 to fp32, because numba cannot compile fp16."""
    return values.astype(np.float32) if values.dtype == np.float16 else values

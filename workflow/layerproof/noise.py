"""How far legitimate variants of the golden are from the truth: the noise that a port's error is held against.

The golden, its variants (variants.py) and the truth rounded to bf16 are so many draws of one noise. Its squared error at
token t and channel c is modelled as half of token[t] * channel[c], so that neither a massive channel hides the others of a
token nor a massive token the others of a channel, and half of what the size of the number tells, since a few draws of a few
numbers may all be small by chance. A group of elements - a token, a head, a block of channels, the tokens of an expert -
has as its R the rms of its errors in units of this noise. The largest R that any of the draws reaches against the noise of
the others, over all groups of a kind, is the band of that kind: it allows for the number of groups that are looked at,
whatever the distribution of the errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerproof.metrics import (
    CHUNK_ELEMENTS,
    Tensor,
    blocks,
    by_expert,
    groups_of,
    is_finite,
    relative,
    rounding_squares,
    token_numbers,
    unit_ratio,
)
from layerproof.routing import AFTER_ROUTER, experts_chosen, flips

CHOICE = "router.choice"
BALANCING = 3
"""Rounds of fitting token and channel factors to each other; the fit is good to a percent after two or three."""


@dataclass(frozen=True)
class Noise:
    """Noise of one tap of floats.

    `compared` is bool [batch, seq], the tokens that it is of. The squared error of a draw is about half of `token` [batch,
    seq] times `channel` [features], plus half of `rounding` times that of a rounding to bf16; fp64, NaN where nothing
    was compared. `band` has the largest R of a draw, at least 1: as `weighted` of all elements in units of their noise, and
    of the groups `token`, `block`, `head` and `expert`. All are 1 if the golden has no variants.
    """

    compared: np.ndarray
    token: np.ndarray
    channel: np.ndarray
    rounding: float
    band: Mapping[str, float]

    def units(self, squares: np.ndarray, expected: np.ndarray, where: np.ndarray) -> np.ndarray:
        """Squared errors [tokens, features] in units of the noise, at tokens with these numbers.

        `expected` are the squared errors of rounding the truth there to bf16, as expected.
        """
        return relative(squares, _model(self.token.reshape(-1)[where], self.channel, self.rounding * expected))


def _model(token: np.ndarray, channel: np.ndarray, rounding: np.ndarray) -> np.ndarray:
    return (token[:, None] * channel + rounding) / 2


def noise_of_taps(
    golden: Mapping[str, Tensor],
    variants: Sequence[Mapping[str, Tensor]],
    truth: Mapping[str, Tensor],
    valid: np.ndarray,
) -> dict[str, Noise]:
    """Noise of every tap of floats. Tokens whose experts a variant or the golden chooses otherwise than the truth are left
    out of the taps after the router: a flip is no noise, and `routing` tells it from a mistake.
    """
    draws = [golden, *variants]
    flipped = np.zeros_like(valid)
    experts = None
    if CHOICE in truth:
        flipped = np.logical_or.reduce([flips(draw[CHOICE], truth[CHOICE]) for draw in draws])
        experts = experts_chosen(truth)
    return {
        name: measure(
            _distinct([draw[name] for draw in draws]),
            truth[name],
            valid & ~flipped if name in AFTER_ROUTER else valid,
            experts if name in AFTER_ROUTER else None,
        )
        for name in golden
        if golden[name].kind == "float"
    }


def _distinct(draws: Sequence[Tensor]) -> list[Tensor]:
    """The draws that are no copy of one before, as a norm's are where only the attention differs, and that are finite
    where the first one, the golden, is: a variant that overflows is none.
    """
    kept = [draws[0]]
    for draw in draws[1:]:
        if not any(np.array_equal(draw.data[...], earlier.data[...]) for earlier in kept) and _as_finite(
            draw, draws[0]
        ):
            kept.append(draw)
    return kept


def _as_finite(draw: Tensor, golden: Tensor) -> bool:
    parts = ((one.floats(one.read(*block)) for one in (draw, golden)) for block in blocks(golden.shape, CHUNK_ELEMENTS))
    return all((is_finite(mine) | ~is_finite(its)).all() for mine, its in parts)


def measure(draws: Sequence[Tensor], truth: Tensor, compared: np.ndarray, experts: np.ndarray | None = None) -> Noise:
    """The noise of a tap from the golden, which is the first draw, and its variants.

    All have shape [batch, seq, features...]; `compared` is bool [batch, seq], the tokens to look at; `experts` bool
    [batch, seq, experts], which token goes to which. Elements that are not finite in all of them are left out.
    """
    errors = _Errors(draws, truth, compared)
    token_count, channel_count, squares = errors.counts()
    rounding = float(squares[:-1].mean() / squares[-1]) if squares[:-1].any() and squares[-1] else 1.0
    token, channel = np.ones((1, len(token_count))), np.ones((1, len(channel_count)))
    with np.errstate(invalid="ignore", divide="ignore"):
        for _ in range(BALANCING):
            channel = errors.by_channel(token.mean(axis=0)) / channel_count
            token = errors.by_token(channel.mean(axis=0)) / token_count
    pooled = token.mean(axis=0).reshape(compared.shape), channel.mean(axis=0)
    in_tokens, in_channels = errors.in_units(token, channel, rounding)
    kinds = {
        "weighted": (in_tokens.sum(axis=1, keepdims=True), token_count.sum(keepdims=True)),
        "token": (in_tokens, token_count),
        **groups_of(in_channels, channel_count, truth.shape),
        **({} if experts is None else {"expert": by_expert(in_tokens, token_count, experts)}),
    }
    # A draw alone, such as a lookup, shows nothing of the others: its band is 1.
    band = {
        kind: max(_worst(unit_ratio(row[None], count)) for row in sums) if len(draws) > 1 else 1.0
        for kind, (sums, count) in kinds.items()
    }
    return Noise(compared, *pooled, rounding, {kind: max(1.0, R) for kind, R in band.items()})


def _worst(ratios: np.ndarray) -> float:
    return 1.0 if np.isnan(ratios).all() else float(np.nanmax(ratios))


class _Errors:
    """Squared errors of the draws, read block by block as often as they are needed."""

    def __init__(self, draws: Sequence[Tensor], truth: Tensor, compared: np.ndarray) -> None:
        self.draws, self.truth, self.compared = draws, truth, compared
        self.features = int(np.prod(truth.shape[2:]))
        self.is_exact = False

    def blocks(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Token numbers [tokens], which elements count [tokens, features], and squared errors [rows, tokens, features].

        Rows are the draws, the rounding of the truth to bf16, and what is expected of a rounding.
        """
        for rows, columns in blocks(self.truth.shape, CHUNK_ELEMENTS):
            exact = self.truth.floats(self.truth.read(rows, columns))
            values = [draw.floats(draw.read(rows, columns)) for draw in self.draws]
            keep = np.logical_and.reduce([is_finite(of) for of in (exact, *values)])
            keep &= self.compared[rows, columns].reshape(-1)[:, None]
            exact[~keep] = 0.0
            squares = [np.square(np.where(keep, of, 0.0) - exact) for of in values]
            yield (
                token_numbers(rows, columns, self.compared.shape[1]),
                keep,
                np.stack((*squares, *rounding_squares(exact))),
            )

    def counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Elements compared by token and by channel, and the sum of squares of each row."""
        token_count, channel_count = np.zeros(self.compared.size), np.zeros(self.features)
        sums = np.zeros(len(self.draws) + 2)
        for where, keep, squares in self.blocks():
            token_count[where] = keep.sum(axis=1)
            channel_count += keep.sum(axis=0)
            sums += squares.sum(axis=(1, 2))
        self.is_exact = not sums[:-1].any()
        return token_count, channel_count, sums

    def by_channel(self, token: np.ndarray) -> np.ndarray:
        """Sums over the tokens of squared errors in units of `token`: [draws and rounding, features]."""
        sums = np.zeros((len(self.draws) + 1, self.features))
        for where, _, squares in self.blocks():
            sums += relative(self._known(squares), token[where, None]).sum(axis=1)
        return sums

    def by_token(self, channel: np.ndarray) -> np.ndarray:
        """Sums over the features of squared errors in units of `channel`: [draws and rounding, tokens]."""
        sums = np.zeros((len(self.draws) + 1, self.compared.size))
        for where, _, squares in self.blocks():
            sums[:, where] = relative(self._known(squares), channel).sum(axis=2)
        return sums

    def in_units(self, token: np.ndarray, channel: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray]:
        """Sums of squared errors in units of the noise of the others, by token and by channel: [draws and rounding, ...]."""
        rows = range(len(self.draws) + 1)
        others = [np.arange(len(rows)) != row for row in rows]
        of_token, of_channel = ([factor[of].mean(axis=0) for of in others] for factor in (token, channel))
        by_token = np.zeros((len(rows), self.compared.size))
        by_channel = np.zeros((len(rows), self.features))
        for where, _, squares in self.blocks():
            for row in rows:
                units = relative(squares[row], _model(of_token[row][where], of_channel[row], rounding * squares[-1]))
                by_token[row, where] = units.sum(axis=1)
                by_channel[row] += units.sum(axis=0)
        return by_token, by_channel

    def _known(self, squares: np.ndarray) -> np.ndarray:
        """Rows of the draws and of the rounding; of a lookup, which is exact, what is expected of a rounding."""
        return np.broadcast_to(squares[-1], squares[:-1].shape) if self.is_exact else squares[:-1]

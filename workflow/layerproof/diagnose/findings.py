"""Where the error of a tap is, in sentences, for mistakes that the dictionary does not know.

The squared errors of the port, in units of the noise, are summed over the groups that mistakes affect: prompts,
positions, heads, halves of a head, channels, shards, experts. If a few groups of one type contain all of the error,
that makes a sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerproof.measure.groups import relative, rounding_squares
from layerproof.measure.noise import Noise
from layerproof.measure.rule import GROUP_LIMIT
from layerproof.tensors.tensor import Tensor, is_finite

SHARDS = (2, 4, 8, 16)
FEW = 8
"""Up to this many groups, a sentence names each of them."""
GROWS = 4.0
"""An error grows if R in the last quarter of the positions is more than this many times R in the first."""
MOST = 3


@dataclass(frozen=True)
class _Errors:
    """Squared errors of the valid tokens in units of the noise [tokens, features], and where these tokens are."""

    units: np.ndarray
    prompt: np.ndarray
    position: np.ndarray
    last: np.ndarray
    limit: float

    def where_wrong(self) -> _Errors:
        """The errors of the wrong tokens only, unless all tokens are wrong or none is."""
        tokens, wrong = self.wrong(np.arange(len(self.units)), 0)
        if not 0 < len(wrong) < len(tokens):
            return self
        return replace(
            self,
            units=self.units[wrong],
            **{name: getattr(self, name)[wrong] for name in ("prompt", "position", "last")},
        )

    def wrong(self, groups: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """All groups, and those whose R exceeds the limit; `groups` numbers tokens (axis 0) or features (axis 1)."""
        sums = self.units.mean(axis=1 - axis)
        names, of = np.unique(groups, return_inverse=True)
        squares = np.bincount(of, sums) / np.bincount(of)
        return names, names[np.sqrt(squares) > self.limit]


def findings(
    port: Tensor,
    truth: Tensor,
    compared: np.ndarray,
    valid: np.ndarray,
    noise: Noise | None,
    head_dim: int | None,
    experts: np.ndarray | None,
    limit: float,
) -> list[str]:
    """At most three sentences on where the error of a float tap [batch, seq, features...] is; [] if it is everywhere.

    `compared` are the tokens to look at among those that are `valid`; both are bool [batch, seq]. `head_dim` is the
    size of the heads, if the features are heads. `experts`, bool [batch, seq, experts], says which token goes to which
    expert. `limit` is the largest R that passes.
    """
    if port.shape != truth.shape:
        return [f"It has shape {list(port.shape)} where the golden has {list(truth.shape)}."]
    if port.dtype_class != "float" or not compared.any():
        return []
    tokens = int(compared.sum())
    mine, exact = (tensor.floats(tensor.data[...])[compared].reshape(tokens, -1) for tensor in (port, truth))
    finite = is_finite(mine) & is_finite(exact)
    batch, position = np.nonzero(compared)
    last = position == valid.sum(axis=1)[batch] - 1
    if not finite.all():
        return _not_finite(finite, batch, position)
    where = np.flatnonzero(compared.reshape(-1))

    def units(squares: np.ndarray, around: np.ndarray) -> np.ndarray:
        """Squared errors of numbers near `around`, in units of the noise that these or the truth have."""
        expected = np.maximum(rounding_squares(around)[1], rounding_squares(exact)[1])
        return np.nan_to_num(noise.units(squares, expected, where) if noise else relative(squares, expected))

    errors = _Errors(units(np.square(mine - exact), exact), batch, position, last, GROUP_LIMIT * limit)
    sentences = [
        *(_scale(mine, exact, units, limit) if errors.units.mean() > limit**2 else []),
        *(_experts(errors, experts[compared]) if experts is not None else []),
        *_tokens(errors),
        *_features(errors.where_wrong(), head_dim),
    ]
    return sentences[:MOST]


def _not_finite(finite: np.ndarray, batch: np.ndarray, position: np.ndarray) -> list[str]:
    tokens = np.flatnonzero(~finite.all(axis=1))
    return [
        f"{int((~finite).sum())} of its {finite.size} numbers are NaN or Inf, in {len(tokens)} of {len(finite)} tokens, the "
        f"first of them [{batch[tokens[0]]},{position[tokens[0]]}]."
    ]


def _scale(
    mine: np.ndarray, exact: np.ndarray, units: Callable[[np.ndarray, np.ndarray], np.ndarray], limit: float
) -> list[str]:
    """Whether the port is a multiple of the truth, or the truth plus a constant, within the noise."""
    square = float((exact * exact).sum())
    scale = float((mine * exact).sum()) / square if square else 1.0
    offset = float((mine - exact).mean())
    multiple, shifted = (
        float(np.sqrt(units(np.square(mine - of), of).mean())) for of in (scale * exact, exact + offset)
    )
    if multiple <= limit * max(1.0, abs(scale)):  # multiplying a number multiplies its noise
        digits = next(digits for digits in range(3, 18) if float(f"{scale:.{digits}g}") != 1 or scale == 1)
        return [f"It is {scale:.{digits}g} times what it should be, everywhere."]
    if shifted <= limit:
        return [f"It is what it should be plus {offset:.3g}, everywhere."]
    return []


def _tokens(errors: _Errors) -> list[str]:
    tokens, wrong = errors.wrong(np.arange(len(errors.units)), 0)
    if not 0 < len(wrong) < len(tokens):
        return []
    positions, prompts = errors.position[wrong], errors.prompt[wrong]
    share = f"{len(wrong)} of {len(tokens)} tokens"
    if errors.last[wrong].all():
        return [f"Only the last token of {_of('prompt', np.unique(prompts))} is wrong."]
    if len(np.unique(positions)) == 1:
        return [f"Only position {positions[0]} is wrong, in {_of('prompt', prompts)}."]
    first = positions.min()
    after = errors.position >= first
    if first > 1 and len(wrong) == after.sum():
        grown = _growth(errors) if first < errors.position.max() / 4 else []
        return [f"Positions before {first} are right, and all from there on are wrong.", *grown]
    if first > 1 and 2 * len(wrong) > after.sum() and not after.all():
        return [f"Positions before {first} are right; {share} are wrong.", *_growth(errors)]
    # Position 0 is often right whatever the mistake: it sees no other token and is not rotated.
    if set(np.unique(errors.position)) - set(positions) == {0}:
        return _growth(errors) or ["Only position 0 is right."]
    if (
        len(np.unique(prompts)) < len(np.unique(errors.prompt))
        and 2 * len(wrong) > np.isin(errors.prompt, prompts).sum()
    ):
        wrong_prompts = np.unique(prompts)
        return [f"Only {_of('prompt', wrong_prompts)} {'is' if len(wrong_prompts) == 1 else 'are'} wrong."]
    if 2 * len(wrong) <= len(tokens):
        first_wrong = f"[{prompts[0]},{positions[0]}]"
        return [f"{share} are wrong, the first of them {first_wrong}; the others are right."]
    return _growth(errors)


def _growth(errors: _Errors) -> list[str]:
    longest = errors.position.max() + 1
    by_token = errors.units.mean(axis=1)
    first = np.sqrt(by_token[errors.position < longest / 4].mean())
    last = np.sqrt(by_token[errors.position >= 3 * longest / 4].mean())
    if first > 0 and last > GROWS * first:
        grown = f"{last / first:.3g} times larger in the last quarter than in the first"
        return [f"The error grows with the position and is {grown}."]
    return []


def _features(errors: _Errors, head_dim: int | None) -> list[str]:
    count = errors.units.shape[1]
    numbers = np.arange(count)
    channels, wrong = errors.wrong(numbers, 1)
    # With few tokens, if all channels are wrong, only some may exceed the limit by chance.
    if len(errors.units) >= FEW and 0 < len(wrong) <= min(FEW, len(channels) // 8):
        return [f"Only {_of('channel', wrong)} of {count} {'is' if len(wrong) == 1 else 'are'} wrong."]
    found = []
    if head_dim and count % head_dim == 0:
        heads, wrong = errors.wrong(numbers // head_dim, 1)
        if 0 < 2 * len(wrong) <= len(heads):
            found.append(f"Only {_of('head', wrong)} of {len(heads)} {'is' if len(wrong) == 1 else 'are'} wrong.")
        dims, wrong = errors.wrong(numbers % head_dim, 1)
        if 0 < len(wrong) < len(dims) and not found:
            found += _within_head(wrong, len(dims))
    return found or _shards(errors)


def _shards(errors: _Errors) -> list[str]:
    """Equal parts of the channels that separate the wrong ones from the right, as few parts as possible."""
    count = errors.units.shape[1]
    divisible = [parts for parts in SHARDS if count % parts == 0 and count >= 4 * parts]
    wrong = {parts: errors.wrong(np.arange(count) // (count // parts), 1)[1] for parts in divisible}
    for parts in divisible:
        finest = divisible[-1]
        as_fine = [part for part in range(finest) if part * parts // finest in wrong[parts]]
        if 0 < 2 * len(wrong[parts]) <= parts and as_fine == list(wrong[finest]):
            names = f"{_of('part', wrong[parts])} of {parts} equal parts of the channels"
            return [f"Only {names} {'is' if len(wrong[parts]) == 1 else 'are'} wrong, as if a shard were."]
    return []


def _within_head(wrong: np.ndarray, head_dim: int) -> list[str]:
    if (wrong % 2 == wrong[0] % 2).all() and len(wrong) > 2:
        return [f"Only the {'odd' if wrong[0] % 2 else 'even'} dims of each head are wrong."]
    low, high = int(wrong.min()), int(wrong.max()) + 1
    if (high - low) < head_dim and 2 * len(wrong) > high - low:
        dims = f"dims {low} to" if len(wrong) == high - low else f"{len(wrong)} dims between {low} and"
        return [f"Only {dims} {high - 1} of the {head_dim} of each head are wrong."]
    return []


def _experts(errors: _Errors, chosen: np.ndarray) -> list[str]:
    """Experts whose tokens are wrong, if the tokens that do not go to them are right."""
    by_token = np.sqrt(errors.units.mean(axis=1)) > errors.limit
    if not by_token.any() or by_token.all():
        return []
    used = chosen.any(axis=0)
    share = chosen[by_token].sum(axis=0) / np.maximum(chosen.sum(axis=0), 1)
    guilty = np.flatnonzero(share > 0.9)
    if 0 < 2 * len(guilty) <= used.sum() and chosen[by_token][:, guilty].any(axis=1).mean() > 0.9:
        return [f"Only tokens that go to {_of('expert', guilty)} are wrong."]
    return []


def _of(noun: str, numbers: Sequence[int] | np.ndarray) -> str:
    """`head 3`, `heads 1 and 3`, or `9 heads (0 to 30)`."""
    names = [str(int(number)) for number in numbers]
    if len(names) == 1:
        return f"{noun} {names[0]}"
    if len(names) <= FEW:
        return f"{noun}s {', '.join(names[:-1])} and {names[-1]}"
    return f"{len(names)} {noun}s ({names[0]} to {names[-1]})"

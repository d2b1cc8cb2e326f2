"""Compares one tap of the port with the golden and the truth, and judges it.

A tap has the layout [batch, seq, features...]. Port and golden are bf16, fp16 or fp32; the truth is fp32. One pass over
chunks of tokens computes everything in fp64, so memory does not grow with batch or seq, except for one number per
token. Results can be written as JSON: an undefined number is `None`, never NaN or Inf.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from layerproof.measure.groups import (
    GROUPS,
    PATTERN_SHIFT,
    block_size,
    by_expert,
    error_squares,
    groups_of,
    noise_of,
    noise_ratio,
    unit_ratio,
)
from layerproof.measure.rule import LIMIT, excess, fixed_thresholds, reason_to_fail
from layerproof.tensors.tensor import (
    CHUNK_ELEMENTS,
    FLOAT32_MAX,
    DtypeMismatch,
    ShapeMismatch,
    Tensor,
    blocks,
    check_valid,
    is_finite,
    token_numbers,
)
from layerproof.wording import brackets

if TYPE_CHECKING:
    from layerproof.measure.kernel import Sums
    from layerproof.measure.noise import Noise


LOG10_EDGES = np.linspace(-12, 4, 65)
PROBABILITIES = [*(i / 20 for i in range(20)), 0.99, 0.999, 1.0]


def compare(
    port: Tensor,
    golden: Tensor,
    truth: Tensor,
    valid: np.ndarray,
    left_out: np.ndarray | None = None,
    noise: Noise | None = None,
    experts: np.ndarray | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> dict[str, Any]:
    """Computes all metrics of one tap, in one pass. Tensors are [batch, seq, features...]; valid is bool [batch, seq].

    Tokens that are not valid (padding) count only in `padding`. Valid tokens in `left_out`, bool [batch, seq], count
    only in `nonfinite`: their differences are known and excused. Elements that are not finite in all three tensors also
    count only in `nonfinite`. (A value beyond the range of fp32 is not finite.) Errors are fp64 differences. Indices
    are lists, [b, s, ...] of the tensor. `None` is an undefined value.

    With `noise`, R of a group is the rms of its errors in units of the noise at their token and channel. `experts`,
    bool [batch, seq, experts], marks the experts that each token goes to.

    The result for a tap of floats:
        kind: "float"
        dtype: {port, golden, truth}
        count: elements compared
        R: rms(port - truth) / max(rms(golden - truth), floor)
        R_port_rms, R_golden_rms, floor: the parts of R. The floor is the rms error of rounding the truth to bf16; where
            the golden and this rounding are both exact, it is the rms of ulp_bf16(truth) / sqrt(12)
        abs, rel: {max, mean, median} of |port - golden| and of |port - golden| / |golden|. Where the golden is zero,
            rel is 0 if the port is zero too, otherwise 1; rel never exceeds the fp32 range
        close: share of elements with |port - golden| <= 1e-3 + 1e-2 |golden|
        cosine, pearson: between port and golden; None if one of them is zero or, for pearson, constant
        rel_l2: norm(port - golden) / norm(golden)
        snr_db: 20 log10(norm(golden) / norm(port - golden)); None if either norm is zero
        scale, offset: least-squares fit of port = scale * golden + offset; None if the golden is constant
        ulp: {max, mean, median} distance between port and golden in steps of their dtype; None if their dtypes differ
        golden_rel_l2: norm(golden - truth) / norm(truth)
        worst_element: {index, port, golden, truth} at the largest |port - truth|
        token_R: [batch][seq]; None at padding and at tokens without a finite element
        worst_token: {index, R}
        block_R: R of at most 64 equal contiguous blocks of the flattened features (the last may be shorter)
        worst_block: {index, R, channels: [from, to)}
        head_R, worst_head: [heads] and {index, R} for a tap [batch, seq, heads, dim], otherwise None
        expert_R, worst_expert: [experts] and {index, R} over the tokens of each expert; None without experts
        band: the noise's bands by type of group (noise.py); weighted_R: rms of the port's errors, each in units of the
            noise at its token and channel. Both are None without noise
        nonfinite: {port, golden, truth: {nan, inf, first}, port_differs, reference_differs: {count, first, port,
            golden, truth}}. port_differs: the port is not finite and the truth is not the same NaN, Inf or -Inf.
            reference_differs: the port is finite and the golden or the truth is not. Both describe their first element
        histogram: {log10_edges, port, golden, exact: {port, golden}}: counts of |port - truth| and |golden - truth|.
            The first and last bin include values beyond the edges; exact counts the zeros separately
        qq: {probability, port, golden}: quantiles of |port - truth| and |golden - truth|
        padding: {count, R, rel_l2, abs_max} of the tokens that are not valid; None if all are valid
        fixed: {max_abs, mean_abs, close, cosine, pearson}: whether the commonly used fixed thresholds hold

    Medians, quantiles and the histogram come from counts over the top bits of the errors' fp32 patterns, rounded down
    by less than 0.1 % (below 2^-126, by less than 2^-136). The median of an even count is the mean of the two middle
    values; quantiles are not interpolated (numpy's method "lower").

    The result for a tap of integers or booleans:
        kind: "exact"
        dtype: {port, golden, truth}
        count: elements compared; tokens: tokens compared
        R: None
        mismatches: {port_golden, port_truth, golden_truth}: number of tokens with any element that differs
        share: the same pairs, as shares of the tokens
        first: the same pairs, each with the index of the first element that differs, or None

    Raises:
        ShapeMismatch: if the shapes differ.
        DtypeMismatch: if one tensor is float and another integer or boolean, or one integer and another boolean.
        ValueError: if valid is not bool [batch, seq].

    Source: R is the three-way comparison of docs/verdicts.md.
    """
    _check(port, golden, truth, valid)
    comparison = _comparison(port, golden, truth, valid, left_out, noise, experts)
    for batch, seq in blocks(golden.shape, chunk_elements):
        comparison.add(batch, seq)
    return comparison.result()


def judge(
    port: Tensor,
    golden: Tensor,
    truth: Tensor,
    valid: np.ndarray,
    limit: float = LIMIT,
    left_out: np.ndarray | None = None,
    noise: Noise | None = None,
    experts: np.ndarray | None = None,
) -> dict[str, Any]:
    """Runs `compare` and adds the outcome.

    Adds `status` ("pass" or "fail"), `reason` (a sentence, None for a pass) and `excess` (R in units of the allowed R,
    as in `rule.excess`).

    A tap fails regardless of R if
    - its shape or class of dtype differs (the metrics are then those of an empty comparison),
    - the port is NaN or Inf where the truth is not the same,
    - the golden or the truth is NaN or Inf where the port is finite, or
    - there is nothing to compare.

    Otherwise floats pass if weighted_R is at most limit * band, and R of the worst token, block, head and expert at
    most limit * GROUP_LIMIT * band. Without bands they pass if R <= limit. Integers and booleans pass if the number of
    tokens where the port differs from the truth is at most limit times the number where the golden does, plus
    EXACT_ALLOWANCE of all tokens (at least one token).

    Raises:
        ValueError: if valid is not bool [batch, seq]; the port cannot cause that.
    """
    try:
        result = compare(port, golden, truth, valid, left_out, noise, experts)
        reason = reason_to_fail(result, limit)
    except (ShapeMismatch, DtypeMismatch) as mismatch:
        result = _comparison(port, golden, truth, valid, left_out, None, None).result()
        reason = str(mismatch)
    status = "fail" if reason else "pass"
    return {"status": status, "reason": reason, "excess": excess(result, limit), **result}


def _check(port: Tensor, golden: Tensor, truth: Tensor, valid: np.ndarray) -> None:
    for name, tensor in (("port", port), ("truth", truth)):
        if tensor.shape != golden.shape:
            shapes = brackets(tensor.shape), brackets(golden.shape)
            raise ShapeMismatch(f"the {name} has shape {shapes[0]} where the golden has {shapes[1]}")
        if tensor.dtype_class != golden.dtype_class:
            raise DtypeMismatch(f"the {name} is {tensor.dtype} where the golden is {golden.dtype}")
    check_valid(valid, golden)


def _name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if abs(value) > FLOAT32_MAX:
        return "Inf" if value > 0 else "-Inf"
    return "finite"


def _divide(numerator: float, denominator: float) -> float | None:
    return float(numerator / denominator) if denominator else None


def _correlation(products: np.ndarray) -> float | None:
    """Returns the cosine of two series from their sums of products [2, 2]; None if one series is zero."""
    cosine = _divide(products[0, 1], math.sqrt(products[0, 0]) * math.sqrt(products[1, 1]))
    return None if cosine is None else min(max(cosine, -1.0), 1.0)


def _listed(values: np.ndarray) -> list[Any]:
    """Converts an array to nested lists, with None for NaN."""
    listed = values.astype(object)
    listed[np.isnan(values)] = None
    return listed.tolist()


def _worst(ratios: np.ndarray) -> dict[str, Any] | None:
    """Returns {index, R} of the first largest R; index is a list if there are several dims. None if all are NaN."""
    if np.isnan(ratios).all():
        return None
    index = [int(i) for i in np.unravel_index(np.nanargmax(ratios), ratios.shape)]
    return {"index": index if ratios.ndim > 1 else index[0], "R": float(ratios[tuple(index)])}


@dataclass(frozen=True)
class _Spread:
    """Largest, mean and quantiles of non-negative numbers.

    Quantiles come from `counts` over `bins`, the top bits of fp32 patterns in ascending order, 0 first.
    """

    count: int
    zeros: int
    total: float
    largest: float
    bins: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, sums: Sums, name: str) -> _Spread:
        return cls(int(sums.counts.sum()), *sums.spread(name))

    def summary(self) -> dict[str, float | None]:
        if not self.count:
            return {"max": None, "mean": None, "median": None}
        low, high = self._order_statistics([(self.count - 1) // 2, self.count // 2])
        return {"max": self.largest, "mean": self.total / self.count, "median": low + (high - low) / 2}

    def quantiles(self) -> list[float | None]:
        if not self.count:
            return [None] * len(PROBABILITIES)
        return self._order_statistics([math.floor(p * (self.count - 1)) for p in PROBABILITIES])

    def decades(self) -> list[int]:
        """Counts the non-zero numbers between LOG10_EDGES."""
        counts = self.counts.copy()
        counts[0] -= self.zeros
        decade = np.searchsorted(10.0**LOG10_EDGES, _from_pattern(self.bins), side="right") - 1
        decade = np.clip(decade, 0, len(LOG10_EDGES) - 2)
        return np.bincount(decade, weights=counts, minlength=len(LOG10_EDGES) - 1).astype(int).tolist()

    def _order_statistics(self, ranks: list[int]) -> list[Any]:
        """Returns the values at these positions in ascending order; position 0 is the smallest."""
        return _from_pattern(self.bins[np.searchsorted(np.cumsum(self.counts), ranks, side="right")]).tolist()


def _from_pattern(bins: np.ndarray) -> np.ndarray:
    """Returns the smallest fp32 of each bin, as fp64: exact for numbers with few bits, such as most bf16 errors."""
    return (bins.astype(np.uint32) << PATTERN_SHIFT).view(np.float32).astype(np.float64)


class _Nonfinite:
    """Counts of NaN and Inf at valid tokens, by tensor, and the places where the tensors disagree about them."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.tensors = {name: {"nan": 0, "inf": 0, "first": None} for name in ("port", "golden", "truth")}
        nothing = {"count": 0, "first": None, "port": None, "golden": None, "truth": None}
        self.disagreements = {"port_differs": dict(nothing), "reference_differs": dict(nothing)}

    def add(self, tokens: np.ndarray, values: dict[str, np.ndarray], finite: dict[str, np.ndarray]) -> None:
        """Adds tokens with flat numbers [tokens]; values are fp64 and finite bool, [tokens, features], by tensor."""
        for name, seen in self.tensors.items():
            nan = np.isnan(values[name])
            seen["nan"] += int(np.count_nonzero(nan))
            seen["inf"] += int(np.count_nonzero(~finite[name] & ~nan))
            if seen["first"] is None:
                seen["first"] = self._first(tokens, ~finite[name])
        port, truth = values["port"], values["truth"]
        same = (port == truth) | (np.isnan(port) & np.isnan(truth))
        self._disagree("port_differs", ~finite["port"] & ~same, tokens, values)
        self._disagree("reference_differs", finite["port"] & ~(finite["golden"] & finite["truth"]), tokens, values)

    def _disagree(self, name: str, where: np.ndarray, tokens: np.ndarray, values: dict[str, np.ndarray]) -> None:
        seen = self.disagreements[name]
        if seen["first"] is None and where.any():
            seen["first"] = self._first(tokens, where)
            seen.update({tensor: _name(of.reshape(-1)[np.argmax(where)]) for tensor, of in values.items()})
        seen["count"] += int(np.count_nonzero(where))

    def _first(self, tokens: np.ndarray, where: np.ndarray) -> list[int] | None:
        return _element(self.shape, tokens, where.shape[1], int(np.argmax(where))) if where.any() else None


def _element(shape: tuple[int, ...], tokens: np.ndarray, features: int, position: int) -> list[int]:
    """Returns the tensor index of a flat position in a chunk [tokens, features]; `tokens` are flat token numbers."""
    token, channel = divmod(position, features)
    return [int(i) for i in np.unravel_index(int(tokens[token]) * features + channel, shape)]


class _Padding:
    """Sums over the tokens that are not valid."""

    def __init__(self) -> None:
        self.count = 0
        self.squares = np.zeros(4)
        self.difference = 0.0
        self.golden = 0.0
        self.largest = 0.0

    def add(self, port: np.ndarray, golden: np.ndarray, truth: np.ndarray) -> None:
        """Adds elements; all three arrays are finite fp64 [elements]."""
        if not port.size:
            return
        self.count += port.size
        self.squares += error_squares(port, golden, truth).sum(axis=1)
        self.difference += float(np.square(port - golden).sum())
        self.golden += float(np.square(golden).sum())
        self.largest = max(self.largest, float(np.abs(port - golden).max()))

    def result(self) -> dict[str, Any]:
        if not self.count:
            return {"count": 0, "R": None, "rel_l2": None, "abs_max": None}
        ratio = noise_ratio(self.squares, np.asarray(self.count))
        rel_l2 = _divide(math.sqrt(self.difference), math.sqrt(self.golden))
        return {"count": self.count, "R": float(ratio), "rel_l2": rel_l2, "abs_max": self.largest}


class _FloatComparison:
    """The state of `compare` for a tap of floats."""

    def __init__(
        self,
        port: Tensor,
        golden: Tensor,
        truth: Tensor,
        valid: np.ndarray,
        left_out: np.ndarray,
        noise: Noise | None,
        experts: np.ndarray | None,
    ) -> None:
        self.tensors = {"port": port, "golden": golden, "truth": truth}
        self.valid = valid
        self.left_out = left_out.reshape(-1)
        self.noise = noise
        self.experts = experts
        self.shape = golden.shape
        self.features = math.prod(golden.shape[2:])
        from layerproof.measure.kernel import Sums

        self.sums = Sums.zero(valid.size, self.features)
        self.nonfinite = _Nonfinite(golden.shape)
        self.padding = _Padding()

    def add(self, batch: slice, seq: slice) -> None:
        valid = self.valid[batch, seq].reshape(-1)
        tokens = token_numbers(batch, seq, self.valid.shape[1])
        raw = {name: tensor.read(batch, seq) for name, tensor in self.tensors.items()}
        if not valid.all():
            padding = {name: self.tensors[name].floats(of[~valid]) for name, of in raw.items()}
            keep = np.logical_and.reduce([is_finite(of) for of in padding.values()])
            self.padding.add(*(of[keep] for of in padding.values()))
            tokens, raw = tokens[valid], {name: of[valid] for name, of in raw.items()}
        noise = self.noise
        patterns = [raw[name].view(f"i{raw[name].itemsize}") for name in ("port", "golden")]
        all_finite = self.sums.add(
            tokens,
            ~self.left_out[tokens],
            [of.astype(np.float32) if of.dtype == np.float16 else of for of in raw.values()],
            patterns if self._same_dtype() else None,
            None if noise is None else (noise.token.reshape(-1), noise.channel, noise.rounding),
        )
        if not all_finite:
            values = {name: self.tensors[name].floats(of) for name, of in raw.items()}
            self.nonfinite.add(tokens, values, {name: is_finite(of) for name, of in values.items()})

    def _same_dtype(self) -> bool:
        return self.tensors["port"].dtype == self.tensors["golden"].dtype

    def result(self) -> dict[str, Any]:
        spread = functools.partial(_Spread.of, self.sums)
        errors = {name: spread(name) for name in ("port", "golden")}
        count = int(self.sums.counts.sum())
        result = {
            "kind": "float",
            "dtype": {name: tensor.dtype for name, tensor in self.tensors.items()},
            "count": count,
            **self._ratio(),
            "abs": spread("abs").summary(),
            "rel": spread("rel").summary(),
            "close": _divide(self.sums.totals[2], count),
            **self._agreement(),
            "ulp": spread("ulp").summary() if self._same_dtype() else None,
            "worst_element": self._worst_element(),
            **self._groups(),
            "nonfinite": {**self.nonfinite.tensors, **self.nonfinite.disagreements},
            "histogram": {
                "log10_edges": LOG10_EDGES.tolist(),
                **{name: spread.decades() for name, spread in errors.items()},
                "exact": {name: spread.zeros for name, spread in errors.items()},
            },
            "qq": {
                "probability": list(PROBABILITIES),
                **{name: spread.quantiles() for name, spread in errors.items()},
            },
            "padding": None if self.valid.all() else self.padding.result(),
        }
        return {**result, "fixed": fixed_thresholds(result)}

    def _ratio(self) -> dict[str, float | None]:
        count = self.sums.counts.sum()
        squares = self.sums.channels.sum(axis=1)
        if not count:
            return {"R": None, "R_port_rms": None, "R_golden_rms": None, "floor": None}
        port, golden, *_ = np.sqrt(squares / count)
        _, floor = noise_of(squares)
        return {
            "R": float(noise_ratio(squares, count)),
            "R_port_rms": float(port),
            "R_golden_rms": float(golden),
            "floor": math.sqrt(floor / count),
        }

    def _agreement(self) -> dict[str, float | None]:
        count, port_mean, golden_mean, *moments = self.sums.moments.tolist()
        means, centred = np.array([port_mean, golden_mean]), np.array([moments[:2], moments[1:]])
        products = centred + count * np.outer(means, means)
        truth_squares, difference_squares, _ = self.sums.totals.tolist()
        norm, difference = math.sqrt(products[1, 1]), math.sqrt(difference_squares)
        # Rounding the mean gives a constant series a tiny spread, so compare its elements to see if it is constant.
        varies = (self.sums.varied > 0) & (np.diag(centred) > 0)
        scale = float(centred[0, 1] / centred[1, 1]) if varies[1] else None
        return {
            "cosine": _correlation(products),
            "pearson": _correlation(centred) if varies.all() else None,
            "rel_l2": _divide(difference, norm),
            "snr_db": 20 * math.log10(norm / difference) if difference and norm else None,
            "scale": scale,
            "offset": None if scale is None else port_mean - scale * golden_mean,
            "golden_rel_l2": _divide(math.sqrt(self.sums.channels[1].sum()), math.sqrt(truth_squares)),
        }

    def _worst_element(self) -> dict[str, Any] | None:
        error, token, channel, *values = self.sums.worst.tolist()
        if error < 0:
            return None
        index = np.unravel_index(int(token) * self.features + int(channel), self.shape)
        return {"index": [int(i) for i in index], **dict(zip(self.tensors, values, strict=True))}

    def _groups(self) -> dict[str, Any]:
        """Returns R by token, channel block, head and expert."""
        if self.noise is None:
            tokens, channels, ratio_of = self.sums.tokens, self.sums.channels, noise_ratio
        else:
            tokens, channels = self.sums.unit_tokens[None], self.sums.unit_channels[None]
            ratio_of = unit_ratio
        counts, token_counts = self.sums.counts, self.sums.token_counts
        groups = groups_of(channels, counts, self.shape)
        if self.experts is not None:
            groups["expert"] = by_expert(tokens, token_counts, self.experts)
        ratios = {group: ratio_of(*sums) for group, sums in groups.items()}
        ratios["token"] = ratio_of(tokens, token_counts).reshape(self.valid.shape)
        weighted = self.noise is not None and counts.any()
        result: dict[str, Any] = {
            "band": None if self.noise is None else dict(self.noise.band),
            "weighted_R": math.sqrt(tokens.sum() / counts.sum()) if weighted else None,
        }
        for group in GROUPS:
            ratio = ratios.get(group)
            result[f"{group}_R"] = None if ratio is None else _listed(ratio)
            result[f"worst_{group}"] = None if ratio is None else _worst(ratio)
        if result["worst_block"]:
            size = block_size(self.features)
            start = result["worst_block"]["index"] * size
            result["worst_block"]["channels"] = [start, min(start + size, self.features)]
        return result


class _ExactComparison:
    """The state of `compare` for a tap of integers or booleans."""

    PAIRS = (("port", "golden"), ("port", "truth"), ("golden", "truth"))

    def __init__(self, port: Tensor, golden: Tensor, truth: Tensor, valid: np.ndarray, left_out: np.ndarray) -> None:
        self.tensors = {"port": port, "golden": golden, "truth": truth}
        self.valid = valid & ~left_out
        self.shape = golden.shape
        self.features = math.prod(golden.shape[2:])
        self.tokens = 0
        self.mismatches = {f"{a}_{b}": 0 for a, b in self.PAIRS}
        self.first: dict[str, list[int] | None] = {f"{a}_{b}": None for a, b in self.PAIRS}

    def add(self, batch: slice, seq: slice) -> None:
        valid = self.valid[batch, seq].reshape(-1)
        tokens = token_numbers(batch, seq, self.valid.shape[1])[valid]
        values = {name: tensor.read(batch, seq)[valid] for name, tensor in self.tensors.items()}
        self.tokens += len(tokens)
        for a, b in self.PAIRS:
            differ = values[a] != values[b]
            self.mismatches[f"{a}_{b}"] += int(np.count_nonzero(differ.any(axis=1)))
            if self.first[f"{a}_{b}"] is None and differ.any():
                self.first[f"{a}_{b}"] = _element(self.shape, tokens, self.features, int(np.argmax(differ)))

    def result(self) -> dict[str, Any]:
        return {
            "kind": "exact",
            "dtype": {name: tensor.dtype for name, tensor in self.tensors.items()},
            "count": self.tokens * self.features,
            "tokens": self.tokens,
            "R": None,
            "mismatches": self.mismatches,
            "share": {name: _divide(count, self.tokens) for name, count in self.mismatches.items()},
            "first": self.first,
        }


def _comparison(
    port: Tensor,
    golden: Tensor,
    truth: Tensor,
    valid: np.ndarray,
    left_out: np.ndarray | None,
    noise: Noise | None,
    experts: np.ndarray | None,
) -> _FloatComparison | _ExactComparison:
    left_out = np.zeros_like(valid) if left_out is None else left_out
    if golden.dtype_class == "float":
        return _FloatComparison(port, golden, truth, valid, left_out, noise, experts)
    return _ExactComparison(port, golden, truth, valid, left_out)

"""Compares choices, such as those of experts, as sets, and distinguishes near-ties from mistakes.

Where two experts are nearly tied, the last bit of a sum decides, and a legitimate port may choose the other one. Such a
flip changes the token's output far beyond rounding. So later taps of the stage leave the token out, and it is counted.
The same holds for every other top-k inside a stage, such as that of a sparse indexer, and for thresholds of a router,
whose two sides are tied where the margin is zero.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layerproof.measure.rule import EXACT_ALLOWANCE
from layerproof.taps import Fed, choices_before
from layerproof.tensors.tensor import Tensor

CHOICE = "router.choice"

AFTER_ROUTER = ("router.weights", "mlp.out", "post_mlp_norm", "out")
"""Taps that a flipped choice changes."""

FLIP_SIGMAS = 6.0
"""A flip is noise if its margin is within this many standard deviations of the difference between two selection values.

The deviation is that of the golden's selection values from the truth's. With normally distributed errors, six standard
deviations cause one false alarm in 10^9. Errors are not quite normal, but a real mistake flips by far more.
"""

LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Routing:
    """Outcome for one stage: bool [batch, seq] masks over valid tokens, and the margin in units of the selection.

    `near` are the near-ties of the truth, whatever the port chooses.
    If `compared` is False, the port's choice is unknown, and only flips of the golden and its variants are recorded.
    """

    compared: bool
    tokens: int
    flips: np.ndarray
    golden_flips: np.ndarray
    variant_flips: np.ndarray
    malformed: np.ndarray
    excused: np.ndarray
    near: np.ndarray
    noise_margin: float
    largest_margin: float

    @property
    def undecided(self) -> np.ndarray:
        """Tokens at which another run of the same port may choose otherwise: near-ties, and flips of golden and variants."""
        return self.near | self.golden_flips | self.variant_flips

    @property
    def left_out(self) -> np.ndarray:
        """Tokens that comparisons after the router leave out: excused flips, and flips of golden and variants."""
        return self.excused | self.golden_flips | self.variant_flips

    def reason(self, choice: str = CHOICE) -> str | None:
        """Says why the choice fails; None if every flip is a near-tie and there are no more flips than chance explains.

        A correct port is just another variant of the golden. So it flips at no more new experts' tokens than golden and
        variants flip together, plus EXACT_ALLOWANCE of all tokens (at least two tokens). Other choices may have many exact
        ties, as among scores that a ReLU makes zero, which every implementation breaks in its own way.
        """
        what = "experts" if choice == CHOICE else "places"
        wrong = self.flips & ~self.excused
        if not wrong.any():
            usual_flips = self.golden_flips | self.variant_flips
            others, usual = int((self.excused & ~usual_flips).sum()), int(usual_flips.sum())
            if choice == CHOICE and others > usual + max(2.0, EXACT_ALLOWANCE * self.tokens):
                return (
                    f"the port chooses other experts than the truth for {int(self.flips.sum())} of {self.tokens} tokens, by "
                    f"margins within the noise, but no variant of the golden does so for {others} of them, too many for "
                    f"chance: golden and variants do so for {usual}"
                )
            return None
        if self.malformed.any():
            batch, seq = np.argwhere(self.malformed)[0]
            return (
                f"the port does not choose the right number of different {what} for {int(self.malformed.sum())} of "
                f"{self.tokens} tokens, first [{batch},{seq}]"
            )
        batch, seq = np.argwhere(wrong)[0]
        return (
            f"the port chooses other {what} than the truth for {int(wrong.sum())} of {self.tokens} tokens, first "
            f"[{batch},{seq}], by margins of up to {self.largest_margin:.3g} where noise explains {self.noise_margin:.3g}"
        )

    def summary(self) -> dict[str, Any]:
        """Returns the entry for results/compare/STAGE.json; the port's numbers are None if its choice is unknown."""
        port = {
            "flips": int(self.flips.sum()),
            "excused": int((self.flips & self.excused).sum()),
            "noise_margin": self.noise_margin,
            "largest_margin": self.largest_margin,
        }
        return {
            "tokens": self.tokens,
            "golden_flips": int(self.golden_flips.sum()),
            "left_out": int(self.left_out.sum()),
            **(port if self.compared else dict.fromkeys(port)),
        }


def compare_choices(
    port: Tensor | None,
    golden: Tensor,
    truth: Tensor,
    golden_selection: Tensor | None,
    truth_selection: Tensor | None,
    valid: np.ndarray,
    variant_flips: np.ndarray | None = None,
) -> Routing:
    """Compares the experts that port and golden choose with those of the truth; each choice is [batch, seq, top_k].

    The margin of a flip is the largest gap, in the truth's selection values [batch, seq, experts], between an expert
    that the port leaves out and one that it chooses instead. An exchange of two experts that the truth rules out alike,
    by the same -Inf, is not a flip. The port's choice is not compared if the port does not hand it over, if its shape
    differs from the golden's or it is not integer (the tap fails for that reason), or if the selection values are
    unknown; then all tokens at which the last expert chosen is nearly tied with the next count as excused.
    `variant_flips`, bool [batch, seq], marks tokens where a variant of the golden chooses other experts than the truth.
    """
    if golden_selection is None or truth_selection is None:
        golden_flips, nothing = flips(golden, truth) & valid, np.zeros_like(valid)
        variant_flips = nothing if variant_flips is None else variant_flips
        return Routing(
            False, int(valid.sum()), nothing, golden_flips, variant_flips, nothing, nothing, nothing, 0.0, 0.0
        )
    selection = _values(truth_selection)
    noise = _noise_margin(_values(golden_selection), selection, valid)
    experts = selection.shape[-1]
    wanted, reference = chosen(truth, experts), chosen(golden, experts)
    golden_flips = _flipped(wanted, reference, selection) & valid
    nothing = np.zeros_like(golden_flips)
    variant_flips = nothing if variant_flips is None else variant_flips
    ordered = np.sort(selection, axis=-1)[..., ::-1]
    k = truth.shape[-1]
    with np.errstate(invalid="ignore"):  # Inf - Inf, where both are ruled out
        gap = ordered[..., k - 1] - ordered[..., k] if k < experts else np.full(selection.shape[:-1], np.inf)
    near = _any_of_token(gap <= noise) & valid
    if port is None or port.shape != golden.shape or port.dtype_class != "integer":
        return Routing(False, int(valid.sum()), nothing, golden_flips, variant_flips, nothing, near, near, noise, 0.0)
    mine = chosen(port, experts)
    flipped = _flipped(wanted, mine, selection) & valid
    # Choosing an expert twice, or one that does not exist, is not a near-tie whatever the margins say.
    malformed = _any_of_token(mine.sum(-1) != port.shape[-1]) & valid
    dropped = np.where(wanted & ~mine, selection, -np.inf).max(-1)
    taken = np.where(mine & ~wanted, selection, np.inf).min(-1)
    with np.errstate(invalid="ignore"):
        gaps = np.where((wanted != mine).any(-1), dropped - taken, 0.0)
    margins = np.where(flipped & ~malformed, gaps.max(tuple(range(2, gaps.ndim))), 0.0)
    return _routing(valid, flipped | malformed, golden_flips, variant_flips, malformed, near, margins, noise)


def compare_margins(
    port: Tensor | None, golden: Tensor, truth: Tensor, valid: np.ndarray, variant_flips: np.ndarray | None = None
) -> Routing:
    """Compares on which side of a threshold numbers lie, by their margins to it, each [batch, seq, ...].

    A flip is a number on another side than in the truth, and its margin is that of the truth. If the port does not hand
    its margins over, all tokens with a number near the threshold count as excused.
    """
    exact = _values(truth)
    noise = _noise_margin(_values(golden), exact, valid)
    golden_flips = _any_of_token((_values(golden) > 0) != (exact > 0)) & valid
    variant_flips = np.zeros_like(golden_flips) if variant_flips is None else variant_flips
    near, nothing = _any_of_token(np.abs(exact) <= noise) & valid, np.zeros_like(golden_flips)
    if port is None or port.shape != golden.shape or port.dtype_class != "float":
        return Routing(False, int(valid.sum()), nothing, golden_flips, variant_flips, nothing, near, near, noise, 0.0)
    differ = (_values(port) > 0) != (exact > 0)
    margins = np.where(differ, np.abs(exact), 0.0).max(tuple(range(2, exact.ndim)))
    flipped = _any_of_token(differ) & valid
    return _routing(valid, flipped, golden_flips, variant_flips, nothing, near, margins, noise)


def _routing(
    valid: np.ndarray,
    flipped: np.ndarray,
    golden_flips: np.ndarray,
    variant_flips: np.ndarray,
    malformed: np.ndarray,
    near: np.ndarray,
    margins: np.ndarray,
    noise: float,
) -> Routing:
    # A margin that is NaN, from selection values that are not finite, excuses nothing.
    margins = np.nan_to_num(margins, nan=LARGEST, posinf=LARGEST)
    return Routing(
        compared=True,
        tokens=int(valid.sum()),
        flips=flipped,
        golden_flips=golden_flips,
        variant_flips=variant_flips,
        malformed=malformed,
        excused=flipped & ~malformed & (margins <= noise),
        near=near,
        noise_margin=noise,
        largest_margin=float(margins.max(initial=0.0)),
    )


def _noise_margin(golden: np.ndarray, truth: np.ndarray, valid: np.ndarray) -> float:
    """The largest margin that noise explains: FLIP_SIGMAS deviations of the difference between two values."""
    with np.errstate(invalid="ignore"):  # Inf - Inf, where both rule an expert out
        error = (golden - truth)[valid]
    error = error[np.isfinite(error)]
    return FLIP_SIGMAS * float(np.sqrt(2.0 * np.mean(np.square(error)))) if error.size else 0.0


def _flipped(wanted: np.ndarray, mine: np.ndarray, selection: np.ndarray) -> np.ndarray:
    """Marks the tokens [batch, seq] at which two choices differ in more than experts that are ruled out."""
    return _any_of_token((wanted != mine) & ~np.isneginf(selection))


def _any_of_token(marks: np.ndarray) -> np.ndarray:
    """Whether any of a token's marks [batch, seq, ...] is set."""
    return np.asarray(marks.any(tuple(range(2, marks.ndim))))


def ruled_out_as(port: Tensor, golden: Tensor, truth: Tensor) -> Tensor:
    """Returns the port's selection values with -Inf where golden and truth both rule an expert out with -Inf.

    DeepSeek-V3's expert groups do so, for example. A port may use any low number there, such as 0 in the release; the
    choice shows whether it was low enough.
    """
    if port.shape != golden.shape or {port.dtype_class, golden.dtype_class} != {"float"}:
        return port
    mine = _values(port)
    ruled_out = np.isneginf(_values(golden)) & np.isneginf(_values(truth)) & np.isfinite(mine)
    return Tensor(np.where(ruled_out, -np.inf, mine).astype(np.float32), "float32") if ruled_out.any() else port


def is_in_order(port: Tensor, truth: Tensor, counted: np.ndarray, margin: float) -> bool:
    """Whether the port's selection values order the experts of each token as the truth's do.

    Both are [batch, seq, ..., experts], `counted` is bool [batch, seq], and experts that the truth has at most `margin`
    apart may be in any order.
    """
    for mine, exact in zip(
        *(_values(side)[counted].reshape(-1, truth.shape[-1]) for side in (port, truth)), strict=True
    ):
        order = np.argsort(exact)
        mine, exact = mine[order], exact[order]
        lower = np.searchsorted(exact, exact - margin)  # how many experts are lower than each by more than the margin
        highest = np.maximum.accumulate(mine)[lower - 1]
        if (highest > mine)[lower > 0].any():
            return False
    return True


def flips(choice: Tensor, truth: Tensor) -> np.ndarray:
    """Marks the tokens, bool [batch, seq], at which `choice` and `truth` are different sets of experts."""
    return (_sorted(choice) != _sorted(truth)).any(-1)


def choice_flips(taps: Mapping[str, Tensor], truth: Mapping[str, Tensor], choice: str) -> np.ndarray:
    """Marks the tokens, bool [batch, seq], at which `taps` choose otherwise than the truth."""
    mine, wanted = taps[choice], truth[choice]
    if wanted.dtype_class == "float":  # margins
        return _any_of_token((_values(mine) > 0) != (_values(wanted) > 0))
    selection = truth.get(selection_of(choice))
    if selection is None:
        return flips(mine, wanted)
    values = _values(selection)
    return _flipped(chosen(wanted, values.shape[-1]), chosen(mine, values.shape[-1]), values)


def experts_chosen(taps: Mapping[str, Tensor]) -> np.ndarray | None:
    """Marks the experts that each token goes to, bool [batch, seq, experts]; None if no tap shows their number."""
    sized = next((taps[name] for name in ("router.weights", "router.selection", "router.logits") if name in taps), None)
    return None if sized is None else chosen(taps["router.choice"], sized.shape[-1])


def _sorted(choice: Tensor) -> np.ndarray:
    return np.sort(np.asarray(choice.data[...]).astype(np.int64), axis=-1)


def _values(tensor: Tensor) -> np.ndarray:
    return tensor.floats(tensor.data[...]).astype(np.float64)


def chosen(choice: Tensor, experts: int) -> np.ndarray:
    """Marks the chosen experts, bool [batch, seq, experts]; an index out of range chooses nothing."""
    indices = np.asarray(choice.data[...]).astype(np.int64)
    is_valid = (indices >= 0) & (indices < experts)
    marks = np.zeros((*indices.shape[:-1], experts + 1), bool)
    np.put_along_axis(marks, np.where(is_valid, indices, experts), True, axis=-1)
    return marks[..., :experts]


def choices_of_taps(names: Collection[str], fed: Sequence[Fed]) -> dict[str, list[str]]:
    """Returns for each tap the choices that it depends on, in order, from what feeds it."""
    found = {name: choices_before(name, fed) for name in names}
    for name in AFTER_ROUTER:
        if name in found and CHOICE in names and CHOICE not in found[name]:
            found[name].append(CHOICE)
    return found


def reached(flips: np.ndarray, reach: int) -> np.ndarray:
    """Marks the tokens of a tap, bool [batch, seq], that `flips` change: their own, and `reach` tokens behind each."""
    places = np.arange(flips.shape[1])
    last = np.maximum.accumulate(np.where(flips, places, -1), axis=1)
    return (last >= 0) & (places - last <= reach)


def selection_of(choice: str) -> str:
    """The name of the tap with the values that a choice is made by."""
    return choice.replace("choice", "selection")

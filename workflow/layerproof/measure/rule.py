"""The rule that decides whether a tap passes: limits, and the sentence that says why a tap fails."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from layerproof.wording import brackets, times

if TYPE_CHECKING:
    from collections.abc import Mapping


LIMIT = 1.5  # largest R that passes, in units of the band
GROUP_LIMIT = 4 / 3  # factor on the limit for the worst group: with LIMIT, its R may be twice that of any variant


# Router near-ties flip a few choices in any legitimate variant, even where the golden happens to flip none. So this
# share of the tokens, and always one token, may differ from the truth beyond what the golden explains. This is a first
# rule, to be refined with measured router margins.
EXACT_ALLOWANCE = 0.01
FIXED_MAX_ABS, FIXED_MEAN_ABS, FIXED_CLOSE, FIXED_CORRELATION = 0.01, 0.001, 0.95, 0.99


def reason_to_fail(result: dict[str, Any], limit: float) -> str | None:
    """Says why a comparison fails, or returns None if it passes."""
    return _exact_reason(result, limit) if result["kind"] == "exact" else _float_reason(result, limit)


def _float_reason(result: dict[str, Any], limit: float) -> str | None:
    for name in ("port_differs", "reference_differs"):
        element = result["nonfinite"][name]
        if element["count"]:
            return (
                f"the port is {element['port']} at {brackets(element['first'])} where the golden is "
                f"{element['golden']} and the truth is {element['truth']} ({element['count']} such elements)"
            )
    if is_nowhere_finite(result):
        return (
            "nothing was compared: no element of a valid token is finite in port, golden and truth. Look for NaN in the "
            "checkpoint's weights"
        )
    R, allowed, where = failing_limit(result, limit)
    assert R is not None  # elements were compared
    if allowed >= R:
        return None
    quotient, furthest_off = furthest(result, limit)
    if quotient is None or quotient <= 1:  # R is NaN, or nothing but zero is allowed
        return f"R is {R:.4g}{f' at {where}' if where else ''} where {allowed:.4g} is allowed"
    return f"the error is {times(quotient)} what is allowed{f' at {furthest_off}' if furthest_off else ''}"


def is_nowhere_finite(result: Mapping[str, Any]) -> bool:
    """Whether port, golden and truth have no finite element, and agree on what they have instead."""
    return result.get("kind") == "float" and not result["count"] and _is_finite_alike(result)


def is_compared(result: Mapping[str, Any]) -> bool:
    """Whether floats were compared, and port, golden and truth are finite at the same elements."""
    return result.get("kind") == "float" and result["count"] > 0 and _is_finite_alike(result)


def _is_finite_alike(result: Mapping[str, Any]) -> bool:
    return not any(result["nonfinite"][name]["count"] for name in ("port_differs", "reference_differs"))


def group_limits(result: Mapping[str, Any], limit: float) -> list[tuple[str, float, float]]:
    """Lists each type of group, R of its worst group, and the largest R that passes, for floats with bands."""
    found = [(group, result.get(f"worst_{group}"), reached) for group, reached in (result["band"] or {}).items()]
    return [(group, worst["R"], limit * GROUP_LIMIT * reached) for group, worst, reached in found if worst]


def furthest(result: Mapping[str, Any], limit: float) -> tuple[float | None, str | None]:
    """Returns the largest quotient of R and the R that passes, and the group it belongs to.

    Groups are tokens, channel blocks, heads and experts; None is the whole tap. Above 1 the tap fails. The quotient is
    None if the tap has no R.
    """
    if result.get("R") is None:
        return None, None
    overall, allowed = overall_limit(result, limit)
    found = [(overall, allowed, None), *((R, most, group) for group, R, most in group_limits(result, limit))]
    quotients = [(R / most, group) for R, most, group in found if R is not None and most > 0 and not math.isnan(R)]
    quotient, group = max(quotients, key=lambda one: one[0], default=(None, None))
    return quotient, place(result, group) if group else None


def excess(result: Mapping[str, Any], limit: float) -> float | None:
    """Returns how many times too far off a tap is: its error divided by what is allowed, 1 at the limit."""
    return furthest(result, limit)[0]


def place(result: Mapping[str, Any], group: str) -> str:
    """Names the worst group of a type: `token [0,3]`, `head 2`."""
    index = result[f"worst_{group}"]["index"]
    name = "channel block" if group == "block" else group
    return f"{name} {brackets(index) if isinstance(index, list) else index}"


def overall_limit(result: Mapping[str, Any], limit: float) -> tuple[float | None, float]:
    """Returns the R that decides for a whole tap of floats, and the largest R that passes.

    If the noise is known, R is in units of the noise: one massive element can dominate plain R, which then shows
    nothing about the other elements.
    """
    band = result["band"] or {}
    if "weighted" in band:
        return result["weighted_R"], limit * band["weighted"]
    return result["R"], limit


def failing_limit(result: Mapping[str, Any], limit: float) -> tuple[float | None, float, str | None]:
    """Returns the R that makes a tap fail, the largest R that passes, and the group it belongs to.

    The group is None for the whole tap. If nothing fails, the result is that of the whole tap; R is None if the tap has
    no R.
    """
    if result.get("R") is None:
        return None, limit, None
    R, allowed = overall_limit(result, limit)
    if R is None or allowed >= R:
        for group, group_R, group_allowed in group_limits(result, limit):
            if not group_allowed >= group_R:  # also true for NaN
                return group_R, group_allowed, place(result, group)
    return R, allowed, None


def _exact_reason(result: dict[str, Any], limit: float) -> str | None:
    if not result["count"]:
        return "nothing was compared: there is no element in a valid token"
    differ, explained = result["mismatches"]["port_truth"], result["mismatches"]["golden_truth"]
    allowed = limit * explained + max(1.0, EXACT_ALLOWANCE * result["tokens"])
    if differ > allowed:
        return (
            f"the port differs from the truth in {differ} of {result['tokens']} tokens, first at "
            f"{brackets(result['first']['port_truth'])}; the golden differs in {explained}, which allows {allowed:g}"
        )
    return None


def fixed_thresholds(result: dict[str, Any]) -> dict[str, bool | None]:
    """Evaluates the commonly used thresholds. They pass bugs and fail noise, so they are reported but never decide.

    With one NaN or Inf in port or golden no threshold holds, as for anyone who computes them over all elements.
    """
    names = ("max_abs", "mean_abs", "close", "cosine", "pearson")
    if any(result["nonfinite"][side][what] for side in ("port", "golden") for what in ("nan", "inf")):
        return dict.fromkeys(names, False)

    def holds(value: float | None, least: float = -math.inf, most: float = math.inf) -> bool | None:
        return None if value is None else bool(least < value < most)

    return {
        "max_abs": holds(result["abs"]["max"], most=FIXED_MAX_ABS),
        "mean_abs": holds(result["abs"]["mean"], most=FIXED_MEAN_ABS),
        "close": holds(result["close"], least=FIXED_CLOSE),
        "cosine": holds(result["cosine"], least=FIXED_CORRELATION),
        "pearson": holds(result["pearson"], least=FIXED_CORRELATION),
    }

"""Numbers and phrases that all parts of the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Comparison = Mapping[str, Any]
NOT_COMPARED = ("error", "missing")


def all_taps(comparisons: Iterable[Comparison]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(stage, tap name, tap) of all taps, in order."""
    return [(one["stage"], name, tap) for one in comparisons for name, tap in one["taps"].items()]


def worst_tap(comparison: Comparison) -> dict[str, Any] | None:
    """The `tap` of a stage that is furthest off, and its `excess`; None if no tap has a number."""
    found = [(tap["excess"], name) for name, tap in comparison["taps"].items() if tap.get("excess") is not None]
    return dict(zip(("excess", "tap"), max(found), strict=True)) if found else None


# Words and numbers


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits, or a dash if it is undefined."""
    if value is None:
        return "–"
    if value == 0 or (isinstance(value, int) and abs(value) < 1e6):
        return str(int(value))
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def share(value: float | None) -> str:
    """A share in percent; 100 % only if it is everything."""
    if value is None:
        return "–"
    return f"{math.floor(value * 1000) / 10:g} %"


def with_period(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def listed(names: Sequence[str]) -> str:
    """Returns `a`, `a and b`, or `a, b and c`."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

"""How numbers and places are written in messages, wherever they come from."""

from __future__ import annotations

from collections.abc import Sequence


def brackets(index: Sequence[int]) -> str:
    """Formats an index or shape of a tensor as `[0,17,3]`."""
    return f"[{','.join(str(i) for i in index)}]"


def times(quotient: float) -> str:
    """Returns "147 times", with enough digits that a quotient above 1 is not shown as 1."""
    texts = (f"{quotient:.{digits}g}" for digits in range(3, 18))
    text = next((text for text in texts if quotient <= 1 or float(text) > 1), "1")
    return f"{float(text):.0f} times" if 100 <= quotient < 1e6 else f"{text} times"

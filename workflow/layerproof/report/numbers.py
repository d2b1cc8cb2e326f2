"""All numbers of the comparisons, as the JSON that the report's script makes tables of."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from layerproof.measure.rule import overall_limit
from layerproof.report.words import Comparison
from layerproof.taps import merged
from layerproof.wording import brackets

COLUMNS = (
    "tap",
    "status",
    "times too far off",
    "worst group",
    "R",
    "allowed R",
    "R in units of noise",
    "max abs",
    "rel L2",
    "cosine",
    "ulp median",
    "ulp max",
    "scale",
    "offset",
    "worst element",
    "port, golden, truth there",
    "NaN, Inf",
    "fixed thresholds that hold",
    "reason",
)
"""The columns of the table of a stage's taps. The script shows the first few until more are chosen."""
STATISTICS = ("mean", "std", "min", "max", "nan", "inf")
PADDING = ("count", "R", "rel_l2", "abs_max")


def as_json(comparisons: Sequence[Comparison], plotted: Collection[str], limit: float) -> str:
    """The numbers of all stages as JSON that may stand in a script element; those of plots only for `plotted` stages."""
    content = {
        "columns": COLUMNS,
        "stages": {one["stage"]: _stage(one, one["stage"] in plotted, limit) for one in comparisons},
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _stage(comparison: Comparison, is_plotted: bool, limit: float) -> dict[str, Any]:
    taps = comparison["taps"]
    statistics = comparison.get("statistics", {})
    golden, port = statistics.get("golden", {}), statistics.get("port", {})
    return {
        "taps": [_tap(name, tap, limit) for name, tap in taps.items()],
        "statistics": [
            [
                name,
                *(_short(side.get(name, {}).get(key)) for side in (golden, port) for key in STATISTICS),
                *((taps.get(name, {}).get("padding") or {}).get(key) for key in PADDING),
            ]
            for name in merged([list(golden), list(port)])
        ],
        "plot": _plot(taps["out"]) if is_plotted and taps.get("out", {}).get("count") else None,
    }


def _tap(name: str, tap: Mapping[str, Any], limit: float) -> list[Any]:
    """A row of the table of taps, in the order of COLUMNS."""
    if tap.get("kind") != "float":
        text = _integers(tap) if tap.get("kind") == "exact" else tap["reason"]
        return [name, tap["status"], None, *([None] * (len(COLUMNS) - 4)), text]
    weighted, allowed = overall_limit(tap, limit)
    element, ulp = tap["worst_element"], tap["ulp"] or {}
    return [
        name,
        tap["status"],
        _short(tap["excess"]),
        worst_group(tap),
        _short(tap["R"]),
        _short(allowed),
        _short(weighted),
        _short(tap["abs"]["max"]),
        _short(tap["rel_l2"]),
        _short(tap["cosine"], 6),
        _short(ulp.get("median")),
        _short(ulp.get("max")),
        _short(tap["scale"], 4),
        _short(tap["offset"]),
        brackets(element["index"]) if element else None,
        ", ".join(f"{element[side]:.4g}" for side in ("port", "golden", "truth")) if element else None,
        _nonfinite(tap),
        _fixed(tap["fixed"]),
        tap["reason"],
    ]


def worst_group(tap: Mapping[str, Any]) -> str | None:
    """The token, head, channel block or expert with the largest R."""
    places: list[tuple[float, str]] = []
    if token := tap.get("worst_token"):
        places.append((token["R"], f"token {brackets(token['index'])}"))
    if head := tap.get("worst_head"):
        places.append((head["R"], f"head {head['index']}"))
    if expert := tap.get("worst_expert"):
        places.append((expert["R"], f"tokens of expert {expert['index']}"))
    if block := tap.get("worst_block"):
        first, end = block["channels"]
        where = f"channel {first}" if end - first == 1 else f"channels {first}–{end - 1}"
        places.append((block["R"], where))
    if not places:
        return None
    R, where = max(places)
    return f"{where}, R {R:.3g}"


def _integers(tap: Mapping[str, Any]) -> str:
    differ, golden = tap["mismatches"]["port_truth"], tap["mismatches"]["golden_truth"]
    where = f", first at {brackets(tap['first']['port_truth'])}" if differ else ""
    return f"integers: differ from the truth in {differ} of {tap['tokens']} tokens{where}; the golden in {golden}"


def _nonfinite(tap: Mapping[str, Any]) -> str:
    found = [
        f"{side}: {seen['nan']} NaN, {seen['inf']} Inf, first {brackets(seen['first'])}"
        for side, seen in ((side, tap["nonfinite"][side]) for side in ("port", "golden", "truth"))
        if seen["nan"] or seen["inf"]
    ]
    return "; ".join(found) or "none"


def _fixed(fixed: Mapping[str, bool | None]) -> str:
    known = [holds for holds in fixed.values() if holds is not None]
    return f"{sum(known)} of {len(known)}"


def _plot(out: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of a stage's plot: histogram, quantiles, and R of each token."""
    histogram, quantiles = out["histogram"], out["qq"]
    edges = histogram["log10_edges"]
    bins = zip(edges, histogram["port"], histogram["golden"], strict=False)
    return {
        "histogram": [[_short(10.0**edge), port, golden] for edge, port, golden in bins if port or golden],
        "quantiles": [
            [_short(p), _short(port), _short(golden)]
            for p, port, golden in zip(quantiles["probability"], quantiles["port"], quantiles["golden"], strict=True)
        ],
        "tokens": [[_short(R) for R in row] for row in out["token_R"]],
    }


def _short(value: float | None, digits: int = 3) -> float | None:
    """A number with so many significant digits, to keep the page small."""
    return None if value is None else float(f"{value:.{digits}g}")

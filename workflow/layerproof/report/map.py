"""The map of the report: how many times too far off each tap of each stage is, as cells of a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from layerproof.model.stages import layer_of
from layerproof.report.words import NOT_COMPARED, Comparison, number, share
from layerproof.taps import OUT, merged
from layerproof.wording import times

STEPS = ((0.25, "a"), (0.5, "b"), (0.75, "c"), (1.0, "d"), (2.0, "e"), (5.0, "f"), (20.0, "g"), (100.0, "h"))
"""The colours of cells by the largest excess that has them; `i` is beyond."""
FEW_STAGES = 16
"""Up to this many stages, cells have room for their numbers."""
ROLES = {"injects": "×", "amplifies": "↑", "transmits": "·", "recovers": "↓"}


@dataclass(frozen=True)
class Cell:
    """A cell: a CSS class for its colour, what it shows, what its tooltip says, and where it leads."""

    colour: str
    text: str
    title: str
    link: str


@dataclass(frozen=True)
class Row:
    """A row of the map: its name, and a cell for each stage, or None where the stage does not have this tap."""

    name: str
    cells: tuple[Cell | None, ...]


@dataclass(frozen=True)
class Column:
    """A column of the map: a stage, its short label and its status."""

    stage: str
    label: str
    status: str


@dataclass(frozen=True)
class Map:
    """Stages across, taps and chains down."""

    columns: tuple[Column, ...]
    taps: tuple[Row, ...]
    chains: tuple[Row, ...]
    has_numbers: bool


def draw(comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]]) -> Map:
    """The map of a run. `comparisons` come in the order of the stages."""
    names = merged([*(list(comparison["taps"]) for comparison in comparisons), [OUT]])
    wide = len(comparisons) <= FEW_STAGES
    columns = tuple(Column(one["stage"], _label(one["stage"], wide), one["status"]) for one in comparisons)
    taps = tuple(Row(name, tuple(_cell(one, name, wide) for one in comparisons)) for name in names)
    return Map(columns, taps, tuple(_chain(chain, columns) for chain in chains), wide)


def _label(stage: str, wide: bool) -> str:
    layer = layer_of(stage)
    return stage if wide or layer is None else str(layer)


def _cell(comparison: Comparison, name: str, wide: bool) -> Cell | None:
    # A stage that ended before its taps were known has none: all of them get the status of the stage.
    tap = comparison["taps"].get(name) if comparison["taps"] else comparison
    if tap is None:
        return None
    link = f"{comparison['stage']}/{name}"
    status, excess = tap["status"], tap.get("excess")
    title = f"{comparison['stage']} {name}: {status}"
    if status in NOT_COMPARED:
        return Cell(status, "E" if status == "error" else "M", f"{title}, {tap['reason']}", link)
    if excess is None:
        what = f", {tap['reason']}" if tap["reason"] else ", compared as integers"
        return Cell("x" if status == "fail" else "exact", "×" if status == "fail" else "•", title + what, link)
    if status == "fail" and excess <= 1:  # NaN, or another rule than that of the error
        return Cell("x", "×", f"{title}, {tap['reason']}", link)
    number = times(excess).removesuffix(" times")
    what = f"{times(excess)} too far off" if excess > 1 else f"{share(excess)} of what is allowed"
    text = (f"×{number}" if status == "fail" else number) if wide else "×" if status == "fail" else ""
    return Cell(next((step for most, step in STEPS if excess <= most), "i"), text, f"{title}, {what}", link)


def _chain(chain: Mapping[str, Any], columns: Sequence[Column]) -> Row:
    def cell(stage: str) -> Cell | None:
        entry = chain["stages"].get(stage)
        if entry is None:
            return None
        title = f"chain {chain['chain']}, {stage}: "
        if entry["status"] in NOT_COMPARED:
            sign = "E" if entry["status"] == "error" else "M"
            return Cell(entry["status"], sign, f"{title}{entry['status']}, {entry['reason']}", stage)
        wrong = entry.get("wrong") or entry["role"] == "injects"
        gain = "" if entry["gain"] is None else f", gain {number(entry['gain'])}"
        said = f"{entry['role'] or 'runs'}, propagated error {number(entry['propagated_error'])}{gain}"
        return Cell("x" if wrong else "exact", ROLES.get(entry["role"], "·"), title + said, stage)

    return Row(f"chain {chain['chain']}", tuple(cell(column.stage) for column in columns))

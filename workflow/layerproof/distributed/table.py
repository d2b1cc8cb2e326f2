"""The report of a hang: what was found, a table of steps by rank, and the stacks of the ranks that are to blame."""

from __future__ import annotations

import json
import re
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from .board import State
from .causes import Cause, Finding, explain
from .marks import Step
from .wording import listed

ROWS = 8
"""Steps that the table shows, the latest."""
COLUMNS = 8
"""Ranks with different progress that it shows; those that did the same share a column."""
STACKS = 3
LINES = 8
WIDTH = 110


@dataclass(frozen=True)
class Report:
    """What was found, and its words for people, of several lines."""

    finding: Finding
    text: str

    def write(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, written: str) -> Report:
        values = json.loads(written)
        found = values["finding"]
        return cls(
            Finding(Cause(found["cause"]), tuple(found["ranks"]), found["sentence"], found["step"]), values["text"]
        )


def reported(states: Mapping[int, State], size: int) -> Report:
    """Says why the ranks of a world of this size do not get on, with a table and with the stacks of those to blame."""
    states = {rank: state.with_flight() for rank, state in states.items()}
    finding = explain(states, size)
    finding = replace(finding, sentence=_shortly(finding.sentence), step=_shortly(finding.step))
    title = f"layerproof: {finding.sentence}"
    parts = ["\n".join(textwrap.wrap(title, WIDTH, break_long_words=False, break_on_hyphens=False))]
    if table := _table(finding, states, size):
        parts.append(textwrap.indent(table, "  "))
    parts += [_stack(states[rank]) for rank in _shown(finding, states)]
    return Report(finding, "\n\n".join(parts) + "\n")


def _shortly(text: str) -> str:
    """The same without the folder that packages are installed in."""
    return re.sub(r"/\S*/site-packages/", "", text)


def _table(finding: Finding, states: Mapping[int, State], size: int) -> str:
    now = time.time()
    began: dict[tuple[str, int, str], float] = {}
    cells: dict[int, dict[tuple[str, int, str], str]] = {
        rank: {} for rank in range(max([size, *(r + 1 for r in states)]))
    }
    for rank, state in states.items():
        for step in state.steps:
            row = (step.group, step.number, _shortly(str(step)))
            began[row] = min(step.began, began.get(row, step.began))
            cells[rank][row] = _cell(step, state, now)
    rows = sorted(began, key=lambda row: began[row])[-ROWS:]
    columns: dict[tuple[str, ...], list[int]] = {}
    for rank, of in cells.items():
        state = states.get(rank)
        gone = "-" if state is None or not state.ended else "gone"
        # How long is not the same to the tenth of a second: those that wait are one column.
        columns.setdefault(tuple(of.get(row, gone).partition(" ")[0] for row in rows), []).append(rank)
    several = sorted(columns.values(), key=lambda ranks: (not set(ranks) & set(finding.ranks), ranks))[:COLUMNS]
    several.sort()
    head = ["step", *(listed(ranks) for ranks in several)]
    lines = [[row[2], *(cells[ranks[0]].get(row, "-") for ranks in several)] for row in rows]
    return _aligned([head, *lines]) if rows else ""


def _cell(step: Step, state: State, now: float) -> str:
    if step.ended is None:
        return f"in it {(state.ended_at or now) - step.began:.1f} s"
    return "done"


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _shown(finding: Finding, states: Mapping[int, State]) -> list[int]:
    """The ranks whose stacks are shown: those to blame, and one of the others."""
    blamed = [rank for rank in finding.ranks if rank in states][:STACKS]
    others = [rank for rank, state in states.items() if rank not in finding.ranks and state.open()][:1]
    return [rank for rank in (*blamed, *others) if states[rank].stack or states[rank].ended]


def _stack(state: State) -> str:
    head = f"rank {state.rank}, process {state.pid} on {state.host}"
    if state.ended:
        return f"{head}, {state.ended}"
    return "\n".join([f"{head}, is at", *(f"  {_shortly(line)}" for line in list(state.stack)[-LINES:])])

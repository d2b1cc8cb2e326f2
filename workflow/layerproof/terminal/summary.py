"""The last words of a run: the verdict on what was asked for, where the report is, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.report import gate
from layerproof.report.failing import failures
from layerproof.report.words import NOT_COMPARED, Comparison, number, share, worst_tap
from layerproof.shapes import Verdicts

RESULTS = Path("results")
REPORT = RESULTS / "report.html"
VERDICTS = RESULTS / "verdicts.json"
SET_ASIDE = RESULTS / "previous"
"""Where the verdict and the report of an earlier run are put if a run fails before it has made its own."""
BISECTION = RESULTS / "bisect.json"
OF_ALL = (REPORT, VERDICTS, RESULTS / "manifest.json")
"""Targets that have the verdict on all stages behind them, as archives do."""


@dataclass(frozen=True)
class Answer:
    """The answer to what a run was asked for: `overall`, None where nothing was judged, and the lines that say it."""

    overall: str | None
    lines: tuple[str, ...]


def answer(targets: Sequence[str], before: Verdicts | None = None) -> Answer:
    """The answer of a run that finished. `targets` are the files or rules that it was asked for, none for the report;
    `before` are the verdicts of the run before.
    """
    paths = list(map(Path, targets))
    if not paths or any(path in OF_ALL or path.parent == RESULTS / "archive" or path.suffix == "" for path in paths):
        return _of_all(before)
    found = [one for path in paths if (one := _of_file(path))]
    states = [one.overall for one in found if one.overall]
    overall = max(states, key=lambda state: gate.EXIT[state]) if states else None
    return Answer(overall, tuple(line for one in found for line in one.lines))


def exit_code(overall: str | None) -> int:
    """The exit code of `layerproof run` for a run that finished."""
    return 0 if overall is None else gate.EXIT[overall]


def verdicts_at_hand() -> Verdicts | None:
    """The verdicts in results/, if there are any that can be read."""
    try:
        return gate.read(VERDICTS)
    except UserError:
        return None


def _of_all(before: Verdicts | None) -> Answer:
    verdicts = verdicts_at_hand()
    if verdicts is None:
        return Answer(None, ())
    changed = gate.changes(before, verdicts) if before else []
    lines = [
        *gate.lines(verdicts),
        *([f"Since the run before, {'; '.join(changed)}"] if changed else []),
        *([f"Report: {REPORT}"] if REPORT.exists() else []),
        f"Next: {_next(verdicts)}",
    ]
    return Answer(verdicts["overall"], tuple(lines))


def _next(verdicts: Verdicts) -> str:
    if verdicts["overall"] == "pass":
        return "layerproof run results/archive/NAME.zip keeps this run as proof; layerproof gate checks it in CI"
    if not verdicts["failures"]:  # a chain could not be compared
        return "correct what could not be compared, then layerproof run"
    first = verdicts["failures"][0]
    place = gate.where(first)
    command = gate.next_command(first, verdicts)
    if gate.chain_of(first, verdicts) == CAPTURED:
        return f"correct the port, capture its tensors again, then {command}"
    if first["status"] == "fail":
        return f"{f'look at {place}' if place else 'correct the port'}, then {command}"
    return f"read {log_of(first['stages'][0])}, then {command}"


def log_of(stage: str) -> Path:
    """The log of the side that failed in a stage: the golden's if the golden has an error, otherwise the port's."""
    for side in ("golden", "port"):
        try:
            if read_json(RESULTS / f"records/{side}/{stage}.json")["error"]:
                return RESULTS / f"logs/{side}/{stage}.log"
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return RESULTS / f"logs/port/{stage}.log"


def _of_file(path: Path) -> Answer | None:
    """The answer that one file of results/ gives."""
    try:
        if path.parent == RESULTS / "compare":
            return _of_stage(path.stem, with_diagnosis=False)
        if path.parent == RESULTS / "diagnosis":
            return _of_stage(path.stem, with_diagnosis=True)
        if path.parent == RESULTS / "compare/chain":
            return _of_chain(read_json(path))
        if path == BISECTION:
            return _of_bisection(read_json(path))
        return Answer(None, (f"Wrote {path}",)) if path.exists() else None
    except (OSError, ValueError, KeyError, TypeError):  # the file is of another version, or not there
        return None


def _of_stage(stage: str, with_diagnosis: bool) -> Answer:
    comparison = read_json(RESULTS / f"compare/{stage}.json")
    diagnoses = [read_json(RESULTS / f"diagnosis/{stage}.json")] if with_diagnosis else []
    status = comparison["status"]
    overall = status if status in ("pass", "fail") else "error"
    found = failures([comparison], [], diagnoses)
    if not found:
        agrees = f"PASS: {stage} agrees with the golden{how_near(comparison)}"
        return Answer(overall, (agrees, "Next: layerproof run, for all stages and the report"))
    lines = [f"{overall.upper()}: {gate.failure_line(one)}" for one in found]
    place = gate.where(found[0])
    if status != "fail":
        return Answer(overall, (*lines, f"Log: {log_of(stage)}"))
    why = f"layerproof run results/diagnosis/{stage}.json says why"
    again = f"{f'look at {place}' if place else 'correct the port'}, then layerproof run results/compare/{stage}.json"
    return Answer(overall, (*lines, f"Next: {again if with_diagnosis else why}"))


def how_near(comparison: Comparison) -> str:
    """How much of the allowed error a stage uses, as the end of a sentence."""
    worst = worst_tap(comparison)
    return f", with at most {share(worst['excess'])} of the allowed error" if worst and worst["excess"] else ""


def _of_chain(chain: dict[str, Any]) -> Answer:
    name, overall = chain["chain"], chain["status"] if chain["status"] in ("pass", "fail") else "error"
    lines = []
    if first := chain["first_wrong"]:
        entry = chain["stages"][first]
        where = f"at {first}: {entry['why']}" if entry.get("own_input") else f"by {first} at the latest"
        lines.append(f"{overall.upper()}: chain {name} goes wrong {where}")
    stopped = [(stage, entry["reason"]) for stage, entry in chain["stages"].items() if entry["status"] in NOT_COMPARED]
    if stopped:
        stage, reason = stopped[0]
        lines.append(f"{overall.upper()}: chain {name} broke at {stage}: {reason.removeprefix(f'{stage}: ')}")
    if lines:
        return Answer(overall, tuple(lines))
    ran = [stage for stage, entry in chain["stages"].items() if entry["status"] == "pass"]
    error = chain["stages"][ran[-1]]["propagated_error"] if ran else None
    last = "" if error is None else f", with an error of {number(error)} (relative L2) at its end"
    return Answer(overall, (f"{overall.upper()}: chain {name} ran through {len(ran)} stages{last}",))


def _of_bisection(bisection: dict[str, Any]) -> Answer:
    first = bisection["first_wrong"]
    if first is None:
        return Answer("pass", ("PASS: no chained run is further off than a right port is",))
    after = f"after {bisection['last_right']}, " if bisection["last_right"] else ""
    return Answer(
        "fail", (f"FAIL: the first wrong stage is {first}: the port goes wrong {after}by {first} at the latest",)
    )

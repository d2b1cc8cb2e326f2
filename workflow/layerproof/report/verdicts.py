"""All comparisons as one verdict: results/verdicts.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerproof.measure.rule import LIMIT
from layerproof.report.failing import failures
from layerproof.report.sentences import verdict_sentences
from layerproof.shapes import (
    Cause,
    ChainComparison,
    Comparison,
    Culprit,
    Diagnosis,
    FirstCulprit,
    Group,
    Output,
    StageVerdict,
    Tap,
    Verdicts,
    Worst,
)
from layerproof.taps import OUT, is_output

SCHEMA_VERSION = 3
GROUPS: tuple[tuple[Group, str], ...] = (
    ("token", "worst_token"),
    ("channel_block", "worst_block"),
    ("head", "worst_head"),
    ("expert", "worst_expert"),
)
"""Groups, with the key of a comparison for the worst group of each."""


def collect(
    comparisons: Sequence[Comparison],
    chains: Sequence[ChainComparison],
    diagnoses: Sequence[Diagnosis],
    limit: float = LIMIT,
) -> Verdicts:
    """The content of results/verdicts.json from the contents of results/compare and results/diagnosis. `limit` is the
    setting compare.limit.

    `overall` is `error` if any stage ended as error or missing or there is no stage at all, otherwise `fail` if any
    stage or the captured chain fails, otherwise `pass`. The first culprit is the first tap of the first failing stage
    that goes wrong by itself or, if the stage could not be diagnosed, the first that fails.
    """
    culprits = {diagnosis["stage"]: diagnosis["culprits"] for diagnosis in diagnoses}
    stages = {one["stage"]: _stage(one, chains, culprits.get(one["stage"], [])) for one in comparisons}
    states = {stage["status"] for stage in stages.values()} | {chain["status"] for chain in chains}
    broken = not stages or states & {"error", "missing"}
    first = _first_culprit(comparisons, culprits)
    headline, *details = verdict_sentences(first, comparisons, chains, diagnoses, limit)
    return {
        "schema_version": SCHEMA_VERSION,
        "overall": "error" if broken else "fail" if "fail" in states else "pass",
        "headline": headline,
        "details": details,
        "failures": failures(comparisons, chains, diagnoses),
        "first_culprit": first,
        "stages": stages,
        "chains": {
            chain["chain"]: {
                "status": chain["status"],
                "first_wrong": chain["first_wrong"],
                "logits": chain["logits"],
            }
            for chain in chains
        },
    }


def _stage(comparison: Comparison, chains: Sequence[ChainComparison], culprits: Sequence[Culprit]) -> StageVerdict:
    taps: dict[str, Tap] = {
        name: {
            "status": tap["status"],
            "reason": tap.get("reason"),
            "R": tap.get("R"),
            "excess": tap.get("excess"),
            "worst": _worst(tap),
            "layout": tap.get("layout"),
        }
        for name, tap in comparison["taps"].items()
    }
    outputs: dict[str, Output] = {
        name: {"R": tap["R"], "excess": tap["excess"]} for name, tap in taps.items() if is_output(name)
    }
    out: Output = outputs.setdefault(OUT, {"R": None, "excess": None})
    through = [chain["stages"] for chain in chains if comparison["stage"] in chain["stages"]]
    chained = max(through, key=len)[comparison["stage"]] if through else None
    return {
        "status": comparison["status"],
        "reason": comparison["reason"],
        "isolated": {**out, "outputs": outputs, "taps": taps},
        "chained": {"R": chained.get("R"), "gain": chained.get("gain"), "role": chained.get("role")}
        if chained
        else None,
        "routing": comparison["routing"],
        "culprits": [{"tap": one["tap"], "cause": _name(one["cause"]), "rank": None} for one in culprits],
        "cause": next((_cause(culprit["cause"]) for culprit in culprits if culprit["cause"]), None),
    }


def _cause(cause: Cause) -> Cause:
    """A cause as in verdicts.json, where the runner-up has no text."""
    runner_up = cause["runner_up"]
    return {
        "name": cause["name"],
        "text": cause["text"],
        "R_explained": cause["R_explained"],
        "excess": cause["excess"],
        "runner_up": runner_up
        and {"name": runner_up["name"], "R_explained": runner_up["R_explained"], "excess": runner_up["excess"]},
        "estimate": None,
    }


def _name(cause: Cause | None) -> str | None:
    return cause["name"] if cause else None


def _worst(tap: Mapping[str, Any]) -> Worst | None:
    """The group with the largest R: a token, a channel block, a head or the tokens of an expert."""
    groups: list[Worst] = [
        {"group": group, "index": tap[key]["index"], "R": tap[key]["R"]} for group, key in GROUPS if tap.get(key)
    ]
    return max(groups, key=lambda group: group["R"], default=None)


def _first_culprit(comparisons: Sequence[Comparison], culprits: Mapping[str, Sequence[Culprit]]) -> FirstCulprit | None:
    for comparison in comparisons:
        stage = comparison["stage"]
        for culprit in culprits.get(stage, []):
            return {"stage": stage, "tap": culprit["tap"], "cause": _name(culprit["cause"]), "rank": None}
        for name, tap in comparison["taps"].items():
            if tap["status"] == "fail":
                return {"stage": stage, "tap": name, "cause": None, "rank": None}
    return None

"""Drops causes that a stage which passes rules out: it runs the same code, in which that mistake would show as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerproof.report.words import Comparison
from layerproof.shapes import Culprit, Diagnosis
from layerproof.wording import times

RULED_OUT = (
    "It behaves as if the port had {cause}. But {stage} passes with the same compiled code, and with that mistake it would "
    "be {far}: what differs are the weights, so look at how those of this stage are loaded."
)


def without_ruled_out(diagnoses: Sequence[Diagnosis], comparisons: Sequence[Comparison]) -> list[Diagnosis]:
    """The contents of results/diagnosis, without causes in code that a stage shares with one that passes.

    Which stage that would be, and what else explains the tap, the diagnosis says. Stages share code if the graphs that
    were compiled for them are the same but for the weights.
    """
    by_stage = {comparison["stage"]: comparison for comparison in comparisons}
    return [_of_stage(diagnosis, by_stage) for diagnosis in diagnoses]


def _of_stage(diagnosis: Diagnosis, comparisons: Mapping[str, Comparison]) -> Diagnosis:
    culprits = [
        _without_cause(culprit) if _is_ruled_out(culprit, diagnosis["stage"], comparisons) else culprit
        for culprit in diagnosis["culprits"]
    ]
    changed = culprits != diagnosis["culprits"]
    return {**diagnosis, "culprits": culprits, "together": None} if changed else diagnosis


def _is_ruled_out(culprit: Culprit, stage: str, comparisons: Mapping[str, Comparison]) -> bool:
    elsewhere = culprit.get("elsewhere")
    if not elsewhere:
        return False
    other = comparisons.get(elsewhere["stage"])
    return other is not None and other["status"] == "pass" and _is_same_code(comparisons[stage], other)


def _is_same_code(one: Comparison, other: Comparison) -> bool:
    graphs: list[Any] = [(comparison.get("port") or {}).get("graph") for comparison in (one, other)]
    return graphs[0] is not None and graphs[0] == graphs[1]


def _without_cause(culprit: Culprit) -> Culprit:
    cause, elsewhere = culprit["cause"], culprit["elsewhere"]
    assert cause is not None and elsewhere is not None
    excess = elsewhere["excess"]
    far = "wrong" if excess is None else f"{times(excess)} too far off"
    found = RULED_OUT.format(cause=cause["text"], stage=elsewhere["stage"], far=far)
    tried = culprit["tried"] if culprit["instead"] else 0  # none of them is left to speak of
    return {**culprit, "cause": culprit["instead"], "tried": tried, "findings": [found, *culprit["findings"]]}

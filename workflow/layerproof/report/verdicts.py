"""All comparisons as one verdict: results/verdicts.json, and the gate that a release can be held at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json
from layerproof.model.stages import ranges
from layerproof.taps import OUT

SCHEMA_VERSION = 1
GATE_EXIT = {"pass": 0, "fail": 1, "error": 2}


def collect(
    comparisons: Sequence[Mapping[str, Any]],
    chains: Sequence[Mapping[str, Any]],
    diagnoses: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """The content of results/verdicts.json from the contents of results/compare and results/diagnosis.

    `overall` is `error` if any stage ended as error or missing or there is no stage at all, `fail` if any fails or the
    captured chain does, and else `pass`. The first culprit is the first tap of the first failing stage that goes wrong of
    itself, and if the stage could not be diagnosed, the first that fails.
    """
    culprits = {diagnosis["stage"]: diagnosis["culprits"] for diagnosis in diagnoses}
    stages = {one["stage"]: _stage(one, chains, culprits.get(one["stage"], [])) for one in comparisons}
    states = {stage["status"] for stage in stages.values()} | {chain["status"] for chain in chains}
    broken = not stages or states & {"error", "missing"}
    return {
        "schema_version": SCHEMA_VERSION,
        "overall": "error" if broken else "fail" if "fail" in states else "pass",
        "first_culprit": _first_culprit(comparisons, culprits),
        "stages": stages,
        "chains": {
            chain["chain"]: {key: chain[key] for key in ("status", "first_wrong", "logits")} for chain in chains
        },
    }


def _stage(
    comparison: Mapping[str, Any], chains: Sequence[Mapping[str, Any]], culprits: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    taps = {
        name: {
            "status": tap["status"],
            "reason": tap.get("reason"),
            "R": tap.get("R"),
            "worst": _worst(tap),
        }
        for name, tap in comparison["taps"].items()
    }
    through = [chain["stages"] for chain in chains if comparison["stage"] in chain["stages"]]
    chained = max(through, key=len)[comparison["stage"]] if through else None
    return {
        "status": comparison["status"],
        "reason": comparison["reason"],
        "isolated": {"R": taps.get(OUT, {}).get("R"), "taps": taps},
        "chained": {key: chained.get(key) for key in ("R", "gain", "role")} if chained else None,
        "routing": comparison["routing"],
        "culprits": [{"tap": culprit["tap"], "cause": _name(culprit["cause"])} for culprit in culprits],
        "cause": next((_cause(culprit["cause"]) for culprit in culprits if culprit["cause"]), None),
    }


def _cause(cause: Mapping[str, Any]) -> dict[str, Any]:
    """A cause as verdicts.json states it, with the runner-up without its text."""
    runner_up = cause["runner_up"]
    return {
        **{key: cause[key] for key in ("name", "text", "R_explained")},
        "runner_up": {key: runner_up[key] for key in ("name", "R_explained")} if runner_up else None,
    }


def _name(cause: Mapping[str, Any] | None) -> str | None:
    return cause["name"] if cause else None


def _worst(tap: Mapping[str, Any]) -> dict[str, Any] | None:
    """The group with the largest R: a token, a channel block, a head or the tokens of an expert."""
    groups = [
        {"group": group, "index": tap[key]["index"], "R": tap[key]["R"]}
        for group, key in (
            *(("token", "worst_token"), ("channel_block", "worst_block")),
            *(("head", "worst_head"), ("expert", "worst_expert")),
        )
        if tap.get(key)
    ]
    return max(groups, key=lambda group: group["R"], default=None)


def _first_culprit(
    comparisons: Sequence[Mapping[str, Any]], culprits: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, Any] | None:
    for comparison in comparisons:
        stage = comparison["stage"]
        for culprit in culprits.get(stage, []):
            return {"stage": stage, "tap": culprit["tap"], "cause": _name(culprit["cause"])}
        for name, tap in comparison["taps"].items():
            if tap["status"] == "fail":
                return {"stage": stage, "tap": name, "cause": None}
    return None


def gate(path: Path) -> int:
    """Exit code for a verdicts.json: 0 for pass, 1 for fail, 2 for error; prints the verdict in a line.

    Raises:
        UserError: if the file is not a verdicts.json of this schema.
    """
    try:
        verdicts = read_json(path)
        if verdicts["schema_version"] != SCHEMA_VERSION:
            raise ValueError(f"schema_version is {verdicts['schema_version']}")
        overall, culprit = verdicts["overall"], verdicts["first_culprit"]
        stages = ranges(list(verdicts["stages"]))
        wrong = [
            f"chain {name} from {one['first_wrong']}" for name, one in verdicts["chains"].items() if one["first_wrong"]
        ]
        culprits = [f"first culprit {culprit['stage']} {culprit['tap']}"] if culprit else []
        blame = "".join(f", {one}" for one in [*culprits, *wrong])
        code = GATE_EXIT[overall]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: is no verdicts.json of schema {SCHEMA_VERSION} ({error}). Run snakemake again."
        ) from None
    print(f"{path}: {overall}{blame} ({stages})")
    return code

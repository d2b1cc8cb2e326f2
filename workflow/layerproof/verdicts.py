"""All comparisons as one verdict: results/verdicts.json, and the gate that a release can be held at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layerproof.errors import UserError
from layerproof.files import read_json
from layerproof.taps import OUT

SCHEMA_VERSION = 1
GATE_EXIT = {"pass": 0, "fail": 1, "error": 2}


def collect(comparisons: Sequence[Mapping[str, Any]], chains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The content of results/verdicts.json from the contents of results/compare, in the order of the stages.

    `overall` is `error` if any stage ended as error or missing or there is no stage at all, `fail` if any fails, and
    else `pass`. The first culprit is the first failing tap of the first failing stage; `cause` waits for diagnosis.
    """
    stages = {comparison["stage"]: _stage(comparison, chains) for comparison in comparisons}
    states = {stage["status"] for stage in stages.values()} | {chain["status"] for chain in chains}
    broken = not stages or states & {"error", "missing"}
    return {
        "schema_version": SCHEMA_VERSION,
        "overall": "error" if broken else "fail" if "fail" in states else "pass",
        "first_culprit": _first_culprit(comparisons),
        "stages": stages,
        "chains": {chain["chain"]: {"status": chain["status"], "logits": chain["logits"]} for chain in chains},
    }


def _stage(comparison: Mapping[str, Any], chains: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
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
        "cause": None,
    }


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


def _first_culprit(comparisons: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    for comparison in comparisons:
        for name, tap in comparison["taps"].items():
            if tap["status"] == "fail":
                return {"stage": comparison["stage"], "tap": name, "cause": None}
    return None


def gate(path: Path) -> int:
    """Exit code for a verdicts.json: 0 for pass, 1 for fail, 2 for error; prints the verdict in a line.

    Raises:
        UserError: if the file is not a verdicts.json of this schema.
    """
    try:
        verdicts = read_json(path)
        overall, culprit = verdicts["overall"], verdicts["first_culprit"]
        blame = f", first culprit {culprit['stage']} {culprit['tap']}" if culprit else ""
        if verdicts["schema_version"] != SCHEMA_VERSION or overall not in GATE_EXIT:
            raise KeyError("schema_version")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: is no verdicts.json of schema {SCHEMA_VERSION} ({error}). Run snakemake again."
        ) from None
    print(f"{path}: {overall}{blame}")
    return GATE_EXIT[overall]

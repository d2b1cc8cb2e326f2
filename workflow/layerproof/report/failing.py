"""What does not pass, with stages that fail alike as one entry: for terminal, page, gate and programs."""

from __future__ import annotations

import re
from collections.abc import Sequence

from layerproof.report.sentences import fit, nearest, not_handed_over
from layerproof.report.words import NOT_COMPARED, Comparison, with_period
from layerproof.shapes import ChainComparison, Diagnosis, Failure


def failures(
    comparisons: Sequence[Comparison], chains: Sequence[ChainComparison], diagnoses: Sequence[Diagnosis]
) -> list[Failure]:
    """Groups the stages that do not pass, in the order of their first stages.

    Stages fail alike if the same tap goes wrong first, by the same cause or, without one, in the same way. Stages that
    ended as error or missing are alike if their reasons differ only in numbers and names of stages. Behind them comes
    the captured chain, if that is where the port goes wrong.
    """
    by_stage = {diagnosis["stage"]: diagnosis for diagnosis in diagnoses}
    groups: dict[tuple[str | None, ...], list[Failure]] = {}
    for comparison in comparisons:
        if comparison["status"] != "pass":
            one = _failure(comparison, by_stage.get(comparison["stage"]))
            groups.setdefault((one["status"], one["tap"], one["cause"], _kind(one)), []).append(one)
    return [*map(_together, groups.values()), *map(_of_chain, (chain for chain in chains if chain["first_wrong"]))]


def _failure(comparison: Comparison, diagnosis: Diagnosis | None) -> Failure:
    stage, status = comparison["stage"], comparison["status"]
    entry: Failure = {
        "status": status,
        "stages": [stage],
        "tap": None,
        "excess": None,
        "cause": None,
        "text": with_period(comparison["reason"].removeprefix(f"{stage}: ")),
        "help": [],
        "place": None,
    }
    culprit = diagnosis["culprits"][0] if diagnosis and diagnosis["culprits"] else None
    failing = next((name for name, tap in comparison["taps"].items() if tap["status"] == "fail"), None)
    name = culprit["tap"] if culprit else failing
    if status in NOT_COMPARED or name is None:
        return entry
    tap = comparison["taps"][name]
    entry["tap"] = name
    entry["excess"] = culprit["excess"] if culprit and tap["status"] != "fail" else tap["excess"]
    entry["text"] = with_period(tap["reason"] or "The tap is wrong with the golden's taps before it.")
    entry["place"] = (comparison.get("port") or {}).get("places", {}).get(name)
    if culprit and culprit["cause"]:
        cause = culprit["cause"]
        entry["cause"] = cause["name"]
        entry["text"] = f"As if the port had {cause['text']}: {fit(cause, culprit['tried'])}."
    elif culprit:
        entry["text"] = " ".join([*culprit["findings"], _capital(entry["text"]), *nearest(culprit)])
        entry["help"] = not_handed_over(name, comparison)
    return entry


def _capital(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _kind(failure: Failure) -> str | None:
    """What failures without a cause share: NaN and Inf or none, or without a number, their text but for numbers and names
    of stages.
    """
    if failure["cause"]:
        return None
    if failure["excess"] is not None:
        return "not finite" if re.search(r"\b(NaN|Inf)\b", failure["text"]) else None
    return _without_numbers(failure["text"])


def _without_numbers(text: str) -> str:
    """A text without its numbers and names of stages."""
    return re.sub(r"\blayer_\d+\b|\b(embed|norm|lm_head)\b|\d+(\.\d+)?(e[+-]?\d+)?", "#", text)


def _together(group: Sequence[Failure]) -> Failure:
    """One entry for stages that fail alike, as far off as the worst. What is found in the first alone is said of it."""
    together = group[0].copy()
    found = {_without_numbers(one["text"].partition(". ")[0]) for one in group}
    if len(found) > 1 and together["tap"] and not together["cause"]:
        together["text"] = f"In {together['stages'][0]}: {together['text']}"
    together["stages"] = [stage for one in group for stage in one["stages"]]
    together["excess"] = max((one["excess"] for one in group if one["excess"] is not None), default=None)
    return together


def _of_chain(chain: ChainComparison) -> Failure:
    first = chain["first_wrong"] or ""
    entry = chain["stages"][first]
    how = f"in chain {chain['chain']}, although it passes alone"
    return {
        "status": "fail",
        "stages": [first],
        "tap": None,
        "excess": entry.get("excess"),
        "cause": None,
        "text": f"It goes wrong from its own input {how}: {entry['why']}."
        if entry.get("own_input")
        else f"The port goes wrong by this stage at the latest {how}.",
        "help": [],
        "place": None,
    }

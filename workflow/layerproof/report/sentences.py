"""The verdict of the report in sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from layerproof.measure.rule import GROUP_LIMIT, furthest
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.model.stages import ranges
from layerproof.report.words import (
    NOT_COMPARED,
    Comparison,
    all_taps,
    counted,
    listed,
    share,
    with_period,
)
from layerproof.taps import unseen_before
from layerproof.wording import times

EXACT = 0.01
"""Below this R, a cause explains a tap exactly: the port's error is negligible compared with a rounding."""
CLOSE = 0.5
"""Below this share of what is allowed, a cause explains a tap closely."""

OWN_MODULE = "xla"
"""The port.backend that runs a module of the user's own, which can hand over any tap."""
SHOWN = 3
"""How many reasons why stages could not run the verdict gives."""


# Sentences


def verdict_sentences(
    culprit: Mapping[str, Any] | None,
    comparisons: Sequence[Comparison],
    chains: Sequence[Mapping[str, Any]],
    diagnoses: Sequence[Mapping[str, Any]],
    limit: float,
) -> list[str]:
    """The result, as one would say it to a colleague: the first sentence is the verdict. `culprit` is the run's first."""
    stopped = [comparison for comparison in comparisons if comparison["status"] in NOT_COMPARED]
    agreeing = sum(tap["status"] == "pass" for _, _, tap in all_taps(comparisons))
    if culprit:
        failed = sum(comparison["status"] == "fail" for comparison in comparisons)
        counts = f"{failed} of {counted(len(comparisons), 'stage')} {'fails' if failed == 1 else 'fail'}."
        culprits = {diagnosis["stage"]: diagnosis["culprits"] for diagnosis in diagnoses if diagnosis["culprits"]}
        order = [comparison["stage"] for comparison in comparisons]
        before = [one for one in stopped if order.index(one["stage"]) < order.index(culprit["stage"])]
        return [
            *(_first_stopped(before) if before else []),
            *_culprit(culprit, comparisons, culprits.get(culprit["stage"], [])),
            *_other_culprits(culprit["stage"], culprits),
            counts,
            *_passing_on(culprit["stage"], comparisons, chains),
            *_captured(chains, alone=False),
            *_first_stopped([one for one in stopped if one not in before]),
        ]
    if not agreeing:
        return ["No stage was compared, so the port has no verdict.", *_first_stopped(stopped)]
    if stopped:
        passed = len(comparisons) - len(stopped)
        rest = f"The other {counted(passed, 'stage')} {'passes' if passed == 1 else 'pass'}." if passed else ""
        return [*_first_stopped(stopped), *([rest] if rest else [])]
    broken = [chain for chain in chains if chain["status"] in NOT_COMPARED]
    if broken:
        stopped_at = [(stage, entry) for stage, entry in broken[0]["stages"].items() if entry["status"] in NOT_COMPARED]
        at = [f" at {stage}: {with_period(entry['reason'])}" for stage, entry in stopped_at[:1]]
        return [
            f"Every stage passes alone, but chain {broken[0]['chain']} broke{at[0] if at else '.'}",
            *_captured(chains, alone=False),
            f"{counted(len(comparisons), 'stage')} and {counted(agreeing, 'tap')} agree with the golden.",
        ]
    if any(chain["first_wrong"] for chain in chains):
        return [
            *_captured(chains, alone=True),
            f"{counted(len(comparisons), 'stage')} and {counted(agreeing, 'tap')} agree with the golden.",
        ]
    missing = sum(tap["status"] == "missing" for _, _, tap in all_taps(comparisons))
    every = f"All {len(comparisons)} stages" if len(comparisons) > 1 else f"{comparisons[0]['stage']} alone"
    scope = (
        f"{every} and {counted(agreeing, 'tap')} agree with the golden"
        if not missing
        else f"{counted(len(comparisons), 'stage')} and {counted(agreeing, 'tap')} agree with the golden, "
        f"{counted(missing, 'tap')} could not be compared"
    )
    near, rule = _margin(comparisons, limit)
    return [
        f"{scope}{near}.",
        *rule,
        *_captured(chains, alone=True),
        *_end_to_end(chains),
    ]


_AS_CHAIN = (
    "{} got an input that was not captured, so only how far it strays from the golden's own trajectory is known."
)


def _captured(chains: Sequence[Mapping[str, Any]], alone: bool) -> list[str]:
    """The result for the captured compiled model, if there is one; `alone` says whether every stage passes alone."""
    for chain in chains:
        if chain["chain"] == CAPTURED:
            first = chain["first_wrong"]
            order = [stage for stage, entry in chain["stages"].items() if entry["status"] not in NOT_COMPARED]
            if not order:
                return []
            own = [stage for stage in order if chain["stages"][stage].get("own_input")]
            others = [stage for stage in order if stage not in own]
            said = [_AS_CHAIN.format(ranges(others))] if own and others else []
            if not first and own:
                return [f"The captured compiled model is right from the captured inputs of {ranges(own)}.", *said]
            if not first:
                return [
                    f"The captured compiled model strays no further than a correct port does ({ranges(order)}). Its inputs "
                    "were not captured, so a smaller error would not show."
                ]
            before = order[: order.index(first)]
            where = f"{f'after {before[-1]}, ' if before else ''}by {first} at the latest"
            if first in own:
                where = f"at {first}: from its captured input, {chain['stages'][first]['why']}"
            if not alone:
                return [f"The captured compiled model goes wrong {where}.", *said]
            return [
                f"Every stage passes alone, but the captured compiled model goes wrong {where}.",
                *said,
                "The mistake is neither in the code of the stages nor in their weights as they ran here. Look at what "
                "compiling the full model adds: other weights or prompts, ranks and their slices, constants, compiler "
                "flags, kernels.",
            ]
    return []


def _culprit(
    first: Mapping[str, Any], comparisons: Sequence[Comparison], culprits: Sequence[Mapping[str, Any]]
) -> list[str]:
    """The first culprit with its cause, or with the findings on its error, and the other mistakes in its stage."""
    stage, name = first["stage"], first["tap"]
    order = [comparison["stage"] for comparison in comparisons]
    ran = all(one["status"] not in NOT_COMPARED for one in comparisons[: order.index(stage)])
    where = f"{stage} is the first stage {'' if ran else 'of those that ran '}that goes wrong, at {name}"
    tap = comparisons[order.index(stage)]["taps"][name]
    if not culprits or not culprits[0]["cause"]:
        because = _because(tap, culprits)
        is_located = _nonfinite(tap) or tap.get("count") == 0  # the reason itself says where
        located = culprits[0]["findings"] if culprits and not is_located else []
        leading, *known = [*located[:1], because, *located[1:]]
        sentences = [f"{where}: {_lower(leading)}", *known, *(nearest(culprits[0]) if culprits else [])]
    else:
        cause = culprits[0]["cause"]
        fits = fit(cause, culprits[0]["tried"])
        sentences = [f"{where}: it behaves as if the port had {cause['text']}.", f"{fits[0].upper()}{fits[1:]}."]
        sentences += [f"That holds where it is not NaN or Inf. {_because(tap, culprits)}"] if _nonfinite(tap) else []
    return sentences + _in_the_same_stage(culprits)


def _because(tap: Mapping[str, Any], culprits: Sequence[Mapping[str, Any]]) -> str:
    """Why a tap failed, as a sentence."""
    because = tap["reason"] or f"with the golden's taps before it, {_too_far_off(culprits[0])}"
    return with_period(because[0].upper() + because[1:])


def _too_far_off(culprit: Mapping[str, Any]) -> str:
    """By how much a culprit is wrong in the teacher-forced run."""
    if culprit["excess"] is None:
        return "it is another one"
    return f"the error is {times(culprit['excess'])} what is allowed"


def _nonfinite(tap: Mapping[str, Any]) -> bool:
    """Whether a tap fails because of NaN or Inf; its reason then says so."""
    found = tap.get("nonfinite")
    return bool(found and (found["port_differs"]["count"] or found["reference_differs"]["count"]))


def _lower(sentence: str) -> str:
    """A sentence that continues after a colon, with a lower-case first letter; R and NaN stay."""
    return sentence if sentence[:2] in ("R ", "Na") else sentence[0].lower() + sentence[1:]


def fit(cause: Mapping[str, Any], tried: int) -> str:
    """How well a cause explains its tap, and how well the next best of the candidates that were tried does."""
    if cause["excess"] is None:  # a tap of integers
        how = f"but for {counted(int(cause['R_explained']), 'token')}" if cause["R_explained"] else "exactly"
    else:
        how = (
            "exactly" if cause["R_explained"] < EXACT else "closely" if cause["excess"] < CLOSE else "within the noise"
        )
    matches = f"with this mistake put into the golden, the port matches it {how}"
    runner_up = cause["runner_up"]
    if not runner_up:
        return f"{matches}; none of the other {tried - 1} candidates comes near" if tried > 1 else matches
    if runner_up["excess"] is None:
        far = f"leaves {counted(int(runner_up['R_explained']), 'token')} that differ"
    elif runner_up["excess"] <= 1:
        return f"{matches}; so it does with {runner_up['text']}, which fits less well"
    else:
        far = f"is {times(runner_up['excess'])} too far off"
    return f"{matches}; the next best of {tried} candidates {far}"


def nearest(culprit: Mapping[str, Any]) -> list[str]:
    """Sentences on a culprit without a cause."""
    if not culprit["tried"]:
        return [] if culprit["findings"] else ["No known mistake shows first at this tap."]
    best = culprit["nearest"]
    none = f"None of the {culprit['tried']} known mistakes that were tried explains it"
    if not best:
        return [f"{none} or comes near."]
    left = f"{times(best['excess'])} what is allowed" if best["excess"] else "tokens that differ"
    return [f"{none}; the nearest, as if the port had {best['text']}, leaves {left}."]


def _in_the_same_stage(culprits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Other taps of the first failing stage that go wrong by themselves.

    They are grouped: by the same cause, by another, by none known.
    """
    first = culprits[0]["cause"] if culprits else None
    by_cause: dict[str | None, list[str]] = {}
    for culprit in culprits[1:]:
        by_cause.setdefault(culprit["cause"] and culprit["cause"]["text"], []).append(culprit["tap"])
    sentences = []
    for text, taps in by_cause.items():
        where = f"{listed(taps)} {'is' if len(taps) == 1 else 'are'} wrong"
        if text is None:
            sentences.append(f"In this stage {where} by {'itself' if len(taps) == 1 else 'themselves'} too.")
        elif first and text == first["text"]:
            sentences.append(f"{where} in the same way.")
        else:
            sentences.append(f"In this stage {where} too, as if the port had {text}.")
    return sentences


def _other_culprits(first: str, culprits: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The other stages that fail, grouped by the mistakes in them."""

    def mistakes(stage: str) -> tuple[tuple[str, str | None], ...]:
        return tuple((one["tap"], one["cause"] and one["cause"]["text"]) for one in culprits[stage])

    alike: dict[tuple[tuple[str, str | None], ...], list[str]] = {}
    for stage in culprits:
        if stage != first:
            alike.setdefault(mistakes(stage), []).append(stage)
    sentences = []
    for wrong, stages in alike.items():
        fails = "fails" if len(stages) == 1 else "fail"
        if first in culprits and wrong == mistakes(first):
            sentences.append(f"{ranges(stages)} {fails} in the same way.")
            continue
        by_text: dict[str | None, list[str]] = {}
        for tap, text in wrong:
            by_text.setdefault(text, []).append(tap)
        parts = [f"at {listed(taps)}{f', as if the port had {text}' if text else ''}" for text, taps in by_text.items()]
        located = culprits[stages[0]][0]["findings"] if len(stages) == 1 and not wrong[0][1] else []
        sentences.append(" ".join([f"{ranges(stages)} {fails} {'; and '.join(parts)}.", *located[:1]]))
    return sentences


def _passing_on(first: str, comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stages after the first culprit that are right, and whose chained output is wrong only because of their input."""
    order = [comparison["stage"] for comparison in comparisons]
    behind = [one["stage"] for one in comparisons[order.index(first) + 1 :] if one["status"] == "pass"]
    through = [chain["stages"] for chain in chains if first in chain["stages"]]
    chained = {stage for stages in through for stage, entry in stages.items() if entry["status"] == "pass"}
    passing = [stage for stage in behind if stage in chained]
    if not passing:
        return []
    return [
        f"{ranges(passing).replace(', lm_head', ' and lm_head')} "
        f"{'is right and only passes' if len(passing) == 1 else 'are right and only pass'} the error on."
    ]


def _margin(comparisons: Sequence[Comparison], limit: float) -> tuple[str, list[str]]:
    """How sure a pass is: how much of the allowed error the worst tap uses, and a sentence on what is allowed."""
    found = [(furthest(tap, limit), stage, name) for stage, name, tap in all_taps(comparisons) if "band" in tap]
    used = [(quotient, stage, name, where) for (quotient, where), stage, name in found if quotient is not None]
    if not used:
        return "", []
    most, stage, name, where = max(used, key=lambda one: one[0])
    rule = (
        f"A tap fails above {limit:g} times the error of legitimate variants of the golden, or above "
        f"{GROUP_LIMIT * limit:g} times at its worst token, head, channel block or expert. Smaller mistakes do not show."
    )
    at = f" at {where}" if where else ""
    return f", with at most {share(most)} of the allowed error ({name} of {stage}{at})", [rule]


def diagnosis_sentences(diagnosis: Mapping[str, Any], comparison: Comparison) -> list[tuple[str | None, str]]:
    """(tap, what is wrong there) for a stage that fails, and sentences on all of its taps under None."""
    if diagnosis["reason"]:
        return [(None, f"Not diagnosed: {with_period(diagnosis['reason'])}")]
    lines: list[tuple[str | None, str]] = []
    explained = diagnosis["together"] and diagnosis["together"]["explains"]
    for culprit in diagnosis["culprits"]:
        cause = culprit["cause"]
        known = (
            [f"As if the port had {cause['text']} ({cause['name']}): {fit(cause, culprit['tried'])}."]
            if cause
            else [*nearest(culprit), *not_handed_over(culprit["tap"], comparison)]
        )
        found = "Wrong by itself" if culprit["forced"] else "Fails, although no tap fails when its inputs are right"
        if explained and not cause:
            found = "Also wrong, although the mistakes found explain the output: the stage may not use the value of this tap"
        if culprit["excess"] is not None and culprit["excess"] > 1:  # otherwise NaN or Inf is wrong
            found += f", {times(culprit['excess'])} what is allowed" + (f" at {culprit['at']}" if culprit["at"] else "")
            found += " with the golden's taps before it" if culprit["forced"] else ""
        found += "."
        lines.append((culprit["tap"], " ".join([found, *known, *culprit["findings"]])))
    together = diagnosis["together"]
    if together:
        these = "this mistake" if len(together["causes"]) == 1 else "these mistakes"
        if together["explains"]:
            text = "gives the port's output"
        elif together["excess"] is None:
            text = "does not yet give the port's output"
        else:
            text = f"is still {times(together['excess'])} too far from the port's output"
        lines.append((None, f"With {these} put in, the golden {text}."))
    return lines


def not_handed_over(tap: str, comparison: Comparison) -> list[str]:
    """The line to add to a port, if a mistake that shows first at `tap` may lie at taps that it does not hand over."""
    missing = [name for name, one in comparison["taps"].items() if one["status"] == "missing"]
    seen = [name for name in comparison["taps"] if name not in missing]
    between = [name for name in missing if name in unseen_before(tap, seen)]
    if not between or (comparison.get("port") or {}).get("backend") != OWN_MODULE:
        return []
    return [
        f"The port does not hand over {listed(between)}, where the mistake may lie as well. To look there, add lines such "
        f'as x = tap("{between[0]}", x) to forward (from layerproof.taps import tap).'
    ]


def _first_stopped(stopped: Sequence[Comparison]) -> list[str]:
    """The stages that could not run, by reason: those with errors or, if there are none, the first missing one."""
    errors = [comparison for comparison in stopped if comparison["status"] == "error"]
    by_reason: dict[str, list[str]] = {}
    for comparison in errors or stopped[:1]:
        by_reason.setdefault(comparison["reason"].removeprefix(f"{comparison['stage']}: "), []).append(
            comparison["stage"]
        )
    sentences = [
        f"{ranges(stages)} could not be compared: {with_period(reason)}"
        for reason, stages in list(by_reason.items())[:SHOWN]
    ]
    named = sum(map(len, list(by_reason.values())[:SHOWN]))
    rest = len(stopped) - named
    return [*sentences, *([f"Nor could {counted(rest, 'more stage')}."] if rest else [])]


def _end_to_end(chains: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"On its own outputs (chain {chain['chain']}) the port predicts the same token as the golden at "
        f"{share(chain['logits']['argmax'])} of the positions."
        for chain in chains
        if chain["logits"]
    ]

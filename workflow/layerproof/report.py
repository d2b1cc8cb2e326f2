"""results/report.html: the verdict in a sentence, what it rests on, and for each stage what to do about it.

The page is whole in itself: the plots are inside, nothing is fetched, and it can be read without JavaScript. This
module turns the files of a run into words and numbers; the template lays them out.
"""

import base64
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layerproof import metrics, report_audit, surroundings
from layerproof.captured import CHAIN as CAPTURED
from layerproof.fingerprint import REPOSITORY
from layerproof.manifest import git_state
from layerproof.stages import EMBED, LM_HEAD, NORM, layer_of, ranges
from layerproof.taps import OUT, in_order

Comparison = Mapping[str, Any]

NOT_COMPARED = ("error", "missing")
EXACT = 0.01
"""Below this R a cause is said to explain a tap exactly: the port's error is next to nothing beside a rounding."""
FEW_LENGTHS = 8
"""Up to as many prefill lengths are named."""
SHOWN = 3
"""Reasons why stages could not run that the verdict gives."""
FIXED = {
    "max_abs": f"max abs < {metrics.FIXED_MAX_ABS:g}",
    "mean_abs": f"mean abs < {metrics.FIXED_MEAN_ABS:g}",
    "close": f"{metrics.FIXED_CLOSE:.0%} of the elements close",
    "cosine": f"cosine > {metrics.FIXED_CORRELATION:g}",
    "pearson": f"Pearson > {metrics.FIXED_CORRELATION:g}",
}


def render(
    template: Path,
    verdicts: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    chains: Sequence[Mapping[str, Any]],
    diagnoses: Sequence[Mapping[str, Any]],
    plots: Mapping[str, Path],
    unused: Sequence[str],
    audit: Mapping[str, Any],
    trimmed: Sequence[Mapping[str, Any]],
    preflights: Sequence[Mapping[str, Any]],
    spec: Mapping[str, Any],
) -> str:
    """The report as HTML.

    `verdicts`, `comparisons` (in the order of the stages), `chains` and `diagnoses` are the contents of
    results/verdicts.json, results/compare, results/compare/chain and results/diagnosis; `plots` are SVG files by stage,
    `map` and `depth`; `unused` names the tensors of the checkpoint that no stage loads; `audit`, `trimmed` and
    `preflights` (golden, port) are the contents of the files of that name; `spec` is the job's, with the resolved `config`.
    """
    environment = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "brackets": metrics.brackets, "share": share}
    config = spec["config"]
    images = {name: _data_uri(path) for name, path in plots.items()}
    limit = config["compare"]["limit"]
    headline, *details = verdict_sentences(verdicts, comparisons, chains, diagnoses, limit)
    by_stage = {diagnosis["stage"]: diagnosis for diagnosis in diagnoses}
    return environment.get_template(template.name).render(
        overall=verdicts["overall"],
        headline=headline,
        details=details,
        compared=what_was_compared(comparisons, chains, config),
        not_compared=[*what_was_not_compared(comparisons, chains, config), *_unused(unused)],
        map=images.get("map"),
        depth=images.get("depth"),
        logits=_logits(comparisons, chains),
        stages=[_stage(one, by_stage.get(one["stage"]), chains, images, limit) for one in comparisons],
        chains=chains,
        audit=report_audit.section(audit, trimmed),
        limit=limit,
        config=yaml.safe_dump(config, sort_keys=False, allow_unicode=True),
        preflights=preflights,
        origin=_origin(),
        surroundings=_surroundings(preflights, spec),
    )


# Sentences


def verdict_sentences(
    verdicts: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    chains: Sequence[Mapping[str, Any]],
    diagnoses: Sequence[Mapping[str, Any]],
    limit: float,
) -> list[str]:
    """What came out, as one would say it to a colleague: the first sentence is the verdict."""
    stopped = [comparison for comparison in comparisons if comparison["status"] in NOT_COMPARED]
    culprit = verdicts["first_culprit"]
    agreeing = sum(tap["status"] == "pass" for _, _, tap in _taps(comparisons))
    if culprit:
        failed = sum(comparison["status"] == "fail" for comparison in comparisons)
        counts = f"{failed} of {_count(len(comparisons), 'stage')} {'fails' if failed == 1 else 'fail'}."
        culprits = {diagnosis["stage"]: diagnosis["culprits"] for diagnosis in diagnoses if diagnosis["culprits"]}
        order = [comparison["stage"] for comparison in comparisons]
        before = [one for one in stopped if order.index(one["stage"]) < order.index(culprit["stage"])]
        return [
            *(_first_stopped(before) if before else []),
            *_culprit(culprit, comparisons, culprits.get(culprit["stage"], []), limit),
            *_other_culprits(culprit["stage"], culprits),
            counts,
            *_passing_on(culprit["stage"], comparisons, chains),
            *_captured(chains, alone=False),
            *_first_stopped([one for one in stopped if one not in before]),
        ]
    if not agreeing:
        return ["Nothing was compared, so nothing is known of the port.", *_first_stopped(stopped)]
    if stopped:
        passed = len(comparisons) - len(stopped)
        rest = f"The other {_count(passed, 'stage')} {'passes' if passed == 1 else 'pass'}." if passed else ""
        return [*_first_stopped(stopped), *([rest] if rest else [])]
    broken = [chain for chain in chains if chain["status"] in NOT_COMPARED]
    if broken:
        stage, entry = next(
            (stage, entry) for stage, entry in broken[0]["stages"].items() if entry["status"] in NOT_COMPARED
        )
        return [
            f"Every stage passes alone, but chain {broken[0]['chain']} broke at {stage}: {_stopped(entry['reason'])}",
            *_captured(chains, alone=False),
            f"{_count(len(comparisons), 'stage')} and {_count(agreeing, 'tap')} agree with the golden.",
        ]
    if any(chain["first_wrong"] for chain in chains):
        return [
            *_captured(chains, alone=True),
            f"{_count(len(comparisons), 'stage')} and {_count(agreeing, 'tap')} agree with the golden.",
        ]
    missing = sum(tap["status"] == "missing" for _, _, tap in _taps(comparisons))
    stage, name, R = _largest_R(comparisons)
    every = f"all {len(comparisons)} stages" if len(comparisons) > 1 else f"{stage} alone"
    scope = (
        f"{every} and {_count(agreeing, 'tap')} agree with the golden"
        if not missing
        else f"{_count(len(comparisons), 'stage')} and {_count(agreeing, 'tap')} agree with the golden, "
        f"{_count(missing, 'tap')} could not be looked at"
    )
    return [
        f"The port passes: {scope} (largest R {number(R)} at {stage} {name}).",
        *_margin(comparisons, limit),
        *_captured(chains, alone=True),
        *_end_to_end(chains),
    ]


def _captured(chains: Sequence[Mapping[str, Any]], alone: bool) -> list[str]:
    """What came out of the compiled model that was captured, if one was; `alone` if every stage passes alone."""
    for chain in chains:
        if chain["chain"] == CAPTURED:
            first = chain["first_wrong"]
            order = [stage for stage, entry in chain["stages"].items() if entry["status"] not in NOT_COMPARED]
            if not order:
                return []
            if not first:
                return [f"The compiled model that was captured strays no further than right ones do ({ranges(order)})."]
            before = order[: order.index(first)]
            where = f"{f'behind {before[-1]}, ' if before else ''}by {first}"
            if not alone:
                return [f"The compiled model that was captured goes wrong {where}."]
            return [
                f"Every stage passes alone, but the compiled model that was captured goes wrong {where}.",
                "What is wrong is in neither the stages' code nor their weights as they were run here, but in what "
                "compiling the whole adds: other weights or prompts, ranks and their slices, constants, compiler flags, "
                "kernels.",
            ]
    return []


def _culprit(
    first: Mapping[str, Any], comparisons: Sequence[Comparison], culprits: Sequence[Mapping[str, Any]], limit: float
) -> list[str]:
    """The first culprit with its cause, or with what is known of its error, and what else is wrong in its stage."""
    stage, name = first["stage"], first["tap"]
    order = [comparison["stage"] for comparison in comparisons]
    ran = all(one["status"] not in NOT_COMPARED for one in comparisons[: order.index(stage)])
    where = f"{stage} is the first {'' if ran else 'of those that ran '}that goes wrong, at {name}"
    tap = comparisons[order.index(stage)]["taps"][name]
    if not culprits or not culprits[0]["cause"]:
        because = _because(tap, culprits, limit)
        told = _nonfinite(tap) or tap.get("count") == 0  # by the reason itself
        located = culprits[0]["findings"] if culprits and not told else []
        leading, *known = [*located[:1], because, *located[1:]]
        sentences = [f"{where}: {_lower(leading)}", *known, *(_nearest(culprits[0]) if culprits else [])]
    else:
        cause = culprits[0]["cause"]
        sentences = [f"{where}: it behaves as if the port had {cause['text']} ({_explained(cause)})."]
        sentences += (
            [f"Where it is not NaN or Inf, that is. {_because(tap, culprits, limit)}"] if _nonfinite(tap) else []
        )
    return sentences + _in_the_same_stage(culprits)


def _because(tap: Mapping[str, Any], culprits: Sequence[Mapping[str, Any]], limit: float) -> str:
    """What made a tap fail, as a sentence."""
    R, allowed, where = metrics.deciding(tap, limit)
    because = tap["reason"] or f"it is wrong by R {number(culprits[0]['R'])} where its input is right"
    if R is not None and allowed < R and not _nonfinite(tap):
        because = f"R is {_above(R, allowed)}{f' at {where}' if where else ''} where {allowed:.4g} is allowed"
    return _stopped(because[0].upper() + because[1:])


def _nonfinite(tap: Mapping[str, Any]) -> bool:
    """Whether a tap fails by NaN or Inf, which its reason then tells."""
    found = tap.get("nonfinite")
    return bool(found and (found["port_differs"]["count"] or found["reference_differs"]["count"]))


def _lower(sentence: str) -> str:
    """A sentence as it goes on behind a colon; R and NaN stay."""
    return sentence if sentence[:2] in ("R ", "Na") else sentence[0].lower() + sentence[1:]


def _explained(cause: Mapping[str, Any]) -> str:
    """How well a cause explains its tap, and how well the next does."""
    runner_up = cause["runner_up"]
    exact = cause["R_explained"] < EXACT
    best = "explains it exactly" if exact else f"explains it to R = {number(cause['R_explained'])}"
    return f"{best}; next best {number(runner_up['R_explained'])}" if runner_up else f"{best}; nothing else comes near"


def _nearest(culprit: Mapping[str, Any]) -> list[str]:
    """What is to be said of a culprit without a cause."""
    if not culprit["tried"]:
        return [] if culprit["findings"] else ["No known mistake shows first at this tap."]
    nearest = culprit["nearest"]
    if not nearest:
        return [f"None of the {culprit['tried']} known mistakes that were tried explains it or comes near."]
    return [
        f"None of the {culprit['tried']} known mistakes that were tried explains it; the nearest, as if the port had "
        f"{nearest['text']}, leaves R {number(nearest['R_explained'])}."
    ]


def _in_the_same_stage(culprits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Other taps of the first failing stage that are wrong of themselves: by the same cause, by another, by none known."""
    first = culprits[0]["cause"] if culprits else None
    by_cause: dict[str | None, list[str]] = {}
    for culprit in culprits[1:]:
        by_cause.setdefault(culprit["cause"] and culprit["cause"]["text"], []).append(culprit["tap"])
    sentences = []
    for text, taps in by_cause.items():
        where = f"{_listed(taps)} {'is' if len(taps) == 1 else 'are'} wrong"
        if text is None:
            sentences.append(f"In this stage {where} too, and not only because of that.")
        elif first and text == first["text"]:
            sentences.append(f"In the same way {where}.")
        else:
            sentences.append(f"In this stage {where} too, as if the port had {text}.")
    return sentences


def _other_culprits(first: str, culprits: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """The other stages that fail, by what is wrong in them."""

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
        parts = [
            f"at {_listed(taps)}{f', as if the port had {text}' if text else ''}" for text, taps in by_text.items()
        ]
        located = culprits[stages[0]][0]["findings"] if len(stages) == 1 and not wrong[0][1] else []
        sentences.append(" ".join([f"{ranges(stages)} {fails} {'; and '.join(parts)}.", *located[:1]]))
    return sentences


def _passing_on(first: str, comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]]) -> list[str]:
    """Stages behind the first culprit that are right, and whose chained output is wrong only because of what feeds them."""
    order = [comparison["stage"] for comparison in comparisons]
    behind = [one["stage"] for one in comparisons[order.index(first) + 1 :] if one["status"] == "pass"]
    through = [chain["stages"] for chain in chains if first in chain["stages"]]
    chained = {stage for stages in through for stage, entry in stages.items() if entry["status"] == "pass"}
    passing = [stage for stage in behind if stage in chained]
    if not passing:
        return []
    return [
        f"{ranges(passing)} {'is right and only passes' if len(passing) == 1 else 'are right and only pass'} the error on."
    ]


def _margin(comparisons: Sequence[Comparison], limit: float) -> list[str]:
    """How sure a pass is: how much of what is allowed the worst tap uses."""
    used = []
    for stage, name, tap in _taps(comparisons):
        if tap.get("kind") == "float":
            R, allowed = metrics.decisive(tap, limit)
            used += [(R / allowed, stage, name, "")] if R is not None else []
            groups = metrics.group_limits(tap, limit)
            used += [(R / allowed, stage, name, f" at {metrics.place(tap, kind)}") for kind, R, allowed in groups]
    if not used:
        return []
    most, stage, name, where = max(used)
    return [
        f"{name} of {stage} comes nearest to its limit, with {share(most)} of the error that is allowed{where}. More than "
        f"{limit:g} times what legitimate variants of the golden reach at a tap would have failed, and more than "
        f"{metrics.GROUP_LIMIT * limit:g} times what they reach at its worst token, head, channel block or expert; less "
        "would not have been seen."
    ]


def _diagnosis(diagnosis: Mapping[str, Any], limit: float) -> list[tuple[str | None, str]]:
    """(tap, what is wrong there) of a stage that fails, and what is to be said of all of them."""
    if diagnosis["reason"]:
        return [(None, f"Not diagnosed: {_stopped(diagnosis['reason'])}")]
    lines: list[tuple[str | None, str]] = []
    explained = diagnosis["together"] and diagnosis["together"]["explains"]
    for culprit in diagnosis["culprits"]:
        cause = culprit["cause"]
        known = (
            [f"As if the port had {cause['text']} ({cause['name']}; {_explained(cause)})."]
            if cause
            else _nearest(culprit)
        )
        found = "Wrong of itself" if culprit["forced"] else "Fails, though no tap does when what feeds it is right"
        if explained and not cause:
            found = (
                "Wrong too, though the mistakes named account for the output: its value may be dropped behind the tap"
            )
        if culprit["R"] is not None and culprit["R"] > limit:  # or it is NaN or Inf that is wrong
            found += f", R {number(culprit['R'])}" + (f" at {culprit['at']}" if culprit["at"] else "")
            found += " with the golden's taps before it" if culprit["forced"] else ""
        found += "."
        lines.append((culprit["tap"], " ".join([found, *known, *culprit["findings"]])))
    together = diagnosis["together"]
    if together:
        these = "this mistake" if len(together["causes"]) == 1 else "these mistakes"
        text = "gives the port's output" if together["explains"] else "does not yet give the port's output"
        lines.append((None, f"With {these} put in, the golden {text}: R {number(together['R_explained'])}."))
    return lines


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _first_stopped(stopped: Sequence[Comparison]) -> list[str]:
    """The stages that could not run, by reason: the errors, or if there are none what is missing."""
    errors = [comparison for comparison in stopped if comparison["status"] == "error"]
    by_reason: dict[str, list[str]] = {}
    for comparison in errors or stopped[:1]:
        by_reason.setdefault(comparison["reason"].removeprefix(f"{comparison['stage']}: "), []).append(
            comparison["stage"]
        )
    sentences = [
        f"{ranges(stages)} could not be compared: {_stopped(reason)}"
        for reason, stages in list(by_reason.items())[:SHOWN]
    ]
    named = sum(map(len, list(by_reason.values())[:SHOWN]))
    rest = len(stopped) - named
    return [*sentences, *([f"Nor could {_count(rest, 'more stage')}."] if rest else [])]


def _end_to_end(chains: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"On its own outputs (chain {chain['chain']}) it finds the same token most likely as the golden at "
        f"{share(chain['logits']['argmax'])} of the positions."
        for chain in chains
        if chain["logits"]
    ]


def _largest_R(comparisons: Sequence[Comparison]) -> tuple[str, str, float | None]:
    """Stage, tap and R; a tap of integers has no R and is the largest only if there is no other."""
    return max(
        ((stage, name, tap.get("R")) for stage, name, tap in _taps(comparisons)),
        key=lambda found: -1 if found[2] is None else found[2],
    )


def what_was_compared(
    comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> dict[str, str]:
    """What the verdict rests on, by topic."""
    counts = {"pass": 0, "fail": 0, "error": 0, "missing": 0}
    for _, _, tap in _taps(comparisons):
        counts[tap["status"]] += 1
    golden, port, ranks = config["golden"], config["port"], config["parallel"]["tp"]
    compared = {
        "Model": config["model"]["checkpoint"],
        "Stages": f"{len(comparisons)}: {ranges([comparison['stage'] for comparison in comparisons])}",
        "Taps": f"{sum(counts.values())}: "
        + ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        "Chains": ", ".join(f"{chain['chain']} ({_count(len(chain['stages']), 'stage')})" for chain in chains)
        + ("; their R and gain do not decide" if chains else "none")
        + (f", but how far {CAPTURED} strays does" if any(chain["chain"] == CAPTURED for chain in chains) else ""),
        "Inputs": _inputs_text(_prompt_lengths(comparisons), config["inputs"]),
        "Golden": f"{golden['dtype']} on {_devices(comparisons, 'golden')}; truth in float32",
        "Port": f"{port['module'] if port['backend'] != 'transformers' else 'transformers'}, {port['dtype']} on "
        f"{f'{ranks} ranks on ' if ranks > 1 else ''}{_devices(comparisons, 'port')}",
        "Rule": f"a tap passes if R is at most {config['compare']['limit']:g} times what legitimate variants of the golden "
        "reach, where R is the error of the port in units of the error of the golden, both against the fp32 truth, taken "
        "element by element; its "
        f"worst token, channel block, head and expert at most {metrics.GROUP_LIMIT * config['compare']['limit']:g} times",
    }
    kinds = {port["kind"] for port in _sides(comparisons, "port") if "kind" in port}
    lengths, names = set(_prompt_lengths(comparisons)), {name for _, name, _ in _taps(comparisons)}
    if kinds and lengths:
        covered = (_count(len(kinds), "kind"), _count(len(lengths), "prefill length"), _count(len(names), "tap"))
        which = f" ({', '.join(map(str, sorted(lengths)))} tokens)" if len(lengths) <= FEW_LENGTHS else ""
        compared["Covered"] = f"{covered[0]} of stage × {covered[1]}{which} × {covered[2]}, where a stage has them"
    graphs = [port["compilations"] for port in _sides(comparisons, "port") if "compilations" in port]
    if kinds and graphs:
        compared["Compilation"] = f"{_count(sum(graphs), 'graph')} compiled for {_count(len(kinds), 'kind')} of stage"
    return compared


def _unused(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 5} more (results/weights/unused.json)" if len(names) > 5 else ""
    loads = "is in the checkpoint and loaded" if len(names) == 1 else "are in the checkpoint and loaded"
    return [f"{_count(len(names), 'tensor')} {loads} by no stage: {', '.join(names[:5])}{more}."]


def what_was_not_compared(
    comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
) -> list[str]:
    """What a reader might think was looked at and was not, one sentence each."""
    sentences = []
    stages = [comparison["stage"] for comparison in comparisons]
    ends = [end for end in (EMBED, NORM, LM_HEAD) if end not in stages]
    layers = [layer for stage in stages if (layer := layer_of(stage)) is not None]
    gaps = bool(layers) and layers != list(range(layers[0], layers[-1] + 1))
    if config["layers"] != "all" and (ends or gaps):  # 0-61 may be all there are
        also = f", nor were {', '.join(ends)}" if ends else ""
        sentences.append(f"Layers other than {config['layers']} were not compared{also} (layers in config.yaml).")
    reasons: dict[tuple[str | None, str], list[str]] = {}
    extra: dict[str, list[str]] = {}
    for comparison in comparisons:
        stage, taps = comparison["stage"], comparison["taps"]
        if not taps or all(tap["status"] in NOT_COMPARED for tap in taps.values()):
            reasons.setdefault((None, comparison["reason"]), []).append(stage)
            continue
        for name, tap in taps.items():
            if tap["status"] in NOT_COMPARED:
                reasons.setdefault((name, tap["reason"]), []).append(stage)
        for name in comparison["statistics"]["port"]:
            if name not in taps:
                extra.setdefault(name, []).append(stage)
    for (name, reason), found in reasons.items():
        reason = reason.removeprefix(f"{found[0]}: ")
        what = f"{name} of {ranges(found)}" if name else ranges(found)
        sentences.append(f"{what} not compared: {_stopped(reason)}")
    for name, found in extra.items():
        sentences.append(f"{name} of {ranges(found)} not compared: the golden has no such tap.")
    left_out = {one["stage"]: one["routing"]["left_out"] for one in comparisons if one["routing"]}
    if sum(left_out.values()):
        sentences.append(
            f"Taps after the router leave out {_count(sum(left_out.values()), 'token')} whose experts were nearly tied "
            f"({ranges([stage for stage, count in left_out.items() if count])})."
        )
    alone = [stage for stage in stages if not any(stage in chain["stages"] for chain in chains)]
    if not chains:
        sentences.append("No chain was run, so errors that compound from stage to stage were not looked at.")
    elif alone:
        sentences.append(f"{ranges(alone)} ran alone only: no chain has them.")
    for chain in chains:
        for stage, entry in chain["stages"].items():
            if entry["status"] == "error":
                what = "has not" if chain["chain"] == CAPTURED else "ends at"
                sentences.append(f"Chain {chain['chain']} {what} {stage}: {_stopped(entry['reason'])}")
    if config["parallel"]["tp"] > 1 and "cpu" in {port.get("device") for port in _sides(comparisons, "port")}:
        sentences.append(
            "The port's ranks ran on the CPU in torch alone: a device and its collectives were not looked at."
        )
    sentences += _experts_without_tokens(comparisons)
    lengths = _prompt_lengths(comparisons)
    if lengths:
        sentences.append(f"Positions from {max(lengths)} on: no prompt is longer.")
    sentences.append("Whole prompts in one pass were compared; decoding token by token with a cache was not.")
    return sentences


def _experts_without_tokens(comparisons: Sequence[Comparison]) -> list[str]:
    """Experts of which a comparison knows nothing."""
    idle, experts = {}, 0
    for stage, _, tap in _taps(comparisons):
        if tap.get("expert_R"):
            experts = len(tap["expert_R"])
            idle[stage] = tap["expert_R"].count(None)
    found = {stage: count for stage, count in idle.items() if count}
    if not found:
        return []
    least, most = min(found.values()), max(found.values())
    count = f"{most}" if least == most else f"{least} to {most}"
    return [f"In {ranges(list(found))} {count} of the {experts} experts had no token that was compared."]


def _devices(comparisons: Sequence[Comparison], side: str) -> str:
    found = dict.fromkeys(str(facts["device"]) for facts in _sides(comparisons, side) if "device" in facts)
    return ", ".join(found) or "an unknown device"


def _sides(comparisons: Sequence[Comparison], side: str) -> list[Mapping[str, Any]]:
    """What a side says of how it ran, for each stage that does say so."""
    return [comparison[side] for comparison in comparisons if comparison.get(side)]


def _inputs_text(lengths: Sequence[int], inputs: Mapping[str, Any]) -> str:
    file = inputs["prompts"] or inputs["token_ids"]
    if not lengths:
        return file
    prompts = f"{_count(len(lengths), 'prompt')} of {min(lengths)} to {max(lengths)} tokens"
    return f"{prompts}, {sum(lengths)} in all, from {file}"


def _prompt_lengths(comparisons: Sequence[Comparison]) -> list[int]:
    """Tokens compared by prompt, from the tap with the most: those after a router may leave some out."""
    lengths = (
        [len(row) - row.count(None) for row in tap["token_R"]] for _, _, tap in _taps(comparisons) if "token_R" in tap
    )
    return max(lengths, key=sum, default=[])


def _taps(comparisons: Iterable[Comparison]) -> list[tuple[str, str, Mapping[str, Any]]]:
    """(stage, tap name, tap) of them all, in order."""
    return [(one["stage"], name, tap) for one in comparisons for name, tap in one["taps"].items()]


# Tables


def _logits(comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each run that reached the logits."""
    runs = [("lm_head alone", one.get("logits")) for one in comparisons if one["stage"] == LM_HEAD]
    runs += [(f"chain {chain['chain']}", chain["logits"]) for chain in chains if LM_HEAD in chain["stages"]]
    return [{"run": run, "logits": logits, "greedy": _greedy(logits) if logits else None} for run, logits in runs]


def _greedy(logits: Mapping[str, Any]) -> str:
    pairs = list(zip(logits["greedy"]["golden"], logits["greedy"]["port"], strict=True))
    wrong = [f"prompt {i}: {port} for {golden}" for i, (golden, port) in enumerate(pairs) if golden != port]
    return f"{len(pairs) - len(wrong)} of {len(pairs)}" + (f" ({'; '.join(wrong[:8])})" if wrong else "")


def _stage(
    comparison: Comparison,
    diagnosis: Mapping[str, Any] | None,
    chains: Sequence[Mapping[str, Any]],
    images: Mapping[str, str],
    limit: float,
) -> dict[str, Any]:
    """What the template shows of one stage."""
    stage, taps = comparison["stage"], comparison["taps"]
    compared = {name: tap for name, tap in taps.items() if tap["status"] not in NOT_COMPARED}
    out = taps.get(OUT, {})
    worst = _largest_R([comparison]) if compared else None
    statistics = comparison.get("statistics", {})
    golden, port = statistics.get("golden", {}), statistics.get("port", {})
    return {
        "name": stage,
        "status": comparison["status"],
        "reason": comparison["reason"],
        "diagnosis": _diagnosis(diagnosis, limit) if diagnosis else [],
        "first_failing": next((name for name, tap in taps.items() if tap["status"] == "fail"), None),
        "out_R": out.get("R"),
        "worst": {"tap": worst[1], "R": worst[2]} if worst and worst[2] is not None else None,
        "taps": [_tap(name, tap, limit) for name, tap in taps.items()] if compared else [],
        "names": list(taps),
        "failing": [(name, tap["reason"]) for name, tap in taps.items() if tap["status"] == "fail"],
        "routing": _routing_text(comparison["routing"]) if comparison["routing"] else None,
        "fixed": [(text, out["fixed"][key]) for key, text in FIXED.items()] if "fixed" in out else [],
        "statistics": [
            {
                "tap": name,
                "sides": [golden.get(name, {}), port.get(name, {})],
                "padding": taps.get(name, {}).get("padding"),
            }
            for name in in_order({*golden, *port})
        ],
        "chained": [(chain["chain"], chain["stages"][stage]) for chain in chains if stage in chain["stages"]],
        "plot": images.get(stage),
        "port": comparison.get("port") or {},
        "commands": [
            f"snakemake --cores 1 --forcerun results/port/{stage}.h5 -- results/compare/{stage}.json",
            *(
                _chain_command(chain["chain"], stage)
                for chain in chains
                if stage in chain["stages"] and chain["chain"] != CAPTURED
            ),
        ],
    }


def _tap(name: str, tap: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """A row of the table of taps; the metrics keep their names of metrics.compare."""
    return {
        "name": name,
        "status": tap["status"],
        "tap": tap,
        "metrics": tap.get("kind"),
        "text": _exact_text(tap) if tap.get("kind") == "exact" else tap["reason"],
        "decisive": metrics.decisive(tap, limit) if tap.get("kind") == "float" else None,
        "worst": _worst_place(tap),
        "nonfinite": _nonfinite_text(tap) if tap.get("kind") == "float" else None,
        "fixed": _fixed_text(tap["fixed"]) if "fixed" in tap else None,
    }


def _exact_text(tap: Mapping[str, Any]) -> str:
    differ, golden = tap["mismatches"]["port_truth"], tap["mismatches"]["golden_truth"]
    where = f", first at {metrics.brackets(tap['first']['port_truth'])}" if differ else ""
    return f"integers: differ from the truth in {differ} of {tap['tokens']} tokens{where}; the golden in {golden}"


def _routing_text(routing: Mapping[str, Any]) -> str:
    flips, excused = routing["flips"], routing["excused"]
    if flips is None:
        return (
            f"the port's choice of experts is not known, so tokens at which it takes the other of two near-ties count in "
            f"full. The taps after the router leave {_count(routing['golden_flips'], 'token')} out, at which the golden "
            f"chooses other experts than the truth."
        )
    if not flips and not routing["golden_flips"]:
        return f"port and golden choose the same experts as the truth for all {_count(routing['tokens'], 'token')}."
    return (
        f"the port chooses other experts than the truth for {flips} of {_count(routing['tokens'], 'token')}, "
        f"the golden for {routing['golden_flips']}. Of the port's flips {excused} "
        f"{'is a near-tie' if excused == 1 else 'are near-ties'} and excused: "
        f"the noise explains margins up to {number(routing['noise_margin'])}, "
        f"the largest is {number(routing['largest_margin'])}. "
        f"The taps after the router leave {_count(routing['left_out'], 'token')} out."
    )


def _worst_place(tap: Mapping[str, Any]) -> dict[str, Any] | None:
    """The token, head, block of channels or expert with the largest R."""
    places = []
    if token := tap.get("worst_token"):
        places.append({"R": token["R"], "text": f"token {metrics.brackets(token['index'])}"})
    if head := tap.get("worst_head"):
        places.append({"R": head["R"], "text": f"head {head['index']}"})
    if expert := tap.get("worst_expert"):
        places.append({"R": expert["R"], "text": f"tokens of expert {expert['index']}"})
    if block := tap.get("worst_block"):
        first, end = block["channels"]
        places.append(
            {"R": block["R"], "text": f"channel {first}" if end - first == 1 else f"channels {first}–{end - 1}"}
        )
    return max(places, key=lambda place: place["R"], default=None)


def _nonfinite_text(tap: Mapping[str, Any]) -> str:
    found = [
        f"{side}: {seen['nan']} NaN, {seen['inf']} Inf, first {metrics.brackets(seen['first'])}"
        for side, seen in ((side, tap["nonfinite"][side]) for side in ("port", "golden", "truth"))
        if seen["nan"] or seen["inf"]
    ]
    return "; ".join(found) or "none"


def _fixed_text(fixed: Mapping[str, bool | None]) -> str:
    known = [holds for holds in fixed.values() if holds is not None]
    return f"{sum(known)} of {len(known)}"


def _chain_command(chain: str, stage: str) -> str:
    """Runs a stage of a chain and those after it that it reaches."""
    return f"snakemake --cores 1 --forcerun results/chain/{chain}/{stage}.h5 -- results/compare/chain/{chain}.json"


# Surroundings


def _origin() -> dict[str, str]:
    git = git_state()
    state = {True: ", with uncommitted changes", False: "", None: ""}[git["dirty"]]
    return {"Layerproof": _version(), "Commit": f"{git['commit']}{state}"}


def _surroundings(preflights: Sequence[Mapping[str, Any]], spec: Mapping[str, Any]) -> dict[str, dict[str, list[str]]]:
    """Software and hardware by name, of the golden, the port and this report; empty where one has no such thing."""
    parts = {"Software": "software", "Hardware": "hardware"}
    here = {"software": surroundings.software(spec), "hardware": surroundings.hardware()}
    all_of_them = [*preflights, here]
    return {
        title: {
            name: [one[part].get(name, "") for one in all_of_them]
            for name in dict.fromkeys(name for one in all_of_them for name in one[part])
        }
        for title, part in parts.items()
    }


def _version() -> str:
    try:
        return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    except (OSError, KeyError, tomllib.TOMLDecodeError):
        return "unknown"


def _data_uri(svg: Path) -> str:
    """An image apart from the page's own names and styles, which inlined SVGs would share with it."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"


# Words and numbers


def number(value: float | None, digits: int = 3) -> str:
    """A number with this many significant digits, or a dash for one that is undefined."""
    if value is None:
        return "–"
    if value == 0 or (isinstance(value, int) and abs(value) < 1e6):
        return str(int(value))
    if not 1e-3 <= abs(value) < 1e6:
        mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:.{max(0, digits - 1 - math.floor(math.log10(abs(value))))}f}"


def _above(value: float, limit: float) -> str:
    """The value with as many digits as it takes to be seen above the limit."""
    texts = (number(value, digits) for digits in range(3, 18))
    return next(text for text in texts if float(text) > limit)


def share(value: float | None) -> str:
    """A share in percent; 100 % only if it is all."""
    if value is None:
        return "–"
    return f"{math.floor(value * 1000) / 10:g} %"


def _stopped(sentence: str) -> str:
    return sentence if sentence.endswith((".", "!", "?")) else f"{sentence}."


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")

"""What the report says about what was compared and what was not."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from layerproof.compare.relaid import LAST_TOKENS
from layerproof.config import Config, Inputs
from layerproof.measure.rule import GROUP_LIMIT
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.model.stages import EMBED, LM_HEAD, NORM, layer_of, ranges
from layerproof.report.words import NOT_COMPARED, Comparison, all_taps, counted, listed, with_period

FEW_LENGTHS = 8
"""Up to this many prefill lengths are listed one by one."""


def what_was_compared(
    comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]], config: Config
) -> dict[str, str]:
    """The basis of the verdict, by topic."""
    counts = {"pass": 0, "fail": 0, "error": 0, "missing": 0}
    for _, _, tap in all_taps(comparisons):
        counts[tap["status"]] += 1
    golden, port, parallel = config.golden, config.port, config.parallel
    axes = {axis: size for axis, size in parallel.of_stage.items() if size > 1}
    over = " x ".join(f"{axis} {size}" for axis, size in axes.items())
    ranks = f"{math.prod(axes.values())} ranks ({over}, by {parallel.launcher}) on " if axes else ""
    code = [*(["transformers"] if port.backend == "transformers" else []), *([port.module] if port.module else [])]
    compared = {
        "Model": config.model.checkpoint,
        "Stages": f"{len(comparisons)}: {ranges([comparison['stage'] for comparison in comparisons])}",
        "Taps": f"{sum(counts.values())}: "
        + ", ".join(f"{count} {status}" for status, count in counts.items() if count),
        "Chains": ", ".join(f"{chain['chain']} ({counted(len(chain['stages']), 'stage')})" for chain in chains)
        + ("; their R and gain do not affect the verdict" if chains else "none")
        + (f", but whether {CAPTURED} is right does" if any(chain["chain"] == CAPTURED for chain in chains) else ""),
        "Inputs": _inputs_text(_prompt_lengths(comparisons), config.inputs),
        "Golden": f"{golden.dtype} on {_devices(comparisons, 'golden')}; truth in float32",
        "Port": f"{' with '.join(code)}, {port.dtype} on {ranks}{_devices(comparisons, 'port')}",
        "Rule": f"a tap passes if R is at most {config.compare.limit:g} times what legitimate variants of the golden "
        "reach, where R is the error of the port in units of the error of the golden, both against the fp32 truth, "
        "element by element; its "
        f"worst token, channel block, head and expert at most {GROUP_LIMIT * config.compare.limit:g} times",
    }
    signatures = {port["kind"] for port in _sides(comparisons, "port") if "kind" in port}
    lengths, names = set(_prompt_lengths(comparisons)), {name for _, name, _ in all_taps(comparisons)}
    if signatures and lengths:
        covered = (
            counted(len(signatures), "kind"),
            counted(len(lengths), "prefill length"),
            counted(len(names), "tap"),
        )
        which = f" ({', '.join(map(str, sorted(lengths)))} tokens)" if len(lengths) <= FEW_LENGTHS else ""
        compared["Covered"] = f"{covered[0]} of stage × {covered[1]}{which} × {covered[2]}, where a stage has them"
    graphs = [port["compilations"] for port in _sides(comparisons, "port") if "compilations" in port]
    if signatures and graphs:
        compared["Compilation"] = (
            f"{counted(sum(graphs), 'graph')} compiled for {counted(len(signatures), 'kind')} of stage"
        )
    return compared


def unused_tensors(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - 5} more (results/weights/unused.json)" if len(names) > 5 else ""
    return [f"No stage loads {counted(len(names), 'tensor')} of the checkpoint: {', '.join(names[:5])}{more}."]


def what_was_not_compared(
    comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]], config: Config
) -> list[str]:
    """What a reader might think was compared but was not, one sentence each."""
    sentences = []
    stages = [comparison["stage"] for comparison in comparisons]
    ends = [end for end in (EMBED, NORM, LM_HEAD) if end not in stages]
    layers = [layer for stage in stages if (layer := layer_of(stage)) is not None]
    gaps = bool(layers) and layers != list(range(layers[0], layers[-1] + 1))
    if config.layers != "all" and (ends or gaps):  # 0-61 may be all layers
        also = f", nor were {', '.join(ends)}" if ends else ""
        sentences.append(f"Layers other than {config.layers} were not compared{also} (layers in config.yaml).")
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
    for name, found in extra.items():
        reasons[name, "the golden has no such tap"] = found
    together: dict[tuple[str, tuple[str, ...]], list[str | None]] = {}
    for (name, reason), found in reasons.items():
        together.setdefault((reason.removeprefix(f"{found[0]}: "), tuple(found)), []).append(name)
    for (reason, found), names in together.items():
        taps = [name for name in names if name]
        what = f"{listed(taps)} of {ranges(found)}" if taps else ranges(found)
        were = "was" if len(taps) == 1 or (not taps and len(found) == 1) else "were"
        said = reason.replace("this tap", "these taps") if len(taps) > 1 else reason
        sentences.append(f"{what} {were} not compared: {with_period(said)}")
    sentences += _layouts(comparisons)
    sentences += _modules_without_tap(comparisons)
    sentences += _near_ties(comparisons)
    alone = [stage for stage in stages if not any(stage in chain["stages"] for chain in chains)]
    if not chains:
        sentences.append("No chain was run, so errors that compound from stage to stage were not checked.")
    elif alone:
        sentences.append(f"{ranges(alone)} ran only in isolation: no chain includes them.")
    for chain in chains:
        for stage, entry in chain["stages"].items():
            if entry["status"] == "error":
                what = "lacks" if chain["chain"] == CAPTURED else "ends at"
                sentences.append(f"Chain {chain['chain']} {what} {stage}: {with_period(entry['reason'])}")
    if config.parallel.tp > 1 and "cpu" in {port.get("device") for port in _sides(comparisons, "port")}:
        sentences.append(
            "The port's ranks ran on the CPU, in torch alone: no device and none of its collectives were checked."
        )
    sentences += _experts_without_tokens(comparisons)
    lengths = _prompt_lengths(comparisons)
    if lengths:
        sentences.append(f"Positions from {max(lengths)} on: no prompt is longer.")
    sentences.append("Whole prompts in one pass were compared; decoding token by token with a cache was not.")
    return sentences


def _near_ties(comparisons: Sequence[Comparison]) -> list[str]:
    """At how many tokens the taps after a choice were left out."""
    found: dict[str, dict[str, int]] = {}
    for comparison in comparisons:
        routing = {"the router": comparison["routing"]} if comparison["routing"] else {}
        for choice, summary in {**routing, **comparison.get("choices", {})}.items():
            if summary["left_out"]:
                found.setdefault(choice, {})[comparison["stage"]] = summary["left_out"]
    return [
        f"Taps after {choice} leave out {counted(sum(left_out.values()), 'token')} "
        f"{'whose experts' if choice == 'the router' else 'whose places'} were nearly tied ({ranges(list(left_out))})."
        for choice, left_out in found.items()
    ]


def _layouts(comparisons: Sequence[Comparison]) -> list[str]:
    """Which taps the port has in another layout, and whether it computes other tokens than the golden."""
    found: dict[str, dict[str, list[str]]] = {}
    positions: dict[int, list[str]] = {}
    chosen: dict[str, int] = {}
    logits: list[str] = []
    for comparison in comparisons:
        if "other_choices" in (comparison.get("port") or {}):
            chosen[comparison["stage"]] = len(comparison["port"]["other_choices"])
        if "positions" in (comparison.get("port") or {}):
            positions.setdefault(comparison["port"]["positions"], []).append(comparison["stage"])
        for name, tap in comparison["taps"].items():
            if tap.get("layout") == LAST_TOKENS:
                logits.append(
                    "The port returns the logits of each prompt's last token and no others, so those of the others were "
                    f"not compared ({comparison['stage']})."
                )
            elif tap.get("layout"):
                found.setdefault(tap["layout"], {}).setdefault(name, []).append(comparison["stage"])
    sentences = [
        f"The port's {listed(list(taps))} {'has' if len(taps) == 1 else 'have'} the layout {layout} and "
        f"{'was' if len(taps) == 1 else 'were'} read in the golden's "
        f"({ranges(list(dict.fromkeys(stage for stages in taps.values() for stage in stages)))})."
        for layout, taps in found.items()
    ]
    if chosen:
        sentences.append(
            f"With taps the port chooses other experts at {counted(sum(chosen.values()), 'token')} than without "
            f"({ranges(list(chosen))}), at near-ties. The outputs that were compared are those with taps."
        )
    sentences += [
        f"The port computes {count} positions ({ranges(stages)}). Those beyond the prompts are padding and were left out."
        for count, stages in positions.items()
    ]
    return sentences + logits


def _modules_without_tap(comparisons: Sequence[Comparison]) -> list[str]:
    """Which modules of the golden return what no tap shows."""
    untapped: dict[str, list[str]] = {}
    for comparison in comparisons:
        if modules := (comparison.get("golden") or {}).get("without_tap"):
            untapped.setdefault(modules, []).append(comparison["stage"])
    return [
        f"No tap shows {modules} at work ({ranges(stages)}), so a mistake there shows at the taps after it."
        for modules, stages in untapped.items()
    ]


def _experts_without_tokens(comparisons: Sequence[Comparison]) -> list[str]:
    """A sentence on the experts that a comparison knows nothing about."""
    idle, experts = {}, 0
    for stage, _, tap in all_taps(comparisons):
        if tap.get("expert_R"):
            experts = len(tap["expert_R"])
            idle[stage] = tap["expert_R"].count(None)
    found = {stage: count for stage, count in idle.items() if count}
    if not found:
        return []
    least, most = min(found.values()), max(found.values())
    count = f"{most}" if least == most else f"{least} to {most}"
    return [f"In {ranges(list(found))}, {count} of the {experts} experts received no token that was compared."]


def _devices(comparisons: Sequence[Comparison], side: str) -> str:
    found = dict.fromkeys(str(facts["device"]) for facts in _sides(comparisons, side) if "device" in facts)
    return ", ".join(found) or "an unknown device"


def _sides(comparisons: Sequence[Comparison], side: str) -> list[Mapping[str, Any]]:
    """A side's facts about how it ran, for each stage that reports them."""
    return [comparison[side] for comparison in comparisons if comparison.get(side)]


def _inputs_text(lengths: Sequence[int], inputs: Inputs) -> str:
    file = inputs.prompts or inputs.token_ids or ""
    if not lengths:
        return file
    prompts = f"{counted(len(lengths), 'prompt')} of {min(lengths)} to {max(lengths)} tokens"
    return f"{prompts}, {sum(lengths)} in all, from {file}"


def _prompt_lengths(comparisons: Sequence[Comparison]) -> list[int]:
    """Tokens compared in each prompt, from the tap with the most: taps after a router may leave some out."""
    lengths = (
        [len(row) - row.count(None) for row in tap["token_R"]]
        for _, _, tap in all_taps(comparisons)
        if "token_R" in tap
    )
    return max(lengths, key=sum, default=[])

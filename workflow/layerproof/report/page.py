"""results/report.html: the verdict in a sentence, its basis, and what to do about each stage.

The page is self-contained: it embeds the plots, fetches nothing, and can be read without JavaScript. This module turns
the files of a run into words and numbers; the template lays them out.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from layerproof import __version__, environment
from layerproof.config import Config, as_json
from layerproof.measure.rule import FIXED_CLOSE, FIXED_CORRELATION, FIXED_MAX_ABS, FIXED_MEAN_ABS, overall_limit
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.model.stages import LM_HEAD
from layerproof.report import weights as report_weights
from layerproof.report.coverage import unused_tensors, what_was_compared, what_was_not_compared
from layerproof.report.manifest import git_state
from layerproof.report.sentences import diagnosis_sentences, largest_R, verdict_sentences
from layerproof.report.words import NOT_COMPARED, Comparison, counted, number, share
from layerproof.taps import OUT, merged
from layerproof.tensors.tensor import brackets

TEMPLATE = Path(__file__).parent / "templates/report.html.j2"
FIXED = {
    "max_abs": f"max abs < {FIXED_MAX_ABS:g}",
    "mean_abs": f"mean abs < {FIXED_MEAN_ABS:g}",
    "close": f"{FIXED_CLOSE:.0%} of the elements close",
    "cosine": f"cosine > {FIXED_CORRELATION:g}",
    "pearson": f"Pearson > {FIXED_CORRELATION:g}",
}


def render(
    template: Path,
    glossary: Path,
    verdicts: Mapping[str, Any],
    comparisons: Sequence[Comparison],
    chains: Sequence[Mapping[str, Any]],
    diagnoses: Sequence[Mapping[str, Any]],
    plots: Mapping[str, Path],
    unused: Sequence[str],
    audit: Mapping[str, Any],
    pruned: Sequence[Mapping[str, Any]],
    preflights: Sequence[Mapping[str, Any]],
    config: Config,
    software: Mapping[str, str],
) -> str:
    """The report as HTML.

    `glossary` is docs/glossary.md. `verdicts`, `comparisons` (in the order of the stages), `chains` and `diagnoses` are
    the contents of results/verdicts.json, results/compare, results/compare/chain and results/diagnosis. `plots` are SVG
    files by stage, plus `map` and `depth`. `unused` names the tensors of the checkpoint that no stage loads. `audit`,
    `pruned` and `preflights` (golden, port) are the contents of the files of that name. `software` are the versions on
    this host.
    """
    jinja = Environment(
        loader=FileSystemLoader(template.parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    jinja.filters |= {"number": number, "brackets": brackets, "share": share}
    images = {name: _data_uri(path) for name, path in plots.items()}
    limit = config.compare.limit
    headline, *details = verdict_sentences(verdicts, comparisons, chains, diagnoses, limit)
    by_stage = {diagnosis["stage"]: diagnosis for diagnosis in diagnoses}
    return jinja.get_template(template.name).render(
        overall=verdicts["overall"],
        headline=headline,
        details=details,
        compared=what_was_compared(comparisons, chains, config),
        not_compared=[*what_was_not_compared(comparisons, chains, config), *unused_tensors(unused)],
        map=images.get("map"),
        depth=images.get("depth"),
        logits=_logits(comparisons, chains),
        stages=[_stage(one, by_stage.get(one["stage"]), chains, images, limit) for one in comparisons],
        chains=chains,
        audit=report_weights.section(audit, pruned),
        limit=limit,
        config=yaml.safe_dump(as_json(config), sort_keys=False, allow_unicode=True),
        preflights=preflights,
        origin=_origin(),
        environment=_environment(preflights, software),
        words=_glossary(glossary.read_text(encoding="utf-8")),
    )


def _glossary(text: str) -> dict[str, str]:
    """The words of docs/glossary.md and what they mean, without its links to other pages."""
    paragraphs = re.findall(r"^\*\*(.+?)\.\*\* (.+?)\n(?:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return {word: re.sub(r" ?\(\[.*?\]\(.*?\)\)|[`*]", "", " ".join(meaning.split())) for word, meaning in paragraphs}


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
    """The values that the template shows for one stage."""
    stage, taps = comparison["stage"], comparison["taps"]
    compared = {name: tap for name, tap in taps.items() if tap["status"] not in NOT_COMPARED}
    out = taps.get(OUT, {})
    worst = largest_R([comparison]) if compared else None
    statistics = comparison.get("statistics", {})
    golden, port = statistics.get("golden", {}), statistics.get("port", {})
    return {
        "name": stage,
        "status": comparison["status"],
        "reason": comparison["reason"],
        "diagnosis": diagnosis_sentences(diagnosis, limit) if diagnosis else [],
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
            for name in merged([list(golden), list(port)])
        ],
        "chained": [(chain["chain"], chain["stages"][stage]) for chain in chains if stage in chain["stages"]],
        "plot": images.get(stage),
        "port": comparison.get("port") or {},
        "commands": [
            f"layerproof run results/compare/{stage}.json -- --forcerun results/port/{stage}.h5",
            *(
                _chain_command(chain["chain"], stage)
                for chain in chains
                if stage in chain["stages"] and chain["chain"] != CAPTURED
            ),
        ],
    }


def _tap(name: str, tap: Mapping[str, Any], limit: float) -> dict[str, Any]:
    """A row of the table of taps; metrics keep the names that `metrics.compare` gives them."""
    return {
        "name": name,
        "status": tap["status"],
        "tap": tap,
        "metrics": tap.get("kind"),
        "text": _exact_text(tap) if tap.get("kind") == "exact" else tap["reason"],
        "overall_limit": overall_limit(tap, limit) if tap.get("kind") == "float" else None,
        "worst": _worst_place(tap),
        "nonfinite": _nonfinite_text(tap) if tap.get("kind") == "float" else None,
        "fixed": _fixed_text(tap["fixed"]) if "fixed" in tap else None,
    }


def _exact_text(tap: Mapping[str, Any]) -> str:
    differ, golden = tap["mismatches"]["port_truth"], tap["mismatches"]["golden_truth"]
    where = f", first at {brackets(tap['first']['port_truth'])}" if differ else ""
    return f"integers: differ from the truth in {differ} of {tap['tokens']} tokens{where}; the golden in {golden}"


def _routing_text(routing: Mapping[str, Any]) -> str:
    flips, excused = routing["flips"], routing["excused"]
    if flips is None:
        return (
            f"the port's choice of experts is unknown, so tokens at which it chooses the other expert of a near-tie count "
            f"in full. The taps after the router leave out {counted(routing['golden_flips'], 'token')} at which the golden "
            f"chooses other experts than the truth."
        )
    if not flips and not routing["golden_flips"]:
        return f"port and golden choose the same experts as the truth for all {counted(routing['tokens'], 'token')}."
    return (
        f"the port chooses other experts than the truth for {flips} of {counted(routing['tokens'], 'token')}, "
        f"the golden for {routing['golden_flips']}. {excused} of the port's flips "
        f"{'is a near-tie' if excused == 1 else 'are near-ties'} and excused: "
        f"the noise explains margins up to {number(routing['noise_margin'])}, "
        f"the largest is {number(routing['largest_margin'])}. "
        f"The taps after the router leave out {counted(routing['left_out'], 'token')}."
    )


def _worst_place(tap: Mapping[str, Any]) -> dict[str, Any] | None:
    """The token, head, channel block or expert with the largest R."""
    places = []
    if token := tap.get("worst_token"):
        places.append({"R": token["R"], "text": f"token {brackets(token['index'])}"})
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
        f"{side}: {seen['nan']} NaN, {seen['inf']} Inf, first {brackets(seen['first'])}"
        for side, seen in ((side, tap["nonfinite"][side]) for side in ("port", "golden", "truth"))
        if seen["nan"] or seen["inf"]
    ]
    return "; ".join(found) or "none"


def _fixed_text(fixed: Mapping[str, bool | None]) -> str:
    known = [holds for holds in fixed.values() if holds is not None]
    return f"{sum(known)} of {len(known)}"


def _chain_command(chain: str, stage: str) -> str:
    """The command that reruns a stage of a chain and the later stages that its output reaches."""
    return f"layerproof run results/compare/chain/{chain}.json -- --forcerun results/chain/{chain}/{stage}.h5"


# Environment


def _origin() -> dict[str, str]:
    git = git_state()
    state = {True: ", with uncommitted changes", False: "", None: ""}[git["dirty"]]
    return {"Layerproof": __version__, "Commit": f"{git['commit']}{state}"}


def _environment(
    preflights: Sequence[Mapping[str, Any]], software: Mapping[str, str]
) -> dict[str, dict[str, list[str]]]:
    """Software and hardware by name, for the golden, the port and this report; empty where one lacks an entry."""
    parts = {"Software": "software", "Hardware": "hardware"}
    here = {"software": software, "hardware": environment.hardware()}
    all_of_them = [*preflights, here]
    return {
        title: {
            name: [one[part].get(name, "") for one in all_of_them]
            for name in dict.fromkeys(name for one in all_of_them for name in one[part])
        }
        for title, part in parts.items()
    }


def _data_uri(svg: Path) -> str:
    """An image that is separate from the page's own names and styles, which inlined SVGs would share."""
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.read_bytes()).decode()}"

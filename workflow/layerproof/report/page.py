"""results/report.html: the verdict in a sentence, what to do next, and the basis of both.

The page is self-contained: it embeds what it shows and fetches nothing. This module turns the files of a run into words
and numbers; the templates lay them out, and a script makes tables of the numbers of a stage that is opened.
"""

from __future__ import annotations

import base64
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from layerproof import __version__, environment
from layerproof.config import Config, as_json
from layerproof.measure.rule import FIXED_CLOSE, FIXED_CORRELATION, FIXED_MAX_ABS, FIXED_MEAN_ABS
from layerproof.model.captured import CHAIN as CAPTURED
from layerproof.model.stages import LM_HEAD, ranges
from layerproof.report import gate, layout, numbers
from layerproof.report import map as report_map
from layerproof.report import weights as report_weights
from layerproof.report.coverage import unused_tensors, what_was_compared, what_was_not_compared
from layerproof.report.manifest import git_state
from layerproof.report.privacy import public, without_paths
from layerproof.report.sentences import diagnosis_sentences
from layerproof.report.source import CodeFrame
from layerproof.report.words import NOT_COMPARED, Comparison, counted, number, share, worst_tap
from layerproof.shapes import Failure, Verdicts
from layerproof.taps import OUT
from layerproof.wording import times

FIXED = {
    "max_abs": f"max abs < {FIXED_MAX_ABS:g}",
    "mean_abs": f"mean abs < {FIXED_MEAN_ABS:g}",
    "close": f"{FIXED_CLOSE:.0%} of the elements close",
    "cosine": f"cosine > {FIXED_CORRELATION:g}",
    "pearson": f"Pearson > {FIXED_CORRELATION:g}",
}
MOST_PLOTS = 6
"""Plots that the page embeds, one for each group of stages that fail alike; the others are files beside it."""
LOG_LINES = 40
"""Lines that the page shows of the log of a stage that ended as an error."""
NEXT_LINES = 8
"""As many of them stand on the first screen."""


@dataclass(frozen=True)
class Inputs:
    """The files of a run that the page is made of.

    `comparisons` (in the order of the stages), `chains` and `diagnoses` are the contents of results/compare,
    results/compare/chain and results/diagnosis; `verdicts`, `audit`, `pruned` and `preflights` (golden, port) those of
    the files of these names. `plots` are SVG files by stage, plus `depth`. `unused` names the tensors of the checkpoint
    that no stage loads. `software` are the versions on this host. `glossary` is docs/glossary.md, `causes` docs/causes.md,
    and `results` the folder of the run.
    """

    verdicts: Verdicts
    comparisons: Sequence[Comparison]
    chains: Sequence[Mapping[str, Any]]
    diagnoses: Sequence[Mapping[str, Any]]
    plots: Mapping[str, Path]
    unused: Sequence[str]
    audit: Mapping[str, Any]
    pruned: Sequence[Mapping[str, Any]]
    preflights: Sequence[Mapping[str, Any]]
    config: Config
    software: Mapping[str, str]
    glossary: Path
    causes: Path
    results: Path


def render(template: Path, run: Inputs) -> str:
    """The report as HTML; `template` lies beside the others that it includes. With `report.share` it has neither the port's
    source, nor logs, nor the folders of files.
    """
    if run.config.report.share:
        return without_paths(_render(template, replace(run, config=public(run.config))))
    return _render(template, run)


def _render(template: Path, run: Inputs) -> str:
    plotted = _plotted(run)
    images = {name: _data_uri(run.plots[name]) for name in (*plotted, "depth") if name in run.plots}
    found = [_finding(place, one, run, images) for place, one in enumerate(run.verdicts["failures"], start=1)]
    diagnosed = {diagnosis["stage"]: diagnosis for diagnosis in run.diagnoses}
    first = next(iter(run.verdicts["failures"]), None)
    shown = plotted[0] if run.verdicts["overall"] == "pass" and plotted and plotted[0] in images else None
    return layout.load(template).render(
        overall=run.verdicts["overall"],
        headline=run.verdicts["headline"],
        details=run.verdicts["details"],
        findings=found,
        next=_next(first, found[0], gate.chain_of(first, run.verdicts)) if first else None,
        map=report_map.draw(run.comparisons, run.chains),
        counts=_counts(run.comparisons),
        stages=[_stage(one, diagnosed.get(one["stage"]), run) for one in run.comparisons],
        plot_of_pass={"stage": shown, "image": images[shown]} if shown else None,
        depth=images.get("depth"),
        logits=_logits(run.comparisons, run.chains),
        chains=run.chains,
        compared=what_was_compared(run.comparisons, run.chains, run.config),
        not_compared=[
            *what_was_not_compared(run.comparisons, run.chains, run.config),
            *unused_tensors(run.unused),
        ],
        audit=report_weights.section(run.audit, run.pruned),
        config=yaml.safe_dump(as_json(run.config), sort_keys=False, allow_unicode=True),
        preflights=run.preflights,
        origin=_origin(),
        environment=_environment(run.preflights, run.software),
        words=_glossary(run.glossary.read_text(encoding="utf-8")),
        numbers=numbers.as_json(run.comparisons, plotted, run.config.compare.limit),
    )


def _glossary(text: str) -> dict[str, str]:
    """The words of docs/glossary.md and what they mean, without its links to other pages."""
    paragraphs = re.findall(r"^\*\*(.+?)\.\*\* (.+?)\n(?:\n|\Z)", text, re.MULTILINE | re.DOTALL)
    return {word: _plain(meaning) for word, meaning in paragraphs}


def _plain(text: str) -> str:
    """A paragraph of Markdown as text in one line, without links in brackets."""
    return re.sub(r" ?\(\[.*?\]\(.*?\)\)|[`*]", "", " ".join(text.split()))


def about_cause(text: str, name: str) -> list[tuple[str, str]]:
    """The paragraphs of docs/causes.md on a cause, each with its label; of several joined by +, those of all."""
    found = []
    for one in name.split("+"):
        section = re.search(rf"^## {re.escape(one)}\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL)
        paragraphs = (
            re.findall(r"^\*\*(.+?)\*\* (.+?)(?:\n\n|\Z)", section[1], re.MULTILINE | re.DOTALL) if section else []
        )
        found += [(label, _plain(paragraph)) for label, paragraph in paragraphs]
    return found


# What is wrong


def _plotted(run: Inputs) -> list[str]:
    """The stages whose plots the page embeds: the first of each group that fails alike, or the one nearest to its limit."""
    failing = [one["stages"][0] for one in run.verdicts["failures"] if one["status"] == "fail"]
    if failing or not run.comparisons:
        return list(dict.fromkeys(failing))[:MOST_PLOTS]
    worst = [(found["excess"], one["stage"]) for one in run.comparisons if (found := worst_tap(one))]
    return [max(worst)[1]] if worst else []


def _finding(place: int, failure: Failure, run: Inputs, images: Mapping[str, str]) -> dict[str, Any]:
    """The values that the template shows for stages that fail alike."""
    first = failure["stages"][0]
    by_stage = {one["stage"]: one for one in run.comparisons}
    excess = {stage: by_stage[stage]["taps"].get(failure["tap"], {}).get("excess") for stage in failure["stages"]}
    log = _log_of(by_stage[first])
    is_shared = run.config.report.share
    causes = run.causes.read_text(encoding="utf-8") if failure["cause"] else ""
    return {
        **failure,
        "place": place,
        "first": first,
        "stages_text": ranges(failure["stages"]),
        "link": f"{first}/{failure['tap']}" if failure["tap"] else first,
        "number": gate.how_bad(failure) if failure["tap"] else None,
        "chips": [(stage, times(value) if value else None) for stage, value in excess.items()],
        "frame": None if is_shared else gate.frame_of(failure),
        "log": log,
        "log_end": _end_of(run.results / log) if failure["status"] == "error" and not is_shared else None,
        "cause_page": about_cause(causes, failure["cause"]) if failure["cause"] else [],
        "command": gate.next_command(failure, run.verdicts),
        "markdown": gate.markdown_of(failure, with_source=not is_shared),
        "plot": images.get(first) if failure["status"] == "fail" else None,
    }


def _next(failure: Failure, finding: Mapping[str, Any], chain: str | None) -> dict[str, Any]:
    """What to do about the first failure, which may be of a chain."""
    frame: CodeFrame | None = finding["frame"]
    tap = failure["tap"]
    if failure["status"] != "fail":
        first_step = f"Look at the line of your code that the log of {finding['first']} ends with."
    elif frame:
        first_step = "Look at the code above, and at what it calls. It hands over"
    else:
        first_step = "Look at the code that computes" if tap else None
    return {
        "frame": frame,
        "log_end": "\n".join((finding["log_end"] or "").splitlines()[-NEXT_LINES:]),
        "first_step": first_step,
        "tap": tap if failure["status"] == "fail" else None,
        "help": failure["help"],
        "prove": f"Check your fix: this runs {f'chain {chain}' if chain else finding['first']} and what it needs.",
        "command": finding["command"],
        "log": finding["log"],
        "cause": failure["cause"],
        "markdown": finding["markdown"],
    }


def _log_of(comparison: Comparison) -> str:
    """The log of the side that failed, or of the port, relative to results/."""
    side = "golden" if comparison["status"] in NOT_COMPARED and "golden" not in comparison else "port"
    return f"logs/{side}/{comparison['stage']}.log"


def _end_of(log: Path) -> str | None:
    """The last lines of a log, from its traceback on if it has one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    starts = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    first = starts[-1] if starts else max(0, len(lines) - LOG_LINES)
    kept = lines[first:]
    if len(kept) > LOG_LINES:
        kept = [*kept[:3], f"... {len(kept) - LOG_LINES} lines ...", *kept[3 - LOG_LINES :]]
    return "\n".join(line.rpartition("\r")[2] for line in kept)


# Tables


def _counts(comparisons: Sequence[Comparison]) -> dict[str, int]:
    found = Counter(one["status"] for one in comparisons)
    return {status: found[status] for status in ("fail", "error", "missing", "pass") if found[status]}


def _logits(comparisons: Sequence[Comparison], chains: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each run that reached the logits."""
    runs = [("lm_head alone", one.get("logits")) for one in comparisons if one["stage"] == LM_HEAD]
    runs += [(f"chain {chain['chain']}", chain["logits"]) for chain in chains if LM_HEAD in chain["stages"]]
    return [{"run": run, "logits": logits, "greedy": _greedy(logits) if logits else None} for run, logits in runs]


def _greedy(logits: Mapping[str, Any]) -> str:
    pairs = list(zip(logits["greedy"]["golden"], logits["greedy"]["port"], strict=True))
    wrong = [f"prompt {i}: {port} for {golden}" for i, (golden, port) in enumerate(pairs) if golden != port]
    return f"{len(pairs) - len(wrong)} of {len(pairs)}" + (f" ({'; '.join(wrong[:8])})" if wrong else "")


def _stage(comparison: Comparison, diagnosis: Mapping[str, Any] | None, run: Inputs) -> dict[str, Any]:
    """The values that the template shows for one stage."""
    stage, taps, status = comparison["stage"], comparison["taps"], comparison["status"]
    out = taps.get(OUT, {})
    worst = worst_tap(comparison)
    failing = [(name, tap["reason"]) for name, tap in taps.items() if tap["status"] == "fail"]
    through = [chain for chain in run.chains if stage in chain["stages"]]
    told = diagnosis_sentences(diagnosis, comparison) if diagnosis else []
    return {
        "name": stage,
        "status": status,
        "reason": comparison["reason"],
        "short": _short(comparison, failing, worst),
        "sort": _order(status, failing, worst),
        "words": " ".join(f"{text} {tap or ''}" for tap, text in told),
        "diagnosis": told,
        "out_R": out.get("R"),
        "local_error": comparison.get("local_error"),
        "worst": worst,
        "names": list(taps),
        "failing": failing,
        "has_numbers": any(tap["status"] not in NOT_COMPARED for tap in taps.values()),
        "routing": _routing_text(comparison["routing"]) if comparison["routing"] else None,
        "fixed": [(text, out["fixed"][key]) for key, text in FIXED.items()] if "fixed" in out else [],
        "chained": [_chained_text(chain["chain"], chain["stages"][stage]) for chain in through],
        "port": comparison.get("port") or {},
        "logs": [f"logs/{side}/{stage}.log" for side in ("golden", "port")],
        "commands": [
            f"layerproof run results/compare/{stage}.json -- --forcerun results/port/{stage}.h5",
            *(_chain_command(chain["chain"], stage) for chain in through if chain["chain"] != CAPTURED),
        ],
    }


def _order(status: str, failing: Sequence[Any], worst: Mapping[str, Any] | None) -> float:
    """How bad a stage is among others: errors come first, then failures without a number, and missing stages last."""
    if status in NOT_COMPARED:
        return 1e12 if status == "error" else -1.0
    if failing and (worst is None or worst["excess"] <= 1):
        return 1e11
    return worst["excess"] if worst else 0.0


def _short(comparison: Comparison, failing: Sequence[tuple[str, str]], worst: Mapping[str, Any] | None) -> str:
    if comparison["status"] in NOT_COMPARED:
        return str(comparison["reason"])
    if failing:
        name, reason = failing[0]
        excess = comparison["taps"][name].get("excess")
        how = f"{times(excess)} too far off" if excess and excess > 1 else reason
        return f"first at {name}, {how}"
    return f"at most {share(worst['excess'])} of what is allowed, at {worst['tap']}" if worst else "exact"


def _chained_text(chain: str, entry: Mapping[str, Any]) -> str:
    if entry["status"] != "pass":
        return f"In chain {chain}: {entry['status']}, {entry['reason']}"
    found = (
        f"R {number(entry['R'])}, propagated error {number(entry['propagated_error'])}, gain {number(entry['gain'])}"
    )
    said = f"In chain {chain}: it {entry['role'] or 'runs'}; {found}, local error {number(entry['local_error'])}."
    if not entry.get("wrong"):
        return said
    if entry.get("own_input"):
        return f"{said} From its own captured input it is wrong: {entry['why']}."
    return f"{said} It is further from the golden than right models get on their own outputs."


def _routing_text(routing: Mapping[str, Any]) -> str:
    flips, excused = routing["flips"], routing["excused"]
    if flips is None:
        return (
            f"the port's choice of experts is unknown. The taps after the router leave out "
            f"{counted(routing['left_out'], 'token')} at which experts are nearly tied in the truth, or the golden chooses "
            f"others."
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

"""`make bugs`: every bug of the corpus, and clean runs, judged by Layerproof and by the rules that others use.

    python tests/bugs/run.py [--bugs TEXT] [--clean N] [--jobs N] [--output results/bugs.json]

Prints one table, and writes what every rule said of every run. Each bug is in one stage of one model; the other stages are
those of the unchanged port, each fed with the golden's input, so the first stage that fails among them all is what is found.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

from bugs.corpus import BUGS, MINIMAX, MINIMAX_FP8, QWEN3, Bug  # noqa: E402
from layerproof.files import write_json  # noqa: E402

SEED = 0
LENGTHS = (41, 11, 76, 46)
SHIPPED = REPOSITORY / "workflow/ports/minimax_m2.py"
PORTS = {MINIMAX: SHIPPED, MINIMAX_FP8: SHIPPED, QWEN3: REPOSITORY / "tests/ports/qwen3_moe.py"}

# Clean runs
ARCHITECTURES = ("minimax_m2", "llama", "qwen3", "qwen3_moe", "gpt_oss", "gemma3_text")
DTYPES = ("bfloat16", "float16", "float32")
PROMPTS = ((41, 11, 30), (19, 20), (128,))
ATTENTION = ("eager", "sdpa")
SEEDS = (1, 2)
RULES = {
    "layerproof": "Layerproof",
    "fixed": "(a) fixed thresholds",
    "cosine_pearson": "    cosine, Pearson",
    "R": "(b) R <= 1.2 on out",
    "rel_l2": "(c) rel. L2 < 0.05",
}


@dataclass(frozen=True)
class Case:
    """One run without a mistake: the port is transformers' own on XLA, or the one of PORTS."""

    model: str
    seed: int
    lengths: tuple[int, ...]
    dtype: str
    attention: str
    stage: str
    ported: bool


def clean_cases() -> list[Case]:
    """Every architecture, port dtype, prompt length, golden attention and seed; stages by turns; and two other ports."""
    cases = []
    combinations = itertools.product(ARCHITECTURES, DTYPES, PROMPTS, ATTENTION, SEEDS)
    for number, (model, dtype, lengths, attention, seed) in enumerate(combinations):
        if model == "gpt_oss" and attention == "sdpa":
            continue  # it has no such attention
        stage = ("layer_001", "layer_000", "layer_001", "lm_head", "layer_001", "norm")[number % 6]
        cases.append(Case(model, seed, lengths, dtype, attention, stage, ported=False))
    cases += [
        Case(model, seed, lengths, "bfloat16", "eager", stage, ported=True)
        for model in (QWEN3, MINIMAX_FP8)
        for seed, lengths, stage in itertools.product(SEEDS, PROMPTS, ("layer_000", "layer_001"))
    ]
    return cases


def run_bug(bug: Bug, directory: Path) -> dict[str, Any]:
    """Everything that is known of a bug's run, as results/bugs.json holds it."""
    from bugs import harness

    model = _model(bug.model, str(directory))
    source = bug.overlay(PORTS[bug.model].read_text())
    others = _clean_stages(bug.model, str(directory))
    started = time.perf_counter()
    outcome = harness.run(model, bug.stage, source, directory / f"{os.getpid()}", also_loads=bug.also_loads)
    wall_s = time.perf_counter() - started
    failing = [
        stage for stage in model.stages if (outcome.verdicts["layerproof"] if stage == bug.stage else others[stage])
    ]
    first = outcome.culprits[0] if outcome.culprits else None
    cause = first["cause"] if first else None
    return {
        "kind": "bug",
        "name": bug.name,
        "model": bug.model,
        "seed": SEED,
        "dtype": "bfloat16",
        "expected": {"stage": bug.stage, "tap": bug.tap, "cause": bug.cause},
        "found": {
            "stage": failing[0] if failing else None,
            "tap": first["tap"] if first else None,
            "cause": cause["name"] if cause else None,
        },
        "says": bug.says,
        "effect": outcome.effect,
        "verdicts": outcome.verdicts,
        "culprits": outcome.culprits,
        "together": outcome.together,
        "wall_s": round(wall_s, 2),
    }


def run_clean(case: Case, directory: Path) -> dict[str, Any]:
    """A run without a mistake, as results/bugs.json holds it: whatever calls it wrong raises a false alarm."""
    from bugs import harness

    name = f"{case.model}-{case.seed}-{case.attention}-{'-'.join(map(str, case.lengths))}"
    model = _clean_model(case.model, case.seed, case.lengths, case.attention, str(directory / name))
    source = PORTS[case.model].read_text() if case.ported else None
    outcome = harness.run(model, case.stage, source, directory / f"{os.getpid()}", case.dtype, diagnosed=False)
    return {
        "kind": "clean",
        "name": name,
        **asdict(case),
        "expected": None,
        "found": {"stage": case.stage, "tap": next(iter(outcome.failed), None), "cause": None}
        if outcome.verdicts["layerproof"]
        else None,
        "effect": outcome.effect,
        "verdicts": outcome.verdicts,
    }


@cache
def _model(name: str, directory: str) -> Any:
    from bugs import harness

    return harness.make_model(
        name, SEED, Path(directory) / f"{name}-{os.getpid()}", None if name == MINIMAX else LENGTHS
    )


@cache
def _clean_model(name: str, seed: int, lengths: tuple[int, ...], attention: str, directory: str) -> Any:
    from bugs import harness

    return harness.make_model(name, seed, Path(f"{directory}-{os.getpid()}"), lengths, attention)


@cache
def _clean_stages(name: str, directory: str) -> dict[str, bool]:
    """Of every stage of the unchanged port, whether Layerproof fails it."""
    from bugs import harness

    model, source = _model(name, directory), PORTS[name].read_text()
    scratch = Path(directory) / f"{os.getpid()}"
    runs = {stage: harness.run(model, stage, source, scratch, diagnosed=False) for stage in model.stages}
    return {stage: outcome.verdicts["layerproof"] for stage, outcome in runs.items()}


def _work(group: Sequence[Bug | Case], directory: Path) -> list[dict[str, Any]]:
    rows = []
    for one in group:
        said = io.StringIO()  # of libraries and of each fault, which a run's log is for
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                rows.append((run_bug if isinstance(one, Bug) else run_clean)(one, directory))
        except Exception as error:
            name = getattr(one, "name", str(one))
            rows.append({"kind": "error", "name": name, "error": f"{type(error).__name__}: {error}"})
        print(_line(rows[-1]), flush=True)
    return rows


def run_all(cases: Sequence[Bug | Case], jobs: int) -> list[dict[str, Any]]:
    """Runs all cases in that many processes; rows in the order of the cases, clean runs of one golden together."""
    groups: dict[Any, list[Bug | Case]] = {}
    for one in cases:  # a golden is made once in a process: of the bugs' models in each, of a clean run in one
        key = one if isinstance(one, Bug) else (one.model, one.seed, one.lengths, one.attention)
        groups.setdefault(key, []).append(one)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as directory, ProcessPoolExecutor(jobs, mp_context=context) as pool:
        found = pool.map(_work, groups.values(), itertools.repeat(Path(directory)))
        return list(itertools.chain.from_iterable(found))


def _line(row: dict[str, Any]) -> str:
    if row["kind"] == "error":
        return f"ERROR {row['name']}: {row['error']}"
    if row["kind"] == "clean":
        alarm = "FALSE ALARM" if row["found"] else "clean"
        return f"{alarm} {row['name']} {row['stage']} {row['dtype']} {_number(row['effect'])}"
    right = [row["expected"][key] == row["found"][key] for key in ("stage", "tap", "cause")]
    marks = " ".join(f"{key}{'' if ok else '!'}" for key, ok in zip(("stage", "tap", "cause"), right, strict=True))
    detected = "found" if row["verdicts"]["layerproof"] else "MISSED"
    found = "" if all(right) else f" found {row['found']['tap']} {row['found']['cause']}"
    return f"{detected} {row['model']} {row['name']}: {marks} effect {_number(row['effect'])} {row['wall_s']} s{found}"


def _number(effect: float | None) -> str:
    return "undefined" if effect is None else f"{effect:.3g}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The table that `make bugs` prints."""
    bugs = [row for row in rows if row["kind"] == "bug"]
    clean = [row for row in rows if row["kind"] == "clean"]
    found = [row for row in bugs if row["verdicts"]["layerproof"]]
    lines = [f"{'rule':24}{'detected':>12}{'right stage':>14}{'right tap':>12}{'right cause':>14}{'false alarms':>15}"]
    for rule, text in RULES.items():
        detected = f"{sum(row['verdicts'][rule] for row in bugs)}/{len(bugs)}"
        alarms = f"{sum(row['verdicts'][rule] for row in clean)}/{len(clean)}"
        told = ("–", "–", "–")
        if rule == "layerproof":
            told = tuple(
                f"{sum(row['expected'][key] == row['found'][key] for row in of)}/{len(of)}"
                for key, of in (
                    ("stage", found),
                    ("tap", found),
                    ("cause", [row for row in found if row["expected"]["cause"]]),
                )
            )
        lines.append(f"{text:24}{detected:>12}{told[0]:>14}{told[1]:>12}{told[2]:>14}{alarms:>15}")
    described = [row for row in found if row["says"]]
    if described:
        said = sum(any(row["says"] in finding for finding in row["culprits"][0]["findings"]) for row in described)
        lines.append(f"Confined to a head, channel, expert or position, and said so: {said}/{len(described)}")
    return "\n".join(lines)


def main() -> int:
    """Exits with 1 if a run could not be made."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bugs", help="only bugs with this text in their name; none for -")
    parser.add_argument("--clean", type=int, help="only so many clean runs")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/bugs.json")
    args = parser.parse_args()
    cases = [] if args.bugs == "-" else [bug for bug in BUGS if (args.bugs or "") in bug.name]
    rows = run_all([*cases, *clean_cases()[: args.clean]], args.jobs)
    write_json(args.output, {"schema_version": 1, "runs": rows})
    print(table(rows))
    return int(any(row["kind"] == "error" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

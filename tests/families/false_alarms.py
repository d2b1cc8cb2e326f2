"""`make false-alarms N=1000 SEED=S`: how many of N stages of unmodified models Layerproof calls wrong.

    python tests/families/false_alarms.py [--stages N] [--seed S] [--output results/false_alarms.jsonl]

Each case is drawn: a family, sizes, dtypes of golden and port, prompts, and how attention and experts are computed. The port
is the model itself, so every failing stage is a false alarm. A second call with the same seed goes on where the first one
ended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

import numpy as np  # noqa: E402

from families import rows  # noqa: E402

DTYPES = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16"), ("float16", "float32"))
"""Of golden and port."""
ATTENTION = (None, "eager", "sdpa")
EXPERTS = (None, "eager", "batched_mm", "grouped_mm")
PROMPTS = ("short", "long", "padded", "repeated", "one token")
CASES_AT_ONCE = 16
RIGHT = ("pass", "undecided")
"""What a stage of an unmodified model may be: undecided if choices are nearly tied at every token of its prompts."""


def draw(seed: int, number: int) -> dict[str, Any]:
    """The case of this number."""
    from families.configs import judged_types

    random = np.random.default_rng([seed, number])
    types = judged_types()
    golden, port = DTYPES[random.integers(len(DTYPES))]
    return {
        "seed": seed,
        "number": number,
        "model_type": types[random.integers(len(types))],
        "sizes": {
            "hidden": int(random.choice((64, 64, 128))),
            "inner": int(random.choice((64, 96, 160))),
            "experts": int(random.choice((4, 8, 16))),
        },
        "golden": golden,
        "port": port,
        "prompts": PROMPTS[random.integers(len(PROMPTS))],
        "attention": ATTENTION[random.integers(len(ATTENTION))],
        "experts": EXPERTS[random.integers(len(EXPERTS))],
    }


def prompts_of(kind: str, random: np.random.Generator) -> list[list[int]]:
    """Token ids of a kind of prompts; no id is above 89, which every tiny model has."""
    if kind == "short":
        return [random.integers(3, 90, length).tolist() for length in (1, 3, 2)]
    if kind == "long":
        return [random.integers(3, 90, 110).tolist() for _ in range(2)]
    if kind == "padded":
        return [random.integers(3, 90, length).tolist() for length in (40, 2, 9)]
    if kind == "repeated":
        return [random.integers(3, 90, 4).tolist() * 8 for _ in range(2)]
    return [[int(random.integers(3, 90))] * 24]


def judge(case: dict[str, Any], directory: Path) -> dict[str, Any]:
    """The case with `stages`, their status and reason, and `outcome`: judged, or why it was not."""
    from families import survey
    from layerproof.errors import StageError, UserError

    started, said = time.perf_counter(), io.StringIO()
    row = case | {"outcome": "crashed", "stages": {}, "sentence": None}
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            survey.save(case["model_type"], directory / "checkpoint", case["number"], case["sizes"])
            _run_whole(case, directory / "checkpoint")
        except Exception as error:  # DeepSeek-V4 in fp16, say, whose compressor has parameters that stay in fp32
            return row | {"outcome": "not built", "sentence": f"{type(error).__name__}: {str(error)[:200]}"}
        try:
            _judge(case, directory, row)
            row["outcome"] = "judged"
        except StageError as error:
            row |= {"outcome": "error", "sentence": str(error)}
        except UserError as error:
            row |= {"outcome": "refused", "sentence": str(error)}
        except Exception:
            row["sentence"] = traceback.format_exc()[-1500:]
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _prompts(case: dict[str, Any]) -> Any:
    from layerproof.model import tokens

    random = np.random.default_rng([case["seed"], case["number"], 1])
    return tokens.pad(prompts_of(case["prompts"], random), 0)


def _run_whole(case: dict[str, Any], checkpoint: Path) -> None:
    """Runs the whole model by transformers alone; raises what it raises."""
    import torch

    from families import survey

    prompts, model = _prompts(case), survey.whole(checkpoint, case["golden"])
    with torch.no_grad():
        model(
            input_ids=torch.from_numpy(prompts.ids),
            attention_mask=torch.from_numpy(prompts.valid).long(),
            use_cache=False,
        )


def _judge(case: dict[str, Any], directory: Path, row: dict[str, Any]) -> None:
    from families.one_process import Run
    from layerproof.compare.stage import UNDECIDED

    golden = {
        "device": "cpu",
        "dtype": case["golden"],
        "attn_implementation": case["attention"],
        "experts_implementation": case["experts"],
    }
    port = {"backend": "transformers", "dtype": case["port"]}
    run = Run.of(directory, _prompts(case), golden=golden, port=port)
    for stage in run.stages:
        (directory / "doing").write_text(f"golden/{stage}")
        run.golden(stage)
        (directory / "doing").write_text(f"port/{stage}")
        row["stages"][stage] = "error"  # if it raises
        comparison = run.port(stage)
        row["stages"][stage] = "undecided" if comparison["reason"] == UNDECIDED else comparison["status"]
        if comparison["status"] != "pass":
            row["sentence"] = f"{row['sentence'] or ''}{stage}: {comparison['reason']} "


def ended(case: dict[str, Any], why: str, seconds: float) -> dict[str, Any]:
    return case | {"outcome": "ended", "stages": {}, "sentence": why, "seconds": seconds}


def line(row: dict[str, Any]) -> str:
    failing = [stage for stage, status in row["stages"].items() if status not in RIGHT]
    outcome = "FALSE ALARM" if failing else row["outcome"]
    how = " ".join(str(row[key]) for key in ("golden", "port", "prompts", "attention", "experts"))
    said = f"{outcome:12} {len(row['stages'])} stages  {how}  {row['sentence'] or ''}"
    return f"{row['number']:4} {row['model_type']:24} {said}"


def summary(of_seed: Sequence[dict[str, Any]]) -> str:
    """The last line."""
    statuses = [status for row in of_seed for status in row["stages"].values()]
    families = {row["model_type"] for row in of_seed if row["stages"]}
    wrong = sum(status not in RIGHT for status in statuses)
    undecided = statuses.count("undecided")
    also = f"; {undecided} more were left undecided, by choices nearly tied at every token" if undecided else ""
    outcomes = Counter(row["outcome"] for row in of_seed)
    cases = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    stages = len(statuses) - undecided
    return f"false alarms: {wrong} in {stages} stages of {len(families)} families (cases: {cases}){also}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/false_alarms.jsonl")
    args = parser.parse_args()
    while True:
        of_seed = [row for row in rows.read(args.output) if row["seed"] == args.seed]
        if sum(len(row["stages"]) for row in of_seed) >= args.stages:
            break
        done = {row["number"] for row in of_seed}
        following = [number for number in range(len(done) + CASES_AT_ONCE) if number not in done][:CASES_AT_ONCE]
        rows.work_off([draw(args.seed, number) for number in following], judge, ended, line, args.output)
    print(summary(of_seed))


if __name__ == "__main__":
    main()

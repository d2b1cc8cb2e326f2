"""`make families SEED=N`: judges every causal language model of transformers as its own port, and with a drawn mistake.

    python tests/families/run.py [--seed N] [--output results/families.jsonl] [TYPE ...]

Prints one line for each type, and keeps it in the output: a second call goes on where the first one ended. Each type has
ten minutes, in a process of its own, since a port's device may end the process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

from families import rows  # noqa: E402


def judge(item: tuple[str, int], directory: Path) -> dict[str, Any]:
    from families import survey

    model_type, seed = item
    return survey.as_json(survey.judge(model_type, seed, directory))


def ended(item: tuple[str, int], why: str, seconds: float) -> dict[str, Any]:
    """The row of a type whose process died or took too long: XLA's doing if it was at a stage of the port."""
    model_type, seed = item
    outcome = "not on XLA" if why.startswith("port") else "crashed"
    unknown = {"taps": 0, "modules": 0, "without_tap": [], "stages": {}, "mistake": None}
    return {"model_type": model_type, "seed": seed, "outcome": outcome, "sentence": why, "seconds": seconds} | unknown


def line(row: dict[str, Any]) -> str:
    covered = f"{row['taps']:4} taps of {row['modules'] - len(row['without_tap'])}/{row['modules']} modules"
    said = row["sentence"] or ""
    if mistake := row["mistake"]:
        expected, found = mistake["expected"], mistake["found"]
        right = [what if expected[what] == found[what] else f"NOT {what}" for what in ("stage", "tap")]
        said += f"{mistake['text']} in {expected['stage']}: {', '.join(right)}"
        said += "" if expected["tap"] == found["tap"] else f" ({found['tap']} for {expected['tap']})"
    return f"{row['model_type']:28} {row['outcome']:12} {covered} {row['seconds']:6} s  {said}"


@dataclass(frozen=True)
class Counts:
    """How many types ended in which way, how many mistakes were drawn, and of how many stage and tap are right."""

    outcomes: Counter[str]
    mistakes: int
    right: dict[str, int]


def count(of_seed: Sequence[dict[str, Any]]) -> Counts:
    mistakes = [row["mistake"] for row in of_seed if row["mistake"]]
    right = {what: sum(one["expected"][what] == one["found"][what] for one in mistakes) for what in ("stage", "tap")}
    return Counts(Counter(row["outcome"] for row in of_seed), len(mistakes), right)


def summary(of_seed: Sequence[dict[str, Any]]) -> str:
    """The last line that the command prints."""
    counts = count(of_seed)
    parts = [f"{outcome}: {number}" for outcome, number in counts.outcomes.items()]
    parts += [f"mistakes whose {what} is right: {number}/{counts.mistakes}" for what, number in counts.right.items()]
    return "; ".join(parts)


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from families.configs import OUT_OF_SCOPE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/families.jsonl")
    args = parser.parse_args()
    known = {row["model_type"] for row in rows.read(args.output) if row["seed"] == args.seed}
    types = [name for name in args.types if name not in known and name not in OUT_OF_SCOPE]
    rows.work_off([(name, args.seed) for name in types], judge, ended, line, args.output)
    print(summary([row for row in rows.read(args.output) if row["seed"] == args.seed]))


if __name__ == "__main__":
    main()

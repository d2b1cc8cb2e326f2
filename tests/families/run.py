"""`make families SEED=N`: judges every causal language model of transformers as its own port, and with a drawn mistake.

    python tests/families/run.py [--seed N] [--output results/families.jsonl] [TYPE ...]

Prints one line for each type, and keeps it in the output: a second call goes on where the first one ended. Each type has
ten minutes, in a process of its own, since a port's device may end the process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, TextIO

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

SECONDS = 600
TYPES_PER_PROCESS = 15
"""Compiled graphs stay in memory."""


def judge(model_type: str, seed: int, directory: Path) -> dict[str, Any]:
    from families import survey

    return survey.as_json(survey.judge(model_type, seed, directory))


def work(types: queue.Queue[str], seed: int, output: TextIO, lock: threading.Lock) -> None:
    """Judges types until none is left."""
    context = multiprocessing.get_context("spawn")
    pool = None
    while not types.empty():
        model_type = types.get()
        pool = pool or ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=TYPES_PER_PROCESS)
        with tempfile.TemporaryDirectory() as folder:
            try:
                row = pool.submit(judge, model_type, seed, Path(folder)).result(timeout=SECONDS)
            except (TimeoutError, BrokenProcessPool) as error:
                row = ended(model_type, seed, Path(folder), error)
                for process in pool._processes.values():
                    process.kill()
                pool.shutdown()
                pool = None
        with lock:
            print(json.dumps(row), file=output, flush=True)
            print(line(row), flush=True)


def ended(model_type: str, seed: int, directory: Path, error: Exception) -> dict[str, Any]:
    """The row of a type whose process died or took too long: XLA's doing if it was at a stage of the port."""
    doing = directory / "doing"
    at = doing.read_text() if doing.exists() else "its checkpoint"
    why = f"takes more than {SECONDS} s" if isinstance(error, TimeoutError) else "ends the process"
    outcome = "not on XLA" if at.startswith("port") else "crashed"
    row = {"model_type": model_type, "seed": seed, "outcome": outcome, "sentence": f"{at} {why}"}
    unknown = {"taps": 0, "modules": 0, "without_tap": [], "stages": {}, "mistake": None}
    return row | unknown | {"seconds": float(SECONDS)}


def line(row: dict[str, Any]) -> str:
    covered = f"{row['taps']:4} taps of {row['modules'] - len(row['without_tap'])}/{row['modules']} modules"
    said = row["sentence"] or ""
    if mistake := row["mistake"]:
        expected, found = mistake["expected"], mistake["found"]
        right = [what if expected[what] == found[what] else f"NOT {what}" for what in ("stage", "tap")]
        said += f"{mistake['text']} in {expected['stage']}: {', '.join(right)}"
        said += "" if expected["tap"] == found["tap"] else f" ({found['tap']} for {expected['tap']})"
    return f"{row['model_type']:28} {row['outcome']:12} {covered} {row['seconds']:6} s  {said}"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """The last line: how many types ended in which way, and how many of the drawn mistakes were found."""
    outcomes = Counter(row["outcome"] for row in rows)
    mistakes = [row["mistake"] for row in rows if row["mistake"]]
    found = {what: sum(one["expected"][what] == one["found"][what] for one in mistakes) for what in ("stage", "tap")}
    counts = [f"{outcome}: {count}" for outcome, count in outcomes.items()]
    counts += [f"mistakes whose {what} is right: {count}/{len(mistakes)}" for what, count in found.items()]
    return "; ".join(counts)


def main() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from families.configs import OUT_OF_SCOPE

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/families.jsonl")
    args = parser.parse_args()
    args.output.parent.mkdir(parents=True, exist_ok=True)
    before = [json.loads(text) for text in args.output.read_text().splitlines()] if args.output.exists() else []
    known = {row["model_type"] for row in before if row["seed"] == args.seed}
    types: queue.Queue[str] = queue.Queue()
    for name in args.types:
        if name not in known and name not in OUT_OF_SCOPE:
            types.put(name)
    lock = threading.Lock()
    with args.output.open("a") as output:
        threads = [threading.Thread(target=work, args=(types, args.seed, output, lock)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    rows = [json.loads(text) for text in args.output.read_text().splitlines()]
    print(summary([row for row in rows if row["seed"] == args.seed]))


if __name__ == "__main__":
    main()

"""`make families` once more, for ten families drawn by the seed, through the command that people type.

    python tests/families/command.py [--seed N] [--families 10] [--output results/families_command.jsonl]

Each is a folder with a checkpoint, token ids and a config.yaml, in which `layerproof run` must exit with 0.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

import yaml  # noqa: E402

from environments import environment  # noqa: E402
from families import rows  # noqa: E402


def layerproof_run(folder: Path, settings: dict[str, Any], **variables: str) -> tuple[int, str]:
    """`layerproof run` in a folder of its own: its exit code and what the terminal shows."""
    (folder / "config.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "layerproof", "run", "--cores", "1"]
    env = environment() | {"PYTHONPATH": str(REPOSITORY / "workflow"), "NO_COLOR": "1", "HOME": str(folder)} | variables
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


def judge(item: tuple[str, int], folder: Path, **variables: str) -> dict[str, Any]:
    """The row of one family: the command's exit code and the headline of verdicts.json, or the end of what it said."""
    from families import survey
    from families.one_process import drawn_prompts

    model_type, seed = item
    started = time.perf_counter()
    survey.save(model_type, folder / "checkpoint", seed)
    prompts = drawn_prompts(seed)
    (folder / "ids.json").write_text(
        json.dumps([of[mask].tolist() for of, mask in zip(prompts.ids, prompts.valid, strict=True)])
    )
    inputs = {"prompts": None, "token_ids": "ids.json"}
    code, said = layerproof_run(
        folder,
        {"model": {"checkpoint": "checkpoint"}, "inputs": inputs, "port": {"backend": "transformers"}},
        **variables,
    )
    verdicts = folder / "results/verdicts.json"
    headline = json.loads(verdicts.read_text())["headline"] if verdicts.exists() else said[-300:]
    seconds = round(time.perf_counter() - started, 1)
    return {"model_type": model_type, "seed": seed, "code": code, "headline": headline, "seconds": seconds}


def ended(item: tuple[str, int], why: str, seconds: float) -> dict[str, Any]:
    return {"model_type": item[0], "seed": item[1], "code": None, "headline": why, "seconds": seconds}


def line(row: dict[str, Any]) -> str:
    return f"{row['model_type']:28} exit {row['code']} {row['seconds']:6} s  {row['headline']}"


def drawn(seed: int, families: int) -> list[str]:
    """The types that the seed draws."""
    import numpy as np

    from families.configs import judged_types

    return np.random.default_rng(seed).choice(judged_types(), families, replace=False).tolist()


def main() -> int:
    """Exits with 1 if a family's run does not exit with 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--families", type=int, default=10)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/families_command.jsonl")
    args = parser.parse_args()
    known = {row["model_type"] for row in rows.read(args.output) if row["seed"] == args.seed}
    types = [name for name in drawn(args.seed, args.families) if name not in known]
    rows.work_off([(name, args.seed) for name in types], judge, ended, line, args.output)
    found = [row for row in rows.read(args.output) if row["seed"] == args.seed]
    passed = sum(row["code"] == 0 for row in found)
    print(f"{passed} of {args.families} families passed by the command")
    return int(passed < args.families)


if __name__ == "__main__":
    sys.exit(main())

"""`make bugs`, the part on several ranks: every mistake of rank_corpus.py, the port without one on every mesh, and models of
transformers by their own tensor-parallel plan.

    python tests/bugs/run_ranks.py

Exits with 1 if a mistake is not found, or a port without one does not pass.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU"}
REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

from bugs import harness, ranks  # noqa: E402
from bugs.rank_corpus import LAYER, RANK_BUGS  # noqa: E402
from layerproof.rerun.preload import PACKAGES, import_packages  # noqa: E402

MESHES = (
    *({"tp": 2}, {"tp": 4}, {"cp": 2}, {"cp": 3}, {"ep": 2}, {"ep": 3}),
    *({"cp": 2, "tp": 2}, {"ep": 2, "cp": 2}, {"ep": 2, "tp": 2}, {"ep": 2, "cp": 2, "tp": 2}),
)
PLANS = (
    *(
        "tiny",
        "llama",
        "qwen3",
        "qwen3_moe",
        "gpt_oss",
        "gemma3_text",
        "mixtral",
        "deepseek_v3",
        "llama4_text",
        "gemma2",
    ),
    *("glm4", "cohere2", "phi", "gpt_neox"),
)
"""Models that transformers splits over two ranks: the shipped one, and those of tests/models.py."""
WRONG = "llama4_text"
"""The one whose plan is wrong in transformers 5.23 with torch 2.9."""
LENGTHS = (41, 11, 30)
STAGES = ("embed", LAYER, "norm", "lm_head")


@dataclass(frozen=True)
class Row:
    """What was found: the comparison's status, None for an error; the first tap that fails; all that is said."""

    status: str | None
    tap: str | None
    said: str


@cache
def model_of(directory: Path, name: str) -> harness.Model:
    seed, lengths = (0, None) if name == harness.TINY else (1, LENGTHS)
    return harness.make_model(name, seed, directory / name, lengths)


def judged(directory: Path, source: str | None, stage: str, axes: Mapping[str, int], name: str = harness.TINY) -> Row:
    """Judges a stage of a port on these ranks, which are forked from this process; without a source, the model of
    transformers by its own plan.
    """
    import_packages(PACKAGES)
    model = model_of(directory, name)
    found = ranks.judge(model, stage, source, axes, directory / "run")
    status = found.comparison["status"] if found.comparison else None
    return Row(status, next(iter(found.failed), None), "\n".join([found.text, *found.causes]))


def main() -> int:
    port, wrong = ranks.PORT.read_text(), 0
    placed = named = 0
    with tempfile.TemporaryDirectory() as folder:
        for bug in RANK_BUGS:
            row = judged(Path(folder), bug.overlay(port), bug.stage, bug.axes)
            is_placed, is_named = row.tap == bug.tap and row.status != "pass", bool(bug.says) and bug.says in row.said
            placed, named, wrong = placed + is_placed, named + (is_placed and is_named), wrong + (row.status == "pass")
            over = " ".join(f"{axis} {size}" for axis, size in bug.axes.items())
            print(
                f"{bug.name:50} {over:10} {row.tap or '-':14} {'named' if is_named else 'placed' if is_placed else 'NO'}"
            )
        passed = [judged(Path(folder), port, stage, axes).status == "pass" for axes in MESHES for stage in STAGES]
        split = {
            (name, stage): judged(Path(folder), None, stage, {"tp": 2}, name)
            for name in PLANS
            for stage in model_of(Path(folder), name).stages
        }
    print(f"{len(RANK_BUGS)} mistakes: {placed} at the right tap, {named} of them named")
    print(f"{len(passed)} stages without a mistake: {passed.count(True)} pass")
    failed = [f"{name} {stage} at {row.tap}" for (name, stage), row in split.items() if row.status != "pass"]
    print(f"{len(split)} stages of {len(PLANS)} models of transformers on tp 2: {len(split) - len(failed)} pass")
    print(*(f"  not {one}" for one in failed), sep="\n")
    wrong += sum(not one.startswith(WRONG) for one in failed)
    return int(wrong > 0 or not all(passed))


if __name__ == "__main__":
    sys.exit(main())

"""`make tutorial`: a folder with a port that has one known mistake, to find and to fix (docs/tutorial.md).

    python tests/tutorial.py plant SEED FOLDER      writes the folder, and does not say what is wrong
    python tests/tutorial.py answer SEED            prints the diff that corrects the port

The mistakes are those of the corpus (tests/bugs/corpus.py) that read like a slip in the source of the port and are far above
the limit. tests/bugs/test_tutorial.py runs Layerproof on them.
"""

from __future__ import annotations

import argparse
import difflib
import random
import shutil
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPOSITORY / "tests")]

from bugs.corpus import BUGS, LAYER, MINIMAX, Bug  # noqa: E402

SHIPPED = REPOSITORY / "workflow/ports/minimax_m2.py"
PROMPTS = REPOSITORY / "workflow/resources/prompts.txt"
FIRST_STAGE = "layer_000"
"""Where each mistake shows first: all layers run the same code."""
CONFIG = """\
# The tutorial, docs/tutorial.md. The model is the small MiniMax-M2 that comes with Layerproof.

inputs:
  prompts: prompts.txt

port:
  module: port.py
"""
NAMES = frozenset(
    {
        "norm without weight",
        "norm weight plus one",
        "norm subtracts the mean",
        "q norm left out",
        "norm before the experts left out",
        "k and v exchanged",
        "theta of another model",
        "the whole head turned",
        "half of the rotary dims turned",
        "turned the other way",
        "neighbours turned as pairs",
        "positions from one",
        "q not turned",
        "k not turned",
        "frequencies over the head's size",
        "the last dims turned",
        "scale of the rotary size",
        "no scale",
        "scaled twice",
        "sees the next token",
        "query heads grouped in the wrong order",
        "heads not put behind the tokens",
        "no residual beside the attention",
        "no residual beside the experts",
        "softmax router",
        "no sigmoid",
        "correction bias subtracted",
        "correction bias on the logits",
        "one expert too few",
        "one expert too many",
        "choice without the bias",
        "bias in the weights",
        "weights normalised over all",
        "equal weights",
        "softmax of the chosen logits",
        "gate and up swapped",
        "gelu",
        "relu",
        "up + 1",
    }
)
MISTAKES: tuple[Bug, ...] = tuple(
    bug for bug in BUGS if bug.model == MINIMAX and bug.stage == LAYER and bug.name in NAMES
)


def drawn(seed: int) -> Bug:
    """The mistake of a seed. As many seeds in a row as there are mistakes draw each of them once."""
    order = random.Random(2026).sample(MISTAKES, len(MISTAKES))
    return order[seed % len(order)]


def planted(seed: int) -> str:
    """The port's source with the mistake of this seed."""
    return drawn(seed).overlay(SHIPPED.read_text(encoding="utf-8"))


def plant(seed: int, folder: Path) -> None:
    """Writes the folder, or a new port into one whose port nobody has work in: it is as planted before, or corrected.

    Raises:
        SystemExit: if the folder has a port of another kind.
    """
    port = folder / "port.py"
    if port.exists():
        known = [SHIPPED.read_text(encoding="utf-8"), *map(planted, range(len(MISTAKES)))]
        if port.read_text(encoding="utf-8") not in known:
            sys.exit(
                f"error: {port}: has edits of yours. Correct it first, remove {folder}, or name another folder: "
                f"make tutorial SEED={seed} TUTORIAL=DIR"
            )
    folder.mkdir(parents=True, exist_ok=True)
    port.write_text(planted(seed), encoding="utf-8")
    (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
    shutil.copy(PROMPTS, folder / "prompts.txt")
    print(f"{folder}: wrote config.yaml, prompts.txt and port.py. The port has one mistake, drawn by seed {seed}.")
    print(f"Next: source .venv/bin/activate && cd {folder} && layerproof run")


def answer(seed: int) -> str:
    """The diff that corrects the port of this seed, for `patch -p1` in its folder."""
    before, after = planted(seed), SHIPPED.read_text(encoding="utf-8")
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "a/port.py", "b/port.py"
    )
    return "".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("plant", "answer"):
        verbs.add_parser(verb).add_argument("seed", type=int)
    verbs.choices["plant"].add_argument("folder", type=Path)
    args = parser.parse_args()
    if args.verb == "plant":
        plant(args.seed, args.folder)
    else:
        print(answer(args.seed), end="")


if __name__ == "__main__":
    main()

"""Writes docs/families.md from what `make families` and `make false-alarms` found with one seed each.

    python tests/families/table.py --seed N --alarms-seed S [--again TYPE ...]

Reads results/families.jsonl and results/false_alarms.jsonl. `--again` names the rows that were wrong at first and were made
again after what was wrong was mended.
"""

from __future__ import annotations

import argparse
import datetime
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

from families import false_alarms, rows, run  # noqa: E402
from families.configs import OUT_OF_SCOPE, WANTED  # noqa: E402

PAGE = REPOSITORY / "docs/families.md"
PACKAGES = ("transformers", "torch", "torch-xla")
CANNOT_RUN = "not run"

HEAD = """# Model families

Every decoder among the causal language models of transformers, as a tiny random model: is the unmodified model judged right
as its own port, and is a mistake found that is put into it?

Each row is one model type with a config shrunk by rule (`tests/families/configs.py`), four layers as a rule, and parameters
drawn at random, norms and biases too. Golden and port are the same model, so every stage must pass: anything else is a false
alarm. The golden's logits must be those of the whole model, bit for bit. Then one mistake, drawn at random, is put into one
stage (`tests/mistakes.py`): a weight scaled, shifted, transposed or exchanged with another, an epsilon, a position, a
dropped bias or branch, or an output that is scaled. If its effect is less than twice the limit, another is drawn. The *tap*
is right if it is the first that changes when transformers runs the stage in fp32.

"""


def page(survey: Sequence[dict[str, Any]], alarms: Sequence[dict[str, Any]], again: Sequence[str]) -> str:
    """The text of docs/families.md."""
    seed, of_alarms = survey[0]["seed"], alarms[0]["seed"] if alarms else None
    installed = ", ".join(f"{name} {version(name).partition('+')[0]}" for name in PACKAGES)
    made = [f"make families SEED={seed}", *([f"make false-alarms N=1000 SEED={of_alarms}"] if alarms else [])]
    text = HEAD + f"Made on {datetime.date.today()} with {installed},\nby `{'` and `'.join(made)}` on two cores.\n\n"
    text += figures(survey)
    if again:
        text += f"- wrong at first, and made again after a mend: {', '.join(f'`{name}`' for name in again)}\n"
    if alarms:
        text += (
            f"- {false_alarms.summary(alarms)};\n  drawn families, sizes, dtypes of golden and port, prompts (short, long,\n"
            "  padded, repeated, all one token), and implementations of attention and experts\n"
        )
    text += "\n| type | outcome | taps | modules with a tap | the mistake | found |\n|---|---|---|---|---|---|\n"
    text += "".join(map(row, sorted(survey, key=lambda one: one["model_type"])))
    text += "\n## Wanted\n\nTypes that should be judged and are not yet.\n\n"
    text += "".join(f"- `{name}` {why}\n" for name, why in WANTED.items())
    text += "\n## Out of scope\n\n"
    reasons: dict[str, list[str]] = {}
    for name, why in OUT_OF_SCOPE.items():
        reasons.setdefault(why, []).append(f"`{name}`")
    return text + "".join(f"- {why}: {', '.join(names)}\n" for why, names in reasons.items())


def figures(survey: Sequence[dict[str, Any]]) -> str:
    counts = run.count(survey)
    outcomes = counts.outcomes
    judged, runs = outcomes["passed"] + outcomes["false alarm"], len(survey) - outcomes[CANNOT_RUN]
    stage, tap = counts.right["stage"], counts.right["tap"]
    modules, without = sum(row["modules"] for row in survey), sum(len(row["without_tap"]) for row in survey)
    return (
        f"- judged: {judged} of {runs} types that plain transformers runs here ({judged / runs:.1%}); false alarms: "
        f"{outcomes['false alarm']}; crashed: {outcomes['crashed'] + outcomes['not on XLA']}; "
        f"refused in one line: {outcomes['refused']}\n"
        f"- {sum(row['taps'] for row in survey)} taps; {modules - without} of {modules} modules with weights have a tap of "
        "what they return\n"
        f"- mistakes found: stage {stage} of {counts.mistakes}, tap {tap} of {counts.mistakes}\n"
    )


def row(of: dict[str, Any]) -> str:
    mistake = of["mistake"]
    told, found = of["sentence"] or "", ""
    if mistake:
        told = f"{mistake['text']}, {mistake['expected']['stage']}"
        right = mistake["expected"]["tap"] == mistake["found"]["tap"]
        found = f"`{mistake['found']['tap']}`" + ("" if right else f", not `{mistake['expected']['tap']}`")
    told = told.replace("|", "/").replace("config.yaml: ", "")
    covered = f"{of['modules'] - len(of['without_tap'])} of {of['modules']}" if of["modules"] else ""
    return f"| `{of['model_type']}` | {of['outcome']} | {of['taps'] or ''} | {covered} | {told} | {found} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--alarms-seed", type=int)
    parser.add_argument("--families", type=Path, default=REPOSITORY / "results/families.jsonl")
    parser.add_argument("--alarms", type=Path, default=REPOSITORY / "results/false_alarms.jsonl")
    parser.add_argument("--again", nargs="*", default=[])
    args = parser.parse_args()
    survey = [one for one in rows.read(args.families) if one["seed"] == args.seed]
    alarms = [one for one in rows.read(args.alarms) if one["seed"] == args.alarms_seed]
    PAGE.write_text(page(survey, alarms, args.again))


if __name__ == "__main__":
    main()

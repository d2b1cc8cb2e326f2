"""`make hangs SEED=N`: draws programs of several ranks, with a mistake or healthy, and prints what was said of them.

    python tests/hangs/run.py [--seed N] [--hangs 120] [--healthy 200] [--output results/hangs.jsonl]

A second call goes on where the first one ended.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "workflow"), str(REPOSITORY / "tests")]

from hangs import drawn, others  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hangs", type=int, default=120)
    parser.add_argument("--healthy", type=int, default=200)
    parser.add_argument("--output", type=Path, default=REPOSITORY / "results/hangs.jsonl")
    args = parser.parse_args()
    rows = list(judged(args.seed, args.hangs, args.healthy, args.output))
    print(table(rows, args.seed))
    compared = args.output.with_name(f"{args.output.stem}_torch{args.output.suffix}")
    print("\n".join(others_say([row for row in rows if row["kind"]], compared)))
    return 0


def others_say(rows: Sequence[dict], kept: Path) -> Iterable[str]:
    """What torch's own tools say of the first hang of each kind, from the file of what has been run before."""
    old = {(row["seed"], row["way"]): row for row in _read(kept)}
    for kind in drawn.KINDS:
        for row in [row for row in rows if row["kind"] == kind][:1]:
            yield f"{kind} (rank {row['rank']})"
            for way in others.WAYS:
                if (row["seed"], way) not in old:
                    said = asdict(others.said_of(drawn.draw(row["seed"], kind), way)) | {"seed": row["seed"]}
                    _keep(kept, said)
                    old[row["seed"], way] = said
                values = {name: value for name, value in old[row["seed"], way].items() if name != "seed"}
                yield f"  {others.Said(**values)}"


def judged(seed: int, hangs: int, healthy: int, kept: Path) -> Iterable[dict]:
    """A row for each program, from the file of rows where it has been run before."""
    old = {(row["kind"], row["seed"]): row for row in _read(kept)}
    dice = random.Random(seed)
    kinds = [kind for at, kind in zip(range(hangs), _in_turn(list(drawn.KINDS), dice), strict=False)]
    for at, kind in enumerate([*kinds, *[""] * healthy]):
        key = (kind, seed * 1000 + at)
        if key not in old:
            row = as_row(drawn.draw(key[1], kind))
            _keep(kept, row)
            old[key] = row
            print(_line(row), flush=True)
        yield old[key]


def _read(kept: Path) -> list[dict]:
    return [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []


def _keep(kept: Path, row: dict) -> None:
    kept.parent.mkdir(exist_ok=True)
    with kept.open("a") as file:
        file.write(f"{json.dumps(row)}\n")


def _in_turn(kinds: list[str], dice: random.Random) -> Iterable[str]:
    while True:
        dice.shuffle(kinds)
        yield from kinds


def as_row(program: drawn.Program) -> dict:
    """Runs a program and says what came of it."""
    outcome = drawn.run(program)
    row = {
        "kind": program.kind,
        "seed": program.seed,
        "ranks": program.ranks,
        "deadline": round(program.deadline, 1),
        "store": "launcher's" if program.by_launcher else "own",
        "check": program.check,
        "rank": program.rank,
        "step": program.ops[program.at].what if program.kind else "",
        "cause": outcome.cause,
        "named": outcome.ranks,
        "sentence": outcome.sentence,
        "late": round(outcome.seconds - program.deadline, 1),
        "ended": outcome.ended,
        "left": outcome.is_left,
    }
    return row


def is_right(row: dict) -> tuple[bool, bool]:
    """Whether the rank and the cause that were named are right."""
    program = drawn.draw(row["seed"], row["kind"])
    return drawn.is_right(program, drawn.Outcome(row["cause"], row["named"]))


def is_quiet(row: dict) -> bool:
    return not row["cause"] and all(code == 0 for code in row["ended"])


def _line(row: dict) -> str:
    if not row["kind"]:
        return f"healthy, seed {row['seed']}: {'quiet' if is_quiet(row) else row['sentence'] or row['ended']}"
    said = "right" if all(is_right(row)) else f"{row['named']}: {row['sentence'] or 'nothing said'}"
    return f"{row['kind']}, seed {row['seed']}, rank {row['rank']}: {said}"


def table(rows: list[dict], seed: int) -> str:
    """What `make hangs` prints."""
    lines = [f"{'mistake':34}{'runs':>5}{'rank':>6}{'cause':>7}{'latest end after the deadline':>32}"]
    hangs = [row for row in rows if row["kind"]]
    for kind in drawn.KINDS:
        if of := [row for row in hangs if row["kind"] == kind]:
            lines.append(_counted(kind, of))
    lines.append(_counted("all", hangs))
    healthy = [row for row in rows if not row["kind"]]
    quiet = _count(healthy, is_quiet)
    lines.append(f"{len(healthy)} healthy programs: {len(healthy) - quiet} false alarms")
    lines.append(f"processes left behind: {_count(rows, lambda row: row['left'])}; seed {seed}")
    return "\n".join(lines)


def _counted(name: str, rows: list[dict]) -> str:
    rank, cause = (sum(right) for right in zip(*map(is_right, rows), strict=True))
    late = max(row["late"] for row in rows)
    return f"{name:34}{len(rows):>5}{rank:>6}{cause:>7}{f'{late:.1f} s' if late > 0 else 'before it':>32}"


def _count(rows: list[dict], is_so: Callable[[dict], bool]) -> int:
    return sum(map(is_so, rows))


if __name__ == "__main__":
    sys.exit(main())

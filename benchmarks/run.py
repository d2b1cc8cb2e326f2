"""The figures of docs/performance.md: `python benchmarks/run.py [NAME...]` prints them and puts them into results.json, in
place of what the same parts measured before.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / folder) for folder in ("workflow", "tests", "tests/workflow"))]

os.environ["OMP_NUM_THREADS"] = "1"  # as snakemake --cores 1 sets it for every job

from layerproof.environment import hardware  # noqa: E402
from layerproof.files import read_json, write_json  # noqa: E402

BENCHMARKS = ("memory", "scale", "overhead", "comparer", "storage", "watch")


def main() -> None:
    """Runs the benchmarks that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHMARKS)}; all if none is given")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"{unknown[0]} is no benchmark")
    rows = read_json(args.output)["results"] if args.output.exists() else []
    machine = hardware() | {"Python": platform.python_version()}
    for name in args.names or BENCHMARKS:
        command = f"python benchmarks/run.py {name}"
        rows = [row for row in rows if row["command"] != command]
        for result in importlib.import_module(name).run():
            rows.append({**asdict(result), "command": command, "machine": machine})
            print(f"{result.name:<60} {result.value:10.3f} {result.unit} ({result.baseline})", flush=True)
        write_json(args.output, {"schema_version": 1, "results": rows})


if __name__ == "__main__":
    main()

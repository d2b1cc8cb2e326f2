"""The benchmarks run and leave their figures; the figures themselves are no concern of tests. Those that call snakemake take
too long for a test, but for what one of them is measured against (test_baseline.py).
"""

import json
import math
import subprocess
import sys

from runs import REPOSITORY

SMALL = """
import sys
sys.path.insert(0, "benchmarks")
import run, comparer, scale, storage
comparer.SHAPE, storage.SHAPE, scale.LENGTHS = (1, 8, 32), (1, 8, 32), (4,)
run.main()
"""


def test_benchmarks_write_what_they_print(tmp_path):
    path, names = tmp_path / "results.json", ("comparer", "storage", "scale")
    command = [sys.executable, "-c", SMALL, *names, "--output", str(path)]
    printed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    rows = json.loads(path.read_text())["results"]
    assert {row["command"] for row in rows} == {f"python benchmarks/run.py {name}" for name in names}
    for row, line in zip(rows, printed.splitlines(), strict=True):
        assert line.startswith(row["name"]) and row["unit"] in line
        assert row.keys() == {"name", "value", "unit", "baseline", "command"}
        assert math.isfinite(row["value"]) and row["value"] > 0 and row["unit"] and row["baseline"]

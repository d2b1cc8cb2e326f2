"""The benchmarks run and leave their figures; the figures themselves are no concern of tests. Those that call snakemake take
too long for a test, but for what one of them is measured against (test_baseline.py).
"""

import json
import math
import subprocess
import sys

import pytest
from runs import REPOSITORY

from environments import environment

SMALL = """
import sys
sys.path.insert(0, "benchmarks")
import run, comparer, scale, storage
comparer.SHAPE, scale.LENGTHS, storage.TOKENS = (1, 8, 32), (4,), 8
storage.CONFIG = storage.CONFIG | dict(
    hidden_size=64, intermediate_size=32, head_dim=16, num_attention_heads=4, num_key_value_heads=2, rotary_dim=8
)
scale.PLACED, scale.DIGESTED = storage.CONFIG, 1 << 20
run.main()
"""


@pytest.mark.slow
def test_benchmarks_write_what_they_print(tmp_path):
    path, names = tmp_path / "results.json", ("comparer", "storage", "scale")
    others = {"command": "python benchmarks/run.py memory", "value": 1.04}
    before = [others, {"command": "python benchmarks/run.py scale", "value": 0}]
    path.write_text(json.dumps({"schema_version": 1, "results": before}))
    command = [sys.executable, "-c", SMALL, *names, "--output", str(path)]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    kept, *rows = json.loads(path.read_text())["results"]
    assert kept == others, "what is not run keeps its figures"
    assert {row["command"] for row in rows} == {f"python benchmarks/run.py {name}" for name in names}
    for row, line in zip(rows, done.stdout.splitlines(), strict=True):
        assert line.startswith(row["name"]) and row["unit"] in line
        assert row.keys() == {"name", "value", "unit", "baseline", "command", "machine"}
        assert math.isfinite(row["value"]) and row["value"] > 0 and row["unit"] and row["baseline"]

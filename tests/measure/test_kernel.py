"""The compiled sums of a comparison; what they are is held in test_metrics.py against plain computations."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from layerproof.measure import kernel, metrics, noise, noise_kernel
from layerproof.rerun import fingerprint
from layerproof.rerun.recorder import Seen, recording
from layerproof.rerun.source import parse_file
from layerproof.tensors.tensor import Tensor

REPOSITORY = Path(__file__).resolve().parents[2]

READ_ONLY = """
import os, sys
os.access = lambda *arguments: False
sys.path.insert(0, sys.argv[1])
import numpy as np
from layerproof.measure import kernel, metrics
from layerproof.tensors.tensor import Tensor
tap = Tensor(np.ones((1, 2, 3), np.float32), "float32")
metrics.compare(tap, tap, tap, np.ones((1, 2), bool))
print(sum(kernel._add.stats.cache_hits.values()), sum(kernel._add.stats.cache_misses.values()))
"""


@pytest.mark.parametrize("module", [kernel, noise_kernel])
def test_compiled_code_depends_on_no_other_module(module):
    """numba compiles it anew when its own file is edited, and at no other time."""
    tree = ast.parse(Path(module.__file__).read_text())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and "layerproof" in node.module]
    imported = {alias.asname or alias.name for node in imports for alias in node.names}
    assert imported and len(compiled(module)) > 3
    assert not imported & {
        name for function in compiled(module).values() for name in function.py_func.__code__.co_names
    }


def compiled(module):
    return {name: value for name, value in vars(module).items() if hasattr(value, "py_func")}


@pytest.mark.slow
@pytest.mark.parametrize(("module", "constants"), [(kernel, ["BF16_STEPS"]), (noise_kernel, [])])
def test_an_edit_of_any_of_it_is_seen(module, constants):
    tap = Tensor(np.ones((1, 2, 3), np.float32), "float32")
    seen: Seen = {}
    with recording(seen):
        metrics.compare(tap, tap, tap, np.ones((1, 2), bool))
        noise.measure([tap, tap], tap, np.ones((1, 2), bool))
    entries = fingerprint.fingerprints(seen)
    source = parse_file(module.__file__)
    for name in (*compiled(module), *constants):
        assert f"layerproof/measure/{Path(module.__file__).name}::={name}" in entries
    assert source.compiled >= compiled(module).keys()


@pytest.mark.slow
def test_where_the_library_is_read_only_compiled_code_is_kept_with_the_results(tmp_path):
    """As in a container."""
    command = [sys.executable, "-c", READ_ONLY, str(REPOSITORY / "workflow")]
    found = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout for _ in range(2)]
    assert found == ["0 1\n", "1 0\n"]
    assert list((tmp_path / ".layerproof/numba").rglob("kernel._add*"))

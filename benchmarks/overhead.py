"""What the workflow takes beside the numerical work: 62 tiny layers from nothing to the report, and after an edit.

The baseline is `one_process.py` in the workflow's folder.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import h5py
from runs import REPOSITORY, Workflow

import models
from layerproof.files import read_json, write_json
from measure import Result, measure

LAYERS = 62
DENSE = 8
"""Layers of the second kind, at the beginning of the model that is edited."""
EDITS = {
    "equal numbers": ("class Dense(nn.Module):\n", "class Dense(nn.Module):\n    edited = True\n\n"),
    "other numbers": ("F.silu(self.gate_proj(x)) *", "F.silu(self.gate_proj(x).float()).to(x.dtype) *"),
}
SNAKEMAKE = ["snakemake", "--cores", "1", "results/report.html"]
ONE_PROCESS = Path(__file__).with_name("one_process.py")


def _workflow(directory: Path, name: str, layers: int = LAYERS, **config) -> Workflow:
    """A model of so many layers with one kind or two, and its workflow."""
    models.CONFIGS[name]["num_hidden_layers"] = layers
    if "mlp_only_layers" in models.CONFIGS[name]:
        models.CONFIGS[name]["mlp_only_layers"] = list(range(DENSE))
    # Shards of a real model are above the size up to which Snakemake digests inputs.
    models.save(name, directory / "model", shard_size="2MB")
    write_json(directory / "ids.json", [list(range(3, 67)), list(range(5, 37))])
    inputs = {"prompts": None, "token_ids": "ids.json"}
    return Workflow(directory, model={"checkpoint": "model"}, inputs=inputs, chains=[], **config)


def _graphs(results: Path) -> tuple[dict[str, int], int]:
    """Graphs by kind of stage, one without taps and one with them if it has any, and how many were compiled in all."""
    graphs, compiled = {}, 0
    for record in (results / "records/port").glob("*.json"):
        facts = read_json(record)["run"]
        with h5py.File(results / f"port/{record.stem}.h5") as file:
            graphs[facts["kind"]] = 2 if len(file["port"]) > 1 else 1
        compiled += facts["compilations"]
    return graphs, compiled


def run() -> Iterator[Result]:
    """The ratios, each with what was measured beside it."""
    yield from _from_nothing()
    yield from _after_edits()


def _from_nothing() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(prefix="layerproof-overhead-") as folder:
        _workflow(Path(folder) / "small", "minimax_m2", 1)
        # Compiles what a checkout keeps, before it is copied.
        measure([sys.executable, str(ONE_PROCESS)], Path(folder) / "small")
        for name in ("workflow", "baseline"):
            _workflow(Path(folder) / name, "minimax_m2")
        baseline = measure([sys.executable, str(ONE_PROCESS)], Path(folder) / "baseline").wall_s
        jobs = measure(SNAKEMAKE, Path(folder) / "workflow").wall_s
        again = measure(SNAKEMAKE, Path(folder) / "workflow").wall_s
        by_kind, compiled = _graphs(Path(folder) / "workflow/results")
    kinds, graphs = len(by_kind), sum(by_kind.values())
    yield from [
        Result(f"{LAYERS} layers to the report", jobs / baseline, "of one process", f"{baseline:.1f} s"),
        Result(f"{LAYERS} layers, nothing to do", again / baseline, "of one process", f"{baseline:.1f} s"),
        Result(f"{LAYERS} layers: compilations", compiled / kinds, "a kind of stage", f"{kinds} kinds"),
        Result(f"{LAYERS} layers: compilations by graph", compiled / graphs, "a graph", f"{graphs} graphs"),
    ]


def _after_edits() -> Iterator[Result]:
    with tempfile.TemporaryDirectory(prefix="layerproof-overhead-") as folder:
        workflow = _workflow(Path(folder) / "two", "qwen3_moe", port={"module": "port.py"})
        source = REPOSITORY / "tests/ports/qwen3_moe.py"
        (workflow.directory / "port.py").write_text(source.read_text())
        full = measure(SNAKEMAKE, workflow.directory).wall_s
        for name, edit in EDITS.items():
            workflow.edit("port.py", edit)
            edited = measure(SNAKEMAKE, workflow.directory).wall_s
            told = f"after an edit that touches {DENSE} of {LAYERS} layers, {name}"
            yield Result(told, edited / full, "of a full run", f"{full:.1f} s")

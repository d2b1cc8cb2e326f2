"""What the workflow takes beside the numerical work: 62 tiny layers from nothing to the report, and after an edit.

The baseline is one process that makes the same tensors, comparisons, plots and report by the same functions of the library,
without Snakemake, records, fingerprints or preflight: `python benchmarks/overhead.py` in the workflow's folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), *(str(HERE.parent / folder) for folder in ("workflow", "tests", "tests/workflow"))]

import yaml  # noqa: E402
from runs import REPOSITORY, Workflow  # noqa: E402

import models  # noqa: E402
from layerproof.files import read_json, write_json, write_text  # noqa: E402
from measure import Result, measure  # noqa: E402

LAYERS = 62
DENSE = 8
"""Layers of the second kind, at the beginning of the model that is edited."""
SNAKEMAKE = ["snakemake", "--cores", "1", "results/report.html"]


def work_in_one_process(directory: Path) -> None:
    """Everything that the report shows, made in this process."""
    from layerproof import (
        audit,
        checkpoint,
        compare,
        golden,
        loading,
        plots,
        port,
        prediction,
        report,
        tokens,
        verdicts,
    )
    from layerproof.config import resolve
    from layerproof.metrics import LIMIT
    from layerproof.stages import all_stages, previous_stage
    from layerproof.tensors import read_stage_input

    settings = resolve(yaml.safe_load((directory / "config.yaml").read_text())).resolved
    model, results = directory / settings["model"]["checkpoint"], directory / "results"
    trust = {"trust_remote_code": False}
    layers = checkpoint.num_layers(checkpoint.read_config(model))
    stages = all_stages(layers)
    descriptions, unused = loading.describe_stages(model, stages, False)
    ids = Path(settings["inputs"]["token_ids"])
    tokens.make(results / "tokens.json", model, checkpoint.read_config(model), None, ids, 4096, False)
    prompts = tokens.Tokens.read(results / "tokens.json")
    foretold = prediction.predict(model, descriptions, prompts, settings | trust)
    runner = port.Runner.start(model, prompts, settings["port"] | trust)
    comparisons, files = [], {side: {} for side in ("golden", "noise", "port", "plots")}
    for stage in stages:
        for side, ending in (("golden", "h5"), ("noise", "h5"), ("port", "h5"), ("plots", "svg")):
            files[side][stage] = results / side / f"{stage}.{ending}"
        previous = previous_stage(stage, layers)
        before = [files[side].get(previous) for side in ("golden", "noise")]
        made = files["golden"][stage], files["noise"][stage]
        golden_settings = settings["golden"] | trust | {"compared": stages}
        golden.make_stage(stage, model, descriptions[stage], prompts, *before, *made, golden_settings)
        fed = read_stage_input(before[0], "golden/out") if before[0] else None
        port.make_stage(runner, stage, descriptions[stage], fed, files["port"][stage])
        comparisons.append(compare.compare_stage(stage, *made, files["port"][stage], prompts.valid, LIMIT))
        write_json(results / f"compare/{stage}.json", comparisons[-1])
        plots.plot_stage(comparisons[-1], files["plots"][stage])
    files["plots"] |= {name: results / f"plots/{name}.svg" for name in ("map", "depth")}
    plots.plot_map(comparisons, files["plots"]["map"])
    plots.plot_depth(comparisons, [], files["plots"]["depth"])
    audited = audit.audit(descriptions, files["golden"], files["port"], settings["port"]["dtype"])
    diagnoses = [verdicts.undiagnosed(stage) for stage in stages]
    verdict = verdicts.collect(comparisons, [], diagnoses)
    template = REPOSITORY / "workflow/layerproof/templates/report.html.j2"
    shown = (verdict, comparisons, [], diagnoses, files["plots"], unused, audited, foretold, [])
    write_text(results / "report.html", report.render(template, *shown, settings))


def _workflow(directory: Path, name: str, **config) -> Workflow:
    """A model of 62 layers with one kind or two, and its workflow."""
    models.CONFIGS[name]["num_hidden_layers"] = LAYERS
    if "mlp_only_layers" in models.CONFIGS[name]:
        models.CONFIGS[name]["mlp_only_layers"] = list(range(DENSE))
    models.save(name, directory / "model")
    write_json(directory / "ids.json", [list(range(3, 67)), list(range(5, 37))])
    inputs = {"prompts": None, "token_ids": "ids.json"}
    return Workflow(directory, model={"checkpoint": "model"}, inputs=inputs, chains=[], **config)


def run() -> list[Result]:
    """The ratios, each with what was measured beside it."""
    results = []
    with tempfile.TemporaryDirectory(prefix="layerproof-overhead-") as folder:
        for name in ("workflow", "baseline"):
            _workflow(Path(folder) / name, "minimax_m2")
        baseline = measure([sys.executable, __file__], Path(folder) / "baseline").wall_s
        jobs = measure(SNAKEMAKE, Path(folder) / "workflow").wall_s
        again = measure(SNAKEMAKE, Path(folder) / "workflow").wall_s
        records = (Path(folder) / "workflow/results/records/port").glob("*.json")
        facts = [read_json(record)["run"] for record in records]
    kinds = len({fact["kind"] for fact in facts})
    compiled = sum(fact["compilations"] for fact in facts)
    results += [
        Result(f"{LAYERS} layers to the report", jobs / baseline, "of one process", f"{baseline:.1f} s"),
        Result(f"{LAYERS} layers, nothing to do", again / baseline, "of one process", f"{baseline:.1f} s"),
        Result(f"{LAYERS} layers: compilations", compiled / kinds, "a kind of stage", f"{kinds} kinds"),
    ]
    with tempfile.TemporaryDirectory(prefix="layerproof-overhead-") as folder:
        workflow = _workflow(Path(folder) / "two", "qwen3_moe", port={"module": "port.py"})
        source = REPOSITORY / "tests/ports/qwen3_moe.py"
        (workflow.directory / "port.py").write_text(source.read_text())
        full = measure(SNAKEMAKE, workflow.directory).wall_s
        workflow.edit("port.py", ("class Dense(nn.Module):\n", "class Dense(nn.Module):\n    edited = True\n\n"))
        edited = measure(SNAKEMAKE, workflow.directory).wall_s
    name = f"after an edit that touches {DENSE} of {LAYERS} layers"
    return [*results, Result(name, edited / full, "of a full run", f"{full:.1f} s")]


if __name__ == "__main__":
    work_in_one_process(Path.cwd())

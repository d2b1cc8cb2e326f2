"""All that a report shows, made in this one process by the same functions of the library, from a config.yaml in this folder.

Without Snakemake, records, fingerprints or preflight: what the workflow is measured against in `overhead.py`.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from layerproof.compare import audit
from layerproof.compare import stage as compare_stages
from layerproof.diagnose.result import undiagnosed
from layerproof.environment import software
from layerproof.files import write_json, write_text
from layerproof.golden import stage as golden_stage
from layerproof.host import prediction
from layerproof.measure.rule import LIMIT
from layerproof.model import checkpoint, handed, loading, tokens
from layerproof.model.resolve import resolve
from layerproof.model.stages import all_stages, previous_stage
from layerproof.paths import CAUSES, GLOSSARY, TEMPLATES
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.report import page, plots, verdicts


def main(directory: Path) -> None:
    """Works in a folder with `config.yaml`, its model and its token ids."""
    settings = resolve(yaml.safe_load((directory / "config.yaml").read_text())).settings
    model, results = directory / settings.model.checkpoint, directory / "results"
    layers = checkpoint.num_layers(checkpoint.read_config(model))
    stages = all_stages(layers)
    descriptions, unused = loading.describe_stages(model, stages, settings.model.trust_remote_code)
    ids = Path(settings.inputs.token_ids)
    tokens.make(results / "tokens.json", model, checkpoint.read_config(model), None, ids, 4096, False)
    prompts = tokens.Tokens.read(results / "tokens.json")
    predicted = prediction.predict(model, descriptions, prompts, settings, stages, [], {})
    runner = Runner.start(model, prompts, settings)
    comparisons, files = [], {side: {} for side in ("golden", "noise", "port", "plots")}
    for stage in stages:
        for side, ending in (("golden", "h5"), ("noise", "h5"), ("port", "h5"), ("plots", "svg")):
            files[side][stage] = results / side / f"{stage}.{ending}"
        previous = previous_stage(stage, layers)
        before = [files[side].get(previous) for side in ("golden", "noise")]
        made = files["golden"][stage], files["noise"][stage]
        golden_stage.make_stage(stage, model, descriptions[stage], prompts, *before, *made, settings)
        fed = handed.stage_input(before[0], stage)
        port_stage.make_stage(runner, stage, descriptions[stage], fed, files["port"][stage])
        comparisons.append(compare_stages.compare_stage(stage, *made, files["port"][stage], prompts.valid, LIMIT))
        write_json(results / f"compare/{stage}.json", comparisons[-1])
        plots.plot_stage(comparisons[-1], files["plots"][stage])
    files["plots"] |= {name: results / f"plots/{name}.svg" for name in ("map", "depth")}
    plots.plot_map(comparisons, files["plots"]["map"])
    plots.plot_depth(comparisons, [], files["plots"]["depth"])
    audited = audit.audit(descriptions, files["golden"], files["port"], predicted, settings.port.dtype)
    diagnoses = [undiagnosed(stage) for stage in stages]
    verdict = verdicts.collect(comparisons, [], diagnoses)
    made = (verdict, comparisons, [], diagnoses, files["plots"], unused, audited, [], [])
    run = page.Inputs(*made, settings, software({}), GLOSSARY, CAUSES, results)
    write_text(results / "report.html", page.render(TEMPLATES[0], run))


if __name__ == "__main__":
    main(Path.cwd())

"""The whole MiniMax-M2 on paper: what `results/prediction.json` says of all 62 layers, in bf16, by length of the prompt."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from layerproof import loading, prediction
from layerproof.files import write_json
from layerproof.stages import all_stages
from layerproof.tokens import pad
from measure import Result
from memory import CONFIG, shapes

FULL = CONFIG | {"num_hidden_layers": 62, "vocab_size": 200064, "attn_type_list": [1] * 62}
LENGTHS = (512, 4096)


def predict(directory: Path, length: int) -> dict[str, Any]:
    """The prediction for one prompt of this length; the checkpoint is its config and the names of its tensors."""
    write_json(directory / "config.json", FULL)
    needed = dict(shapes(FULL))
    by_stage, _ = loading.assign_stages(loading.meta_model(directory, False), list(needed))
    descriptions = {
        stage: {
            "tensors": {
                name: {"parameter": parameter, "dtype": "BF16", "shape": list(needed[name])}
                for name, parameter in by_stage[stage].items()
            }
        }
        for stage in all_stages(FULL["num_hidden_layers"])
    }
    sides = {"golden": {"dtype": "bfloat16"}, "port": {"dtype": "bfloat16", "backend": "xla"}}
    return prediction.predict(directory, descriptions, pad([[7] * length], 0), {**sides, "trust_remote_code": False})


def run() -> list[Result]:
    """The figures for each length."""
    results = []
    for length in LENGTHS:
        with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:
            found = predict(Path(directory), length)
        weights = sum(one["weights"]["golden"] for one in found["stages"].values())
        baseline = f"{weights / 1e9:.1f} GB of weights"
        layer = found["stages"]["layer_000"]
        for name, size in (
            ("golden job, layer", layer["golden"]),
            ("golden job, lm_head", found["stages"]["lm_head"]["golden"]),
            ("port job, layer", layer["port"]),
            ("golden, whole model", found["whole"]),
            ("tensors in results/", found["files"]),
        ):
            results.append(Result(f"62 layers, 1 x {length} tokens: {name}", size / 1e9, "GB", baseline))
    return results

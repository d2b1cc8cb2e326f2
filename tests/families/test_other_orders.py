"""Linear attention and state spaces that a port computes in another form, or in chunks of another size, are right."""

import functools
import sys

import numpy as np
import pytest

from families import survey
from families.one_process import Run
from layerproof.model import tokens


def in_chunks_of_eight(modeling, part, name):
    for module in part.modules():
        if hasattr(module, "chunk_size"):
            module.chunk_size = 8
    function = getattr(modeling, name)
    return functools.wraps(function)(lambda *args, **kwargs: function(*args, **kwargs | {"chunk_size": 8}))


def step_by_step(modeling, part, name):
    recurrent = getattr(modeling, name.replace("chunk", "recurrent"))

    @functools.wraps(getattr(modeling, name))
    def call(*args, chunk_size=None, **kwargs):
        return recurrent(*args, **{"initial_state": None, "output_final_state": False} | kwargs)

    return call


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("model_type", "function", "form"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", in_chunks_of_eight),
        ("qwen3_next", "torch_chunk_gated_delta_rule", step_by_step),
        ("kimi_linear", "chunk_kimi_delta_attention", in_chunks_of_eight),
        ("kimi_linear", "chunk_kimi_delta_attention", step_by_step),
        ("mamba2", "mamba2_chunk_scan", in_chunks_of_eight),
    ],
)
def test_another_order_passes(tmp_path, monkeypatch, model_type, function, form, dtype):
    survey.save(model_type, tmp_path / "checkpoint", seed=777)
    random = np.random.default_rng(777)
    prompts = tokens.pad([random.integers(3, 90, length).tolist() for length in (20, 11)], 0)
    given = {"golden": {"device": "cpu", "dtype": dtype}, "port": {"backend": "transformers", "dtype": dtype}}
    run = Run.of(tmp_path, prompts, **given)
    for stage in run.stages[:2]:
        run.golden(stage)
    called = []

    def patch(model, part, stage):
        modeling = sys.modules[type(model).__module__]
        other = form(modeling, part, function)
        noting = functools.wraps(other)(lambda *args, **kwargs: called.append(function) or other(*args, **kwargs))
        monkeypatch.setattr(modeling, function, noting)

    comparison = run.port("layer_000", patch)
    assert called and (comparison["status"], comparison["reason"]) == ("pass", None)

"""A port stage on XLA: right where the port is right, clear where it is not."""

import pytest
from test_golden import TOKENS, stream

from layerproof import checkpoint, compare, metrics, port, tensors
from layerproof.stages import all_stages, previous_stage
from models import CONFIGS, save

SETTINGS = {
    "backend": "xla",
    "module": "workflow/ports/minimax_m2.py",
    "device": "CPU",
    "dtype": "bfloat16",
    "options": {},
    "trust_remote_code": False,
}


def run(model, results, out, settings, stages=None):
    """Runs port stages fed with the golden's inputs, in one process; returns the facts by stage."""
    layers = checkpoint.num_layers(checkpoint.read_config(model))
    stages = stages or all_stages(layers)
    descriptions = checkpoint.describe_stages(model, stages, trust_remote_code=False)
    runner = port.Runner.start(model, TOKENS, settings)
    facts = {}
    for stage in stages:
        previous = previous_stage(stage, layers)
        fed = tensors.read(results / f"{previous}.h5", "golden/out") if previous else None
        facts[stage] = port.make_stage(runner, stage, descriptions[stage], fed, out / f"{stage}.h5")
    return facts


def failures(results, out, stage):
    """Reason of every tap that does not pass."""
    result = compare.compare_stage(stage, results / f"{stage}.h5", out / f"{stage}.h5", TOKENS.valid, metrics.LIMIT)
    assert result["taps"], result
    return {name: tap["reason"] for name, tap in result["taps"].items() if tap["status"] != "pass"}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_unmodified_transformers_stages_pass_on_xla(model_type, tmp_path):
    save(model_type, tmp_path / "model")
    stages = stream(tmp_path / "model", tmp_path / "golden")
    run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", SETTINGS | {"backend": "transformers"})
    for stage in stages:
        failed = failures(tmp_path / "golden", tmp_path / "port", stage)
        if model_type == "gpt_oss":
            # Its attention takes a softmax in bf16, which XLA rounds at every step and the CPU once: R of about 2. Noise
            # bands measured on the golden will tell; the first rule, R <= 1.5, cannot.
            assert "out" not in failed and failed.keys() <= {"attn.context", "attn.out", "router.weights"}, failed
            assert all(float(reason.split()[2].rstrip(",")) < 3 for reason in failed.values()), failed
        else:
            assert failed == {}, stage


def test_shipped_port_passes_and_compiles_once_a_kind(tmp_path):
    save("minimax_m2", tmp_path / "model")
    stages = stream(tmp_path / "model", tmp_path / "golden")
    facts = run(tmp_path / "model", tmp_path / "golden", tmp_path / "port", SETTINGS)
    for stage in stages:
        assert failures(tmp_path / "golden", tmp_path / "port", stage) == {}, stage
    assert len({fact["kind"] for fact in facts.values()}) == 4
    by_stage = {stage: fact["compilations"] for stage, fact in facts.items()}
    assert by_stage["layer_000"] > 0 and by_stage["layer_001"] == by_stage["layer_002"] == 0

"""Variants of the golden: as right as the golden itself, different from it, and gone without a trace afterwards."""

import pytest
import torch

from layerproof.golden import stage as golden_stage
from layerproof.golden.transformers_stage import run_stage
from layerproof.golden.variants import VARIANTS, variants
from layerproof.measure import metrics
from layerproof.model import loading
from layerproof.taps import OUT
from layerproof.tensors import hdf5
from models import CONFIGS, save
from streaming import SETTINGS, TOKENS

pytestmark = pytest.mark.slow

IDS, VALID = torch.from_numpy(TOKENS.ids), torch.from_numpy(TOKENS.valid)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_variants_of_a_layer_are_noise_and_leave_the_model_as_it_was(model_type, tmp_path):
    save(model_type, tmp_path / "model")
    descriptions, _ = loading.describe_stages(tmp_path / "model", ["layer_001"], trust_remote_code=False)

    def load(dtype):
        return golden_stage.load(
            "layer_001", tmp_path / "model", descriptions["layer_001"], torch.device("cpu"), dtype, SETTINGS
        )

    model = load(torch.bfloat16)
    stage_input = torch.randn(*IDS.shape, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def run(x, model=model):
        return run_stage(model, "layer_001", x, IDS, VALID)

    before = run(stage_input)
    found = dict(variants(model, run, stage_input))
    after = run(stage_input)
    assert tuple(found) == VARIANTS
    assert all(torch.equal(before[name], after[name]) for name in before), "the golden's own run must not change"
    truth = run(stage_input.float(), load(torch.float32))
    for name, taps in found.items():
        assert taps.keys() == before.keys()
        tap = "post_attn_norm" if "router.choice" in taps else OUT  # before experts may flip
        result = metrics.compare(*(hdf5.to_array(of[tap]) for of in (taps, before, truth)), TOKENS.valid)
        assert result["R"] < 2.5, name
    assert not torch.equal(found["split"]["attn.q"], before["attn.q"])
    assert not torch.equal(found["stepwise"]["attn.context"], before["attn.context"])
    if "router.weights" in before:
        assert found["stepwise"]["router.weights"].dtype == torch.bfloat16
    assert not torch.equal(found["input"]["input_norm"], before["input_norm"])
    assert torch.equal(found["split"]["input_norm"], before["input_norm"]), "no product with a weight comes before"


def test_embed_is_a_lookup_and_has_no_variants(tmp_path):
    save("llama", tmp_path / "model")
    assert list(variants(loading.meta_model(tmp_path / "model", False), lambda x: pytest.fail("ran"), None)) == []

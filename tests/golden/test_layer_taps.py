"""How tensors inside a layer of transformers become taps."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from layerproof.golden.transformers_stage import run_stage
from models import save

NUMBERS = torch.randn(2, 6, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [2, 4])
def test_as_many_tokens_as_heads_are_no_other_layout(tmp_path, tokens):
    """The model has four heads of queries and two of keys."""
    save("llama", tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    ids, valid = torch.full((2, 6), 5), torch.ones(2, 6, dtype=torch.bool)
    whole = run_stage(model, "layer_000", NUMBERS, ids, valid)
    first = run_stage(model, "layer_000", NUMBERS[:, :tokens], ids[:, :tokens], valid[:, :tokens])
    for name in ("attn.q_rot", "attn.k_rot"):
        assert torch.allclose(first[name], whole[name][:, :tokens], atol=1e-5), name

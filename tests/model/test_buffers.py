"""Buffers that no checkpoint contains are computed, or the model is refused."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from layerproof.errors import UserError
from layerproof.model.buffers import make_computed_buffers

CONFIG = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
MASK = torch.ones(4, 4).tril()


class Masked(LlamaForCausalLM):
    """A model with a mask, which `_init_weights` computes again."""

    computes_again = True

    def __init__(self, config, dtype=torch.bool):
        super().__init__(config)
        self.register_buffer("mask", MASK.to(dtype), persistent=False)

    def _init_weights(self, module):
        super()._init_weights(module)
        if module is self and self.computes_again:
            self.mask.copy_(MASK)


class Forgetful(Masked):
    computes_again = False


DTYPES = [torch.bool, torch.float32, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_buffer_is_computed_as_the_model_initialises_it(dtype):
    with torch.device("meta"):
        model = Masked(CONFIG, dtype)
    make_computed_buffers(model, torch.device("cpu"))
    assert model.mask.equal(MASK.to(dtype)) and model.model.rotary_emb.inv_freq.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_model_that_computes_a_buffer_only_when_it_is_built_is_refused(dtype):
    with torch.device("meta"):
        model = Forgetful(CONFIG, dtype)
    with pytest.raises(UserError, match="does not compute the buffer mask again"):
        make_computed_buffers(model, torch.device("cpu"))

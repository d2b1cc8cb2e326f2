"""A port of a model whose layers get more than hidden states: `x` is a dict of tensors, and so may be what it returns."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from configs import config_with
from families.configs import small
from layerproof.compare.stage import compare_stage
from layerproof.errors import StageError
from layerproof.measure.rule import LIMIT
from layerproof.model import handed, loading
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5
from streaming import TOKENS, stream

pytestmark = pytest.mark.slow

ZAMBA = '''
"""Zamba's own modules, as somebody who ports it would call them. Its layers read the embeddings again."""
import re

import torch
from transformers import AutoConfig, AutoModelForCausalLM


class Embedding(torch.nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, ids, positions, valid):
        embedded = self.embedding(ids)
        return {RETURNED}


class Layer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, positions, valid):
        allowed = (positions[:, None] >= positions) & valid[:, None, None]
        mask = torch.where(allowed, 0.0, torch.finfo(self.layer.linear.weight.dtype).min)
        return self.layer(
            x["hidden_states"], original_hidden_states=x["original_hidden_states"], layer_idx=1,
            attention_mask=valid.long(), causal_mask=mask.to(x["hidden_states"].dtype), use_cache=False,
        )


def build(stage):
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(stage.checkpoint)
        model = AutoModelForCausalLM.from_config(config, dtype=stage.dtype, attn_implementation="eager").model
    return Embedding(model.embed_tokens) if stage.layer is None else Layer(model.layers[stage.layer])


def convert(stage, weights):
    for name in weights:
        if stage.layer is None:
            yield "embedding.weight", weights[name]
        else:
            yield re.sub(r"model\\.layers\\.\\d+\\.", "layer.", name), weights[name]
'''
BOTH = '{"hidden_states": embedded, "original_hidden_states": embedded}'


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    folder = tmp_path_factory.mktemp("zamba")
    config = small("zamba")
    config.num_hidden_layers, config.layers_block_type = 2, ["hybrid", "hybrid"]
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "model")
    stream(folder / "model", folder)
    return folder


def port(golden, tmp_path, returned):
    """A runner of the port whose embedding returns this, and the description of each stage."""
    module = tmp_path / "zamba.py"
    module.write_text(ZAMBA.replace("{RETURNED}", returned))
    settings = {"backend": "xla", "module": str(module), "device": "CPU", "dtype": "bfloat16"}
    stages = ["embed", "layer_000", "layer_001"]
    descriptions, _ = loading.describe_stages(golden / "model", stages, trust_remote_code=False)
    return Runner.start(golden / "model", TOKENS, config_with(port=settings)), descriptions


def made(golden, tmp_path, returned, stage, before):
    runner, descriptions = port(golden, tmp_path, returned)
    fed = handed.stage_input(golden / f"{before}.h5" if before else None, stage)
    output = tmp_path / f"{stage}.h5"
    port_stage.make_stage(runner, stage, descriptions[stage], fed, output)
    return compare_stage(stage, golden / f"{stage}.h5", golden / f"{stage}.noise.h5", output, TOKENS.valid, LIMIT)


def test_what_an_embedding_hands_on_is_compared(golden, tmp_path):
    taps = made(golden, tmp_path, BOTH, "embed", None)["taps"]
    assert {name: tap["status"] for name, tap in taps.items()} == {
        "out/original_hidden_states": "pass",
        "out": "pass",
    }


def test_a_wrong_tensor_for_later_stages_fails_where_it_is_made(golden, tmp_path):
    wrong = BOTH.replace(": embedded}", ": embedded * 2}")
    result = made(golden, tmp_path, wrong, "embed", None)
    assert result["status"] == "fail" and result["reason"].startswith("out/original_hidden_states:")


def test_a_port_that_returns_one_tensor_stays_as_it_is(golden, tmp_path):
    result = made(golden, tmp_path, "embedded", "embed", None)
    assert result["status"] == "pass"
    assert result["taps"]["out/original_hidden_states"]["status"] == "missing"


def test_a_layer_gets_what_earlier_stages_hand_over_by_name(golden, tmp_path):
    assert made(golden, tmp_path, BOTH, "layer_001", "layer_000")["status"] == "pass"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[embedded]", "embed: the port returns list, neither one tensor nor a dict of tensors by name"),
        ('{"out": embedded}', "embed: the port returns a dict without hidden_states"),
        ('{"hidden_states": embedded, "x": 1}', "embed: the port returns a dict whose x is not a tensor"),
    ],
)
def test_an_output_of_another_form_is_told(golden, tmp_path, returned, message):
    with pytest.raises(StageError, match=message):
        made(golden, tmp_path, returned, "embed", None)


def test_a_chain_hands_on_what_the_port_computed(golden, tmp_path):
    runner, descriptions = port(golden, tmp_path, BOTH.replace(": embedded}", ": embedded * 2}"))
    outputs = {}
    for factor, embedding in ((1, "port"), (2, "golden")):
        fed = None
        for stage in descriptions:
            output = tmp_path / str(factor) / f"{stage}.h5"
            output.parent.mkdir(exist_ok=True)
            if stage == "embed" and embedding == "golden":
                fed = handed.stage_input(golden / "embed.h5", "layer_000")
                continue
            port_stage.chain_stage(runner, stage, descriptions[stage], fed, output)
            following = {"embed": "layer_000", "layer_000": "layer_001"}.get(stage)
            fed = handed.stage_input(output, following, "port/out") if following else None
        outputs[embedding] = hdf5.to_torch(hdf5.read(output, "port/out"))
    assert not torch.equal(outputs["port"], outputs["golden"]), "the layer reads what this embedding handed over"
    as_one = port_stage.run_chain(runner, descriptions, None, list(descriptions))
    assert torch.equal(hdf5.to_torch(as_one), outputs["port"])

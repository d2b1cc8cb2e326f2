"""What a stage's job holds in memory beside the stage: next to nothing, in the golden's job as in the port's."""

import math
from collections import Counter

import pytest
import torch
import torch_xla
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from configs import config_with
from layerproof.golden import stage as golden_stage
from layerproof.model import checkpoint, fp8, loading
from layerproof.model.handed import StageInput
from layerproof.model.tokens import pad
from layerproof.port import prepare
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5
from models import COMMON
from peak import Peak

pytestmark = pytest.mark.slow

STAGE = "layer_000"
SETTINGS = config_with(golden={"device": "cpu"}, port={"device": "CPU"})
TOKENS = pad([[3, 4, 5], [6, 7]], pad_id=0)
WIDE = {"num_hidden_layers": 1, "num_local_experts": 64, "num_experts_per_tok": 2, "rotary_dim": 8, "hidden_size": 128}


@pytest.fixture(scope="module", params=["bf16", "fp8"])
def model(request, tmp_path_factory):
    """A layer that is nearly all experts, as those of the full-size models are, and its bytes in bf16."""
    directory = tmp_path_factory.mktemp("model")
    made = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax_m2"](**COMMON | WIDE)).to(torch.bfloat16)
    made.save_pretrained(directory, max_shard_size="100KB")
    if request.param == "fp8":
        fp8.quantize_checkpoint(directory)
    stages = loading.describe_stages(directory, ["embed", STAGE], False)[0]
    return directory, stages, sum(tensor.nbytes for tensor in made.model.layers[0].state_dict().values())


@pytest.fixture
def read(monkeypatch):
    """Elements that were read from disk by the names of tensors, through the one place where that is done."""
    elements, from_disk = Counter(), checkpoint.TensorOfStage.__getitem__

    def counted(tensor, index):
        part = from_disk(tensor, index)
        elements[tensor.name] += part.numel()
        return part

    monkeypatch.setattr(checkpoint.TensorOfStage, "__getitem__", counted)
    return elements


def started(directory):
    """A runner of the shipped port, and what its layer is fed with."""
    fed = StageInput(hdf5.to_array(torch.zeros(*TOKENS.ids.shape, WIDE["hidden_size"], dtype=torch.bfloat16)))
    return Runner.start(directory, TOKENS, SETTINGS), fed


def sizes(description):
    return {name: math.prod(entry["shape"]) for name, entry in description["tensors"].items()}


def test_golden_reads_its_stage_once(model, read, tmp_path):
    directory, stages, _ = model
    paths = [tmp_path / name for name in ("embed.h5", "embed.noise.h5", "layer.h5", "layer.noise.h5")]
    golden_stage.make_stage(
        "embed", directory, stages["embed"], TOKENS, None, None, *paths[:2], SETTINGS, with_taps=False
    )
    read.clear()
    golden_stage.make_stage(STAGE, directory, stages[STAGE], TOKENS, *paths, SETTINGS)
    assert read == sizes(stages[STAGE])


def test_port_reads_its_stage_once(model, read, tmp_path):
    directory, stages, _ = model
    runner, fed = started(directory)
    port_stage.make_stage(runner, STAGE, stages[STAGE], fed, tmp_path / "layer.h5")
    assert read == sizes(stages[STAGE])


def test_golden_holds_its_stage_once(model, tmp_path):
    directory, stages, size = model
    paths = [tmp_path / name for name in ("embed.h5", "embed.noise.h5", "layer.h5", "layer.noise.h5")]
    golden_stage.make_stage(
        "embed", directory, stages["embed"], TOKENS, None, None, *paths[:2], SETTINGS, with_taps=False
    )
    with Peak() as peak:
        golden_stage.make_stage(STAGE, directory, stages[STAGE], TOKENS, *paths, SETTINGS)
    assert size <= peak.bytes < 1.25 * size


def test_port_holds_its_stage_once(model, tmp_path, monkeypatch):
    """On the host as torch counts it; and XLA takes the weights where they are, which torch would not see."""
    directory, stages, size = model
    runner, fed = started(directory)
    shared, on_device = Counter(), prepare._on_device

    def watched(tensor, *device):
        moved = on_device(tensor, *device)
        there = torch_xla._XLAC._unsafe_buffer_pointer(moved)
        shared[there == tensor.data_ptr()] += tensor.nbytes
        return moved

    monkeypatch.setattr(prepare, "_on_device", watched)
    with Peak() as peak:
        port_stage.make_stage(runner, STAGE, stages[STAGE], fed, tmp_path / "layer.h5")
    assert sum(shared.values()) <= peak.bytes < 1.1 * size
    assert shared[True] > 0.99 * size

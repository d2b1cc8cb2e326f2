"""The fault dictionary on every architecture: a fault is made or does not apply, and leaves the golden as it was."""

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch

from configs import config_with
from layerproof.diagnose import diagnose
from layerproof.diagnose.faults import DICTIONARY, NotApplicable
from layerproof.model import checkpoint, loading, tokens
from layerproof.taps import OUT, SHAPES
from models import CONFIGS, FP8, save

pytestmark = pytest.mark.slow

SETTINGS = config_with(golden={"device": "cpu"})
PROMPTS = tokens.pad([list(range(3, 23)), [5, 9, 2, 40, 41, 7, 8]], 0)
MODELS = [*CONFIGS, "deepseek_v3", "gemma2", "mixtral", "glm4", "cohere2", "phi", *FP8]
STAGES = ["embed", "layer_000", "layer_001", "norm", "lm_head"]


@cache
def model_directory(model):
    directory = Path(tempfile.mkdtemp()) / model
    atexit.register(shutil.rmtree, directory.parent)
    save(model, directory)
    return directory


def golden_stage(model, name, dtype):
    """A stage fed with random numbers."""
    directory = model_directory(model)
    config = checkpoint.read_config(directory)
    stages = ["embed", *(f"layer_{layer:03d}" for layer in range(config["num_hidden_layers"])), "norm", "lm_head"]
    descriptions, _ = loading.describe_stages(directory, stages, False)
    subject = diagnose.FailedStage(name, directory, descriptions, PROMPTS, None, SETTINGS, 1.5)
    made = diagnose.load(subject, torch.device("cpu"))[dtype == torch.float32]
    if name != "embed":
        shape = (*PROMPTS.ids.shape, config["hidden_size"])
        made.x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return made


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@cache
def tried(model, name):
    """The faults that change this stage, and the (fault, tap) where one shows at a canonical tap before its own."""
    changing, early = set(), []
    for dtype in (torch.bfloat16, torch.float32):
        stage = golden_stage(model, name, dtype)
        plain = stage.run({})
        forced = {tap: tensor for tap, tensor in plain.items() if tap in SHAPES and tap != OUT}
        for fault in DICTIONARY:
            if fault.tap not in plain:
                continue
            try:
                faulty = stage.run(forced, (fault,), until=fault.tap)
            except NotApplicable:
                continue
            early += [
                (fault.name, fault.tap, tap)
                for tap in faulty
                if tap in SHAPES and tap != fault.tap and not same(faulty[tap], plain[tap])
            ]
            if not same(faulty[fault.tap], plain[fault.tap]):
                changing.add(fault)
        assert equal(stage.run({}), plain), "a fault was left in the golden"
    return changing, early


def same(one, other):
    return one.shape == other.shape and torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("model", MODELS)
def test_a_golden_forced_with_its_own_taps_is_itself(model, dtype):
    stage = golden_stage(model, "layer_001", dtype)
    plain = stage.run({})
    assert len(plain) > 6
    assert equal(stage.run({name: tensor for name, tensor in plain.items() if name != OUT}), plain)


@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("model", MODELS)
def test_a_fault_shows_at_its_tap_first_and_leaves_nothing_behind(model, name):
    _, early = tried(model, name)
    # Another number of experts is what the choice itself is of, also where the fault is put at what follows from it.
    assert [one for one in early if one[0] != "router_top_k"] == []


def test_every_fault_changes_some_architecture():
    changing = {fault.name for model in MODELS for name in STAGES for fault in tried(model, name)[0]}
    # Nothing in these small models is large enough to be clamped: the test below.
    assert {fault.name for fault in DICTIONARY} - changing == {"gate_clamp_dropped"}


@pytest.mark.parametrize("taps", [("attn.k", "attn.v"), ("mlp.gate", "mlp.up")], ids=str)
def test_weights_that_were_exchanged_are_both_exchanged_when_both_taps_are_culprits(taps):
    stage = golden_stage("qwen3_moe", "layer_000", torch.bfloat16)
    faults = [fault for tap in taps for fault in DICTIONARY if (fault.name, fault.tap) == ("weights_swapped", tap)]
    plain, swapped = stage.run({}), stage.run({}, faults)
    assert same(swapped[taps[0]], plain[taps[1]]) and same(swapped[taps[1]], plain[taps[0]])


def test_a_neighbours_weights_are_given_back():
    stage = golden_stage("minimax_m2", "layer_001", torch.bfloat16)
    before = sum(not tensor.is_meta for tensor in stage.model.state_dict().values())
    (fault,) = (fault for fault in DICTIONARY if fault.slow and fault.tap == "mlp.out" and "next" in fault.text)
    assert not same(stage.run({}, (fault,))["mlp.out"], stage.run({})["mlp.out"])
    assert sum(not tensor.is_meta for tensor in stage.model.state_dict().values()) == before


def test_a_dropped_clamp_shows_where_something_is_clamped():
    stage = golden_stage("gpt_oss", "layer_001", torch.bfloat16)
    stage.module.mlp.experts.limit = 0.01
    (fault,) = (fault for fault in DICTIONARY if fault.name == "gate_clamp_dropped")
    assert not same(stage.run({}, (fault,))["mlp.out"], stage.run({})["mlp.out"])


def test_faults_are_named_and_placed_at_taps():
    assert {fault.tap for fault in DICTIONARY} <= set(SHAPES)
    assert len({(fault.name, fault.text, fault.tap) for fault in DICTIONARY}) >= 200
    assert len({fault.name for fault in DICTIONARY}) >= 70
    for fault in DICTIONARY:
        assert fault.name.replace("_", "").isalnum() and not fault.text.endswith(".")

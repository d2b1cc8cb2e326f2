"""The whole golden in one process gives the files that the streamed one does, wherever accelerate puts its parts."""

import numpy as np
import pytest
import torch

from layerproof import config
from layerproof.errors import UserError
from layerproof.golden.whole import FullModel, device_of
from layerproof.model import checkpoint
from layerproof.tensors import hdf5
from models import CONFIGS, FP8
from streaming import SETTINGS, TOKENS, stream

pytestmark = pytest.mark.slow


def start(directory, **golden):
    settings = config.changed(SETTINGS, golden=config.changed(SETTINGS.golden, **golden))
    return FullModel.start(directory, TOKENS, settings)


def contents(path):
    with hdf5.reading(path) as file:
        names: list[str] = []
        file.visit(names.append)
        return {name: file[name][...] for name in names if hasattr(file[name], "dtype")}


def assert_equal_files(one, other, stages):
    for stage in stages:
        for name in (f"{stage}.h5", f"{stage}.noise.h5"):
            streamed, whole = contents(one / name), contents(other / name)
            assert streamed.keys() == whole.keys() and streamed
            for key, data in streamed.items():
                assert np.array_equal(data, whole[key], equal_nan=data.dtype.kind == "f"), (name, key)
        with hdf5.reading(other / f"{stage}.h5") as file:
            assert file.attrs["alone"] == 0


@pytest.mark.parametrize("model_type", [*CONFIGS, *FP8])
def test_on_one_device(model_type, golden_of, tmp_path):
    streamed = golden_of(model_type)
    stages = stream(streamed / "model", tmp_path, start(streamed / "model", device_map="cpu"))
    assert_equal_files(streamed, tmp_path, stages)


@pytest.mark.parametrize("model_type", ["minimax_m2", "gpt_oss", "llama", *FP8])
def test_with_layers_and_head_offloaded(model_type, golden_of, tmp_path):
    streamed = golden_of(model_type)
    layers = checkpoint.num_layers(checkpoint.read_config(streamed / "model"))
    device_map = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "disk"}
    device_map |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(layers)}
    if model_type == "llama":  # a tied head is where the embedding is
        device_map["lm_head"] = "cpu"
    whole = start(streamed / "model", device_map=device_map, offload_folder=str(tmp_path / "offload"))
    assert whole.model.get_submodule("model.layers.1").input_layernorm.weight.is_meta
    assert device_of(whole.model, "layer_001") == torch.device("cpu")
    stages = stream(streamed / "model", tmp_path / "whole", whole)
    assert_equal_files(streamed, tmp_path / "whole", stages)


@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential"])
def test_as_accelerate_spreads_it_within_limits(strategy, golden_of, tmp_path):
    streamed = golden_of("minimax_m2")
    limits = {"max_memory": {"cpu": "800KB"}, "offload_folder": str(tmp_path / "offload")}
    whole = start(streamed / "model", device_map=strategy, **limits)
    assert set(map(str, whole.model.hf_device_map.values())) == {"cpu", "disk"}
    stages = stream(streamed / "model", tmp_path / "whole", whole)
    assert_equal_files(streamed, tmp_path / "whole", stages)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"device_map": "cuda:0"}, "golden.device_map: cuda:0: transformers cannot load the full model this way"),
        ({"device_map": "nowhere"}, "golden.device_map: nowhere: transformers cannot load the full model this way"),
        ({"device_map": {"lm_head": "cpu"}}, "transformers cannot load the full model this way"),
    ],
)
def test_a_map_that_cannot_be_is_told_in_one_line(settings, told, golden_of):
    with pytest.raises(UserError, match=told) as error:
        start(golden_of("minimax_m2") / "model", **settings)
    assert "write golden.mode: streamed" in str(error.value) and "\n" not in str(error.value)

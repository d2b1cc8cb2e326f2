"""Checkpoints: every tensor belongs to a stage, its digest covers content alone, and damage is told by stage."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from configs import config_with
from layerproof.compare.stage import compare_stage
from layerproof.errors import StageError, UserError
from layerproof.golden import stage as golden_stage
from layerproof.golden import transformers_stage
from layerproof.model import checkpoint, loading
from layerproof.model.parts import parts_of
from layerproof.model.stages import all_stages
from layerproof.model.tokens import pad
from layerproof.tensors import hdf5
from models import CONFIGS, save

SMALL = "qwen3"
STAGES = all_stages(CONFIGS[SMALL]["num_hidden_layers"])
DOWN = "model.layers.1.mlp.down_proj.weight"
RWKV = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 3, "rescale_every": 1}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Checkpoints by architecture, each made once; tests change copies."""
    made = {}

    def get(model_type):
        if model_type not in made:
            made[model_type] = tmp_path_factory.mktemp(model_type)
            save(model_type, made[model_type])
        return made[model_type]

    return get


@pytest.fixture
def model(saved, tmp_path):
    return Path(shutil.copytree(saved(SMALL), tmp_path / "model"))


def shard_of(directory, name):
    return directory / json.loads((directory / checkpoint.INDEX).read_text())["weight_map"][name]


def edit(directory, shard, change):
    """Rewrites a shard with its tensors changed in place by `change(tensors)`."""
    held = load_file(directory / shard)
    change(held)
    save_file(held, directory / shard, metadata={"format": "pt"})


def point_index(directory, shards):
    index = json.loads((directory / checkpoint.INDEX).read_text())
    index["weight_map"] |= shards
    (directory / checkpoint.INDEX).write_text(json.dumps(index))


def describe(directory, stages=STAGES):
    return loading.describe_stages(directory, stages, trust_remote_code=False)[0]


def unused(directory, stages=STAGES):
    return loading.describe_stages(directory, stages, trust_remote_code=False)[1]


def digests(directory):
    return {stage: entry["digest"] for stage, entry in describe(directory).items()}


def failed(described):
    return {stage: entry["error"] for stage, entry in described.items() if "error" in entry}


def load(directory, stage, description):
    model = loading.meta_stage(directory, stage, False, torch.float32)
    loading.load_stage(model, stage, directory, description, torch.device("cpu"))
    return model


@pytest.mark.parametrize("model_type", CONFIGS)
def test_a_stage_is_built_as_in_the_whole_model_and_other_layers_without_modules(saved, model_type):
    directory = saved(model_type)
    whole = loading.meta_model(directory, False, torch.bfloat16)
    stages = all_stages(CONFIGS[model_type]["num_hidden_layers"])
    for stage in stages:
        model = loading.meta_stage(directory, stage, False, torch.bfloat16)
        for other in stages:
            module, wanted = (transformers_stage.stage_module(of, other) for of in (model, whole))
            assert type(module) is type(wanted) and vars(module).keys() == vars(wanted).keys()
            assert module.training is wanted.training is False
            assert getattr(module, "config", model.config) is not getattr(wanted, "config", None)
            if other == stage or not other.startswith("layer"):
                assert loading.weights_in_memory(model, other) == loading.weights_in_memory(whole, other)
            else:
                assert not module.state_dict() and not list(module.children())


def test_a_stage_is_built_anew_after_it_was_filled_and_when_the_config_changed(model):
    filled = load(model, "layer_001", describe(model)["layer_001"])
    filled.config.rms_norm_eps = 1.0
    again = loading.meta_stage(model, "layer_001", False, torch.float32)
    assert not any(tensor.is_meta for tensor in loading.parameters_of(filled, "layer_001").values())
    assert all(tensor.is_meta for tensor in loading.parameters_of(again, "layer_001").values())
    config = json.loads((model / "config.json").read_text())
    assert again.config.rms_norm_eps == config["rms_norm_eps"]
    (model / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert loading.meta_stage(model, "layer_001", False, torch.float32).config.rms_norm_eps == 0.5


@pytest.mark.parametrize("model_type", CONFIGS)
def test_every_tensor_on_disk_belongs_to_one_stage(saved, model_type):
    directory = saved(model_type)
    stages = all_stages(CONFIGS[model_type]["num_hidden_layers"])
    described = describe(directory, stages)
    on_disk = sorted(name for shard in checkpoint.shards(directory) for name in load_file(directory / shard))
    assert len(checkpoint.shards(directory)) > 1
    tied = CONFIGS[model_type]["tie_word_embeddings"]
    used = sorted(name for stage in stages[: -1 if tied else None] for name in described[stage]["tensors"])
    assert used == on_disk
    assert unused(directory, stages) == []
    assert all(entry["tensors"] for entry in described.values())
    if tied:
        assert described["lm_head"] == described["embed"]


def test_tensors_are_described_as_they_are(saved):
    entry = describe(saved(SMALL))["layer_001"]["tensors"][DOWN]
    assert (entry["dtype"], entry["shape"]) == ("BF16", [64, 96])
    assert entry["file"] == shard_of(saved(SMALL), DOWN).name


def test_only_the_digest_of_the_stage_whose_tensor_changed_is_another(model):
    before = digests(model)
    assert len(set(before.values())) == len(before)
    edit(model, shard_of(model, DOWN).name, lambda held: held[DOWN].view(torch.int16)[-1, -1].bitwise_xor_(1))
    after = digests(model)
    assert {stage for stage in STAGES if before[stage] != after[stage]} == {"layer_001"}


@pytest.mark.parametrize("change", [torch.Tensor.half, lambda tensor: tensor.view(96, 64)], ids=["dtype", "shape"])
def test_the_digest_covers_dtype_and_shape(model, change):
    """Zeros have the same bytes in any 16-bit type and any order."""
    shard = shard_of(model, DOWN).name
    edit(model, shard, lambda held: held[DOWN].zero_())
    before = digests(model)
    edit(model, shard, lambda held: held.update({DOWN: change(held[DOWN])}))
    assert digests(model)["layer_001"] != before["layer_001"]


def test_moving_a_tensor_to_another_shard_changes_no_digest(model):
    before = describe(model)
    source = shard_of(model, DOWN).name
    target = next(shard for shard in checkpoint.shards(model) if shard != source)
    moved = {}
    edit(model, source, lambda held: moved.update({DOWN: held.pop(DOWN)}))
    edit(model, target, lambda held: held.update(moved))
    point_index(model, {DOWN: target})
    after = describe(model)
    assert after["layer_001"]["tensors"][DOWN]["file"] == target
    assert {s: e["digest"] for s, e in after.items()} == {s: e["digest"] for s, e in before.items()}
    weight = load(model, "layer_001", after["layer_001"]).get_submodule("model.layers.1.mlp.down_proj").weight
    assert torch.equal(weight.bfloat16(), moved[DOWN])


def test_shards_in_a_folder_and_an_index_of_nothing_are_told(model):
    """A shard is known by its name, so one of a folder would be taken for one that is beside the index."""
    shard = shard_of(model, DOWN).name
    point_index(model, {DOWN: f"sub/{shard}"})
    with pytest.raises(UserError, match=rf"names sub/{shard} in another directory\. Put all shards beside the index\."):
        checkpoint.shards(model)
    (model / checkpoint.INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(UserError, match="lists no tensors"):
        checkpoint.shards(model)


def test_a_truncated_shard_fails_the_stages_whose_tensors_are_cut(model):
    shard = shard_of(model, DOWN)
    os.truncate(shard, shard.stat().st_size - 1)
    errors = failed(describe(model))
    last = max(checkpoint.read_shard_header(shard).values(), key=lambda tensor: tensor.end).name
    owners = {stage for stage in STAGES if stage.startswith("layer") and f".{int(stage[-3:])}." in last}
    assert set(errors) == owners and len(errors) == 1
    (stage,) = owners
    assert errors[stage] == f"{stage}: {shard}: ends inside tensor {last} (truncated?). Copy the shard again."


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda path: path.unlink(), "does not exist, but the index names it. Copy the shard again."),
        (lambda path: path.unlink() or path.mkdir(), "cannot be read (Is a directory). Copy the shard again."),
        (lambda path: path.write_bytes(b""), "has no readable header (truncated?). Copy the shard again."),
        (lambda path: os.truncate(path, 40), "has no readable header (truncated?). Copy the shard again."),
        (lambda path: path.write_bytes(b"\xff" * 300), "has no readable header (truncated?). Copy the shard again."),
        (lambda path: path.write_bytes((9).to_bytes(8, "little") + b"{garbage}"), "has no readable header"),
        (lambda path: path.write_bytes((2).to_bytes(8, "little") + b"[]"), "has no readable header"),
        (lambda path: path.write_bytes((9).to_bytes(8, "little") + b'{"a": 1} '), "has no readable header"),
        (lambda path: path.write_bytes((10).to_bytes(8, "little") + b'{"a": {}} '), "has no readable header"),
    ],
    ids=["gone", "folder", "empty", "cut", "huge", "garbage", "list", "number", "fields"],
)
def test_a_damaged_shard_fails_only_the_stages_that_need_it(model, damage, told):
    shard = shard_of(model, DOWN)
    whole = describe(model)
    need_it = {s for s, e in whole.items() if any(t["file"] == shard.name for t in e["tensors"].values())}
    assert "layer_001" in need_it and len(need_it) < len(STAGES)
    damage(shard)
    described = describe(model)
    assert set(failed(described)) == need_it
    assert all(message.startswith(f"{stage}: {shard}: {told}") for stage, message in failed(described).items())
    assert all(described[stage] == whole[stage] for stage in STAGES if stage not in need_it)
    with pytest.raises(StageError, match=shard.name):
        load(model, "layer_001", described["layer_001"])


def test_a_shard_that_is_damaged_after_its_description_is_told_when_it_is_loaded(model):
    description = describe(model)["layer_001"]
    shard_of(model, DOWN).write_bytes(b"\xff" * 300)
    with pytest.raises(StageError, match=r"cannot be opened .* Copy the shard again"):
        load(model, "layer_001", description)


def test_a_tensor_that_only_the_index_names(model):
    shard = shard_of(model, DOWN).name
    edit(model, shard, lambda held: held.pop(DOWN))
    assert failed(describe(model)) == {
        "layer_001": f"layer_001: {shard}: tensor {DOWN} is missing; the index names it. Copy the shard again."
    }


def test_a_tensor_that_nothing_names(model):
    """Neither index nor shard know it: only the model that config.json describes does."""
    whole = describe(model)["layer_001"]
    edit(model, shard_of(model, DOWN).name, lambda held: held.pop(DOWN))
    index = json.loads((model / checkpoint.INDEX).read_text())
    del index["weight_map"][DOWN]
    (model / checkpoint.INDEX).write_text(json.dumps(index))
    wanted = f"layer_001: {model} has no tensor for model.layers.1.mlp.down_proj.weight. Copy the checkpoint again."
    assert failed(describe(model)) == {"layer_001": wanted}
    description = {"tensors": {name: entry for name, entry in whole["tensors"].items() if name != DOWN}}
    with pytest.raises(StageError, match=r"^layer_001: the checkpoint .* lacks model\.layers\.1\.mlp\.down_proj\.w"):
        load(model, "layer_001", description)


@pytest.mark.parametrize("name", ["model.layers.1.mlp.extra.weight", "model.layers.9.mlp.down_proj.weight", "other"])
def test_a_tensor_that_the_model_has_no_place_for_is_listed_as_unused(model, name):
    before = digests(model)
    edit(model, shard_of(model, DOWN).name, lambda held: held.update({name: torch.ones(2)}))
    assert unused(model) == [name]
    assert digests(model) == before


def test_a_tensor_of_the_wrong_shape_names_stage_and_tensor(model):
    edit(model, shard_of(model, DOWN).name, lambda held: held.update({DOWN: torch.ones(64, 95).bfloat16()}))
    with pytest.raises(StageError) as error:
        load(model, "layer_001", describe(model)["layer_001"])
    assert (
        str(error.value)
        == f"layer_001: {DOWN} has shape [64, 95], but config.json requires [64, 96]. Copy the checkpoint again."
    )


@pytest.mark.slow
def test_weights_that_are_nan_load_and_fail_the_comparison(model, tmp_path):
    tokens = pad([[3, 4, 5, 6], [7, 8]], 0)
    settings = config_with(golden={"device": "cpu"})

    def run(name):
        description = describe(model, ["embed"])["embed"]
        golden_stage.make_stage(
            "embed", model, description, tokens, None, None, tmp_path / name, tmp_path / "noise.h5", settings
        )

    run("whole.h5")
    embedding = "model.embed_tokens.weight"
    edit(model, shard_of(model, embedding).name, lambda held: held[embedding][4].fill_(torch.nan))
    run("nan.h5")
    with hdf5.reading(tmp_path / "nan.h5") as file:
        assert hdf5.attributes(file["golden/out"])["nan"] == 64
    hdf5.write(tmp_path / "port.h5", {"port": {"out": hdf5.read(tmp_path / "nan.h5", "golden/out")}})
    result = compare_stage("embed", tmp_path / "whole.h5", None, tmp_path / "port.h5", tokens.valid, 1.5)
    assert result["status"] == "fail" and result["taps"]["out"]["status"] == "fail"


def test_pickle_is_refused(model):
    for path in model.glob("*.safetensors*"):
        path.unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(UserError, match=r"contains neither .* does not read pytorch_model\.bin"):
        describe(model)


def test_an_index_that_names_pickle_is_not_unpickled(model):
    """A pickle's first bytes are no safetensors header; nothing of it runs."""
    marker, shard = model / "ran", shard_of(model, DOWN).name
    (model / "evil.bin").write_bytes(b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR.")
    point_index(model, {DOWN: "evil.bin"})
    edit(model, shard, lambda held: held.pop(DOWN))
    assert "evil.bin: has no readable header" in failed(describe(model))["layer_001"]
    assert not marker.exists()


def test_an_unknown_architecture_is_one_users_error(model):
    (model / "config.json").write_text(json.dumps({"model_type": "no_such_model", "num_hidden_layers": 2}))
    with pytest.raises(UserError, match=r"config\.json: transformers cannot build this model"):
        describe(model)


def test_a_single_file_needs_no_index(model):
    before = digests(model)
    held = {name: tensor for shard in checkpoint.shards(model) for name, tensor in load_file(model / shard).items()}
    for path in model.glob("*.safetensors*"):
        path.unlink()
    save_file(held, model / checkpoint.SINGLE, metadata={"format": "pt"})
    assert digests(model) == before
    (model / checkpoint.SINGLE).write_bytes((model / checkpoint.SINGLE).read_bytes()[:20])
    with pytest.raises(UserError, match=checkpoint.SINGLE):
        describe(model)


def test_weights_that_the_first_forward_changes_are_loaded_as_it_leaves_them(tmp_path):
    """RWKV divides two weights of its later layers by powers of 2, and halves the hidden states between layers."""
    transformers.RwkvForCausalLM(transformers.RwkvConfig(**RWKV)).bfloat16().save_pretrained(tmp_path)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    on_disk = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    whole(input_ids=torch.tensor([[5, 6, 7]]))
    after = whole.state_dict()
    stages = all_stages(RWKV["num_hidden_layers"])
    halved = {name for name in after if not torch.equal(after[name], on_disk[name])}
    assert len(halved) == 2 * 2
    for stage, description in describe(tmp_path, stages).items():
        model = loading.meta_stage(tmp_path, stage, False, torch.bfloat16)
        loading.load_stage(model, stage, tmp_path, description, torch.device("cpu"))
        for name, tensor in loading.parameters_of(model, stage).items():
            assert torch.equal(tensor, after[name]), name
            if name in halved:
                place = (model, name, tmp_path, description, torch.device("cpu"), name)
                assert torch.equal(loading.load_changed(*place, lambda read: read * 8), after[name] * 8)
        twin = loading.meta_stage(tmp_path, stage, False, torch.float32)
        kept = dict(loading.parameters_of(model, stage))
        loading.load_stage(twin, stage, tmp_path, description, torch.device("cpu"), kept)
        assert all(
            torch.equal(tensor, after[name].float()) for name, tensor in loading.parameters_of(twin, stage).items()
        )


def reads(model, x):
    return x * model.layers[0].mlp.down_proj.weight.mean()


def writes_once(model, x):
    if not hasattr(model, "is_prepared"):
        model.is_prepared = True
        model.layers[0].mlp.down_proj.weight.mul_(x.mean())
    return x


@pytest.mark.parametrize("reach, said", [(reads, "reaches into"), (writes_once, "writes a tensor into")])
def test_a_model_that_reaches_into_its_layers_is_refused(reach, said, model, monkeypatch):
    before = transformers.Qwen3Model.forward

    def forward(self, *args, **kwargs):
        output = before(self, *args, **kwargs)
        output.last_hidden_state = reach(self, output.last_hidden_state)
        return output

    monkeypatch.setattr(transformers.Qwen3Model, "forward", forward)
    with pytest.raises(UserError, match=f"cannot be run one layer at a time: .*{said}"):
        parts_of(loading.meta_model(model, False, torch.float32))

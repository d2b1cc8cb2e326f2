"""config.yaml: what is wrong is told in one line with the key and a remedy, before any job runs."""

import copy
import datetime
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from layerproof import cli, config
from layerproof.errors import UserError
from layerproof.model import checkpoint
from layerproof.model.resolve import resolve
from layerproof.model.stages import all_stages

REPOSITORY = Path(config.__file__).resolve().parents[2]
SHIPPED = yaml.safe_load((REPOSITORY / "config.yaml").read_text(encoding="utf-8"))
SCHEMA = yaml.safe_load(config.SCHEMA.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


def changed(**keys):
    """The shipped config with other values, by dotted keys in which `__` stands for the dot."""
    values = copy.deepcopy(SHIPPED)
    for key, value in keys.items():
        *sections, last = key.split("__")
        part = values
        for section in sections:
            part = part.setdefault(section, {})
        part[last] = value
    return values


def without(*keys):
    return {key: value for key, value in SHIPPED.items() if key not in keys}


def properties(schema, prefix=""):
    """Every property of a schema by dotted name."""
    for key, part in schema.get("properties", {}).items():
        yield f"{prefix}{key}", part
        yield from properties(part, f"{prefix}{key}.")


def message_of(raw):
    with pytest.raises(UserError) as error:
        resolve(raw)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_the_shipped_config_runs_the_whole_model():
    resolved = resolve(SHIPPED)
    assert resolved.resolved == SHIPPED
    assert resolved.num_layers == len(resolved.layers) == 6
    assert resolved.stages == all_stages(6)
    assert resolved.chains == {"all": tuple(all_stages(6))}


def test_schema_and_shipped_config_have_the_same_keys_and_defaults():
    def leaves(values, prefix=""):
        for key, value in values.items():
            if isinstance(value, dict) and value:
                yield from leaves(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}", value

    shipped = dict(leaves(SHIPPED))
    known = {key: part for key, part in properties(SCHEMA) if "properties" not in part}
    assert set(shipped) == set(known)
    defaults = {key: part["default"] for key, part in known.items() if "default" in part}
    # The schema cannot know which of the two inputs a user has, so neither is the default.
    del defaults["inputs.prompts"]
    assert {key: shipped[key] for key in defaults} == defaults
    assert set(known) - set(defaults) == {"model.checkpoint", "inputs.prompts"}


@pytest.mark.parametrize(("key", "part"), properties(SCHEMA))
def test_every_property_is_described_and_every_section_is_closed(key, part):
    assert part.get("description", "").strip().endswith(".")
    if "properties" in part:
        assert part["additionalProperties"] is False, f"{key} would take unknown keys in silence"


def test_defaults_are_filled_in_and_the_users_mapping_is_left_alone():
    raw = {"model": {"checkpoint": checkpoint.DEFAULT}, "inputs": {"prompts": SHIPPED["inputs"]["prompts"]}}
    before = copy.deepcopy(raw)
    assert resolve(raw).resolved == SHIPPED
    assert raw == before


def test_a_key_that_is_there_twice_is_told_with_its_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  checkpoint: a\nport:\n  options:\n    - {size: 1}\n    - {size: 2, size: 3}\n")
    with pytest.raises(UserError, match=r"config\.yaml: line 6: size is there twice in this section\. Remove one\.$"):
        config.read(path)
    assert config.read(REPOSITORY / "config.yaml") == SHIPPED


def test_without_chains_fewer_layers_have_none():
    raw = changed(layers="1-3")
    del raw["chains"]
    assert resolve(raw).chains == {}
    del raw["layers"]
    assert list(resolve(raw).chains) == ["all"]


def test_gpus_may_be_numbers_as_accelerate_spells_them():
    limits = resolve(changed(golden__max_memory={0: "1.5GiB", "cpu": "800MB"})).resolved["golden"]["max_memory"]
    assert limits == {"0": "1.5GiB", "cpu": "800MB"}


def test_a_chain_may_be_one_layer():
    assert resolve(changed(chains=["3"])).chains == {"3": ("layer_003",)}


def test_the_default_checkpoint_may_be_written_in_other_ways():
    for written in ("./results/checkpoint", "results/checkpoint/"):
        assert resolve(changed(model__checkpoint=written)).checkpoint == checkpoint.DEFAULT


def test_an_image_may_be_a_file_or_pulled_by_its_digest():
    for image in (
        "/images/port.sif",
        f"docker://somewhere/neuron@sha256:{'0' * 64}",
        f"oras://a.b:80/c@sha256:{'f' * 64}",
    ):
        assert resolve(changed(containers__port=image)).resolved["containers"]["port"] == image


def test_one_layer_may_be_written_as_a_number():
    resolved = resolve(changed(layers=5, chains=[]))
    assert resolved.stages == ["layer_005", "norm", "lm_head"]
    assert resolved.resolved["layers"] == "5"


WRONG = {
    "unknown key": (changed(layer="all"), ["layer: is no key", 'Did you mean "layers"?']),
    "unknown nested key": (changed(port__modul="a.py"), ["port.modul: is no key", 'Did you mean "module"?']),
    "unknown key like no other": (changed(golden__xyz=1), ["golden.xyz: is no key", "The keys are mode, device_map"]),
    "number that is a text": (changed(inputs__max_tokens="512"), ["inputs.max_tokens: '512' must be integer"]),
    "text that is a number": (changed(port__module=3), ["port.module: 3 must be string", "Python file"]),
    "integer that is a boolean": (changed(model__seed=True), ["model.seed: True must be integer"]),
    "section that is a list": (changed(golden=[1]), ["golden: [1] must be object"]),
    "section that is empty": (changed(golden=None), ["golden: None must be object"]),
    "no mapping at all": (changed(chains="all"), ["chains: 'all' must be array"]),
    "a size that is none": (changed(golden__max_memory={"cpu": "lots"}), ["golden.max_memory.cpu: 'lots'", "70GiB"]),
    "a device that is none": (
        changed(golden__max_memory={"gpu": "1GB"}),
        ["golden.max_memory: 'gpu'", "number of a GPU"],
    ),
    "a map that is none": (changed(golden__device_map="nowhere"), ["golden.device_map: 'nowhere'", "balanced_low_0"]),
    "a map of nothing": (changed(golden__device_map={}), ["golden.device_map: {}"]),
    "a map to a list": (changed(golden__device_map={"": [1]}), ["golden.device_map.: [1] must be integer or string"]),
    "a map to nowhere": (changed(golden__device_map={"": "nix"}), ["golden.device_map.: 'nix'", "cuda:N, cpu or disk"]),
    "integer with a point": (changed(stages_per_job=2.0), ["stages_per_job: 2.0 must be integer"]),
    "enum": (changed(golden__dtype="fp16"), ["golden.dtype: 'fp16'", "bfloat16, float16."]),
    "enum with null": (
        changed(golden__attn_implementation="flash"),
        ["golden.attn_implementation", "eager, sdpa, null"],
    ),
    "too small": (changed(inputs__max_tokens=0), ["inputs.max_tokens: 0 must be at least 1"]),
    "limit of zero": (changed(compare__limit=0), ["compare.limit: 0 must be above 0"]),
    "chain twice": (changed(chains=["all", "all"]), ["chains", "must not name the same twice"]),
    "layer out of range": (changed(layers="0-70"), ['layers: "0-70"', "6 layers (0 to 5)", '"0-5"']),
    "layer that is negative": (changed(layers=-1), ["layers", "not a list of layers"]),
    "backwards range": (changed(layers="4-2"), ["layers", "counts backwards", '"2-4"']),
    "backwards chain": (changed(chains=["4-2"]), ["chains", "counts backwards", '"2-4"']),
    "chain of a list": (changed(chains=["1,3"]), ["chains", "not one range"]),
    "chain out of range": (changed(chains=["0-6"]), ['chains: "0-6"', "6 layers"]),
    "chain outside the layers": (changed(layers="0-2", chains=["2-4"]), ['chains: "2-4" runs layer_003', '"0-2"']),
    "chain of all outside": (changed(layers="0-2"), ['chains: "all" runs layer_003', '"0-2", or chains: []']),
    "chain that is a number": (changed(chains=[0]), ["chains.0: 0 must be string", 'in quotes, such as "0-5"']),
    "limit that is no number": (changed(compare__limit=float("nan")), ["compare.limit: nan is no value"]),
    "limit that YAML takes for text": (
        changed(compare__limit="1e1"),
        ["compare.limit: '1e1' must be number", "Write 10.0."],
    ),
    "date in options": (
        changed(port__options={"list": [{"day": datetime.date(2026, 1, 1)}]}),
        ["port.options.list.0.day: datetime.date(2026, 1, 1) is no value"],
    ),
    "compiled without a device": (
        changed(port__backend="nxdi", port__compile="xla", port__nxdi={"cpu_mode": True}),
        ["port.compile: NxD's CPU mode has no XLA device", "Set it or port.nxdi.cpu_mode off"],
    ),
    "ranks of a model that one has whole": (
        changed(port__backend="transformers", parallel__tp=2),
        ["parallel.tp: port.backend transformers runs the unmodified stage", "Write tp: 1"],
    ),
    "ranks compiled for one core": (
        changed(port__compile="neuron", parallel__tp=2),
        ["port.compile: neuron compiles for one core. With parallel.tp write xla", "port.captured"],
    ),
    "too large": (changed(stages_per_job=64), ["stages_per_job: 64 must be at most 32"]),
    "no rank at all": (changed(parallel__tp=0), ["parallel.tp: 0 must be at least 1"]),
    "compiled for another device than it runs on": (
        changed(port__compile="neuron", port__device="CPU"),
        ["port.compile: what neuron compiles runs on Neuron, and port.device is CPU", "Write port.device: NEURON"],
    ),
    "a stored golden and no place for it": (
        changed(golden__mode="stored"),
        ["golden.storage: golden.mode stored takes the golden from there", "Name s3://BUCKET/FOLDER"],
    ),
    "a place for the golden that every host has its own of": (
        changed(golden__storage="/data/golden"),
        ["golden.storage: '/data/golden' is not of the form", "s3://BUCKET/FOLDER"],
    ),
    "a place for the golden with nothing behind its last slash": (
        changed(golden__storage="s3://bucket/"),
        ["golden.storage: 's3://bucket/' is not of the form"],
    ),
    "image by a tag, which may change": (
        changed(containers__port="docker://somewhere/neuron:2.29"),
        ["containers.port: 'docker://somewhere/neuron:2.29' is not of the form", "@sha256:DIGEST"],
    ),
    "image by tag and digest, which Apptainer does not take": (
        changed(containers__port=f"docker://somewhere/neuron:2.29@sha256:{'0' * 64}"),
        ["containers.port", "is not of the form"],
    ),
    "image that is no image": (changed(containers__cpu="containers/layerproof.def"), ["containers.cpu", ".sif file"]),
    "no such checkpoint": (
        changed(model__checkpoint="no/where"),
        ["model.checkpoint: no/where is not there", "Name a"],
    ),
    "empty checkpoint": (changed(model__checkpoint=""), ["model.checkpoint", "must not be empty"]),
    "no such prompts": (changed(inputs__prompts="no.txt"), ["inputs.prompts: no.txt is not there", "Name an"]),
    "prompts are a folder": (changed(inputs__prompts="workflow"), ["inputs.prompts: workflow"]),
    "no such ids": (changed(inputs__prompts=None, inputs__token_ids="no.json"), ["inputs.token_ids: no.json"]),
    "both inputs": (changed(inputs__token_ids="config.yaml"), ["inputs: give exactly one", "set the other to null"]),
    "no input": (changed(inputs__prompts=None), ["inputs: give exactly one of prompts and token_ids"]),
    "port of text": (changed(port__module="README.md"), ["port.module: README.md is no Python file", "Name one"]),
    "no such port": (changed(port__module="ports/gone.py"), ["port.module: ports/gone.py is not there", "Name a"]),
    "no model": (without("model"), ["'model' is a required property", "config.schema.yaml"]),
    "no inputs": (without("inputs"), ["'inputs' is a required property", "config.schema.yaml"]),
    "no checkpoint": (changed(model={}), ["model: 'checkpoint' is a required property"]),
}


@pytest.mark.parametrize("raw, told", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_in_one_line(raw, told):
    message = message_of(raw)
    assert message.startswith("config.yaml: ")
    assert all(part in message for part in told), message


def test_a_dotted_module_and_another_backend_need_no_file():
    resolve(changed(port__module="installed.port"))
    resolve(changed(port__module="gone.py", port__backend="transformers"))


def checkpoint_at(directory, **files):
    directory.mkdir()
    for name, value in files.items():
        (directory / name.replace("__", ".")).write_text(value if isinstance(value, str) else json.dumps(value))
    return changed(model__checkpoint=str(directory))


def test_a_users_checkpoint_tells_its_number_of_layers(tmp_path):
    raw = checkpoint_at(tmp_path / "m", config__json={"num_hidden_layers": 62}, model__safetensors="")
    assert resolve(raw).num_layers == 62
    assert '"0-61"' in message_of(raw | {"layers": "0-70"})
    fp8 = {"num_hidden_layers": 3, "quantization_config": {"quant_method": "fp8"}}
    assert resolve(checkpoint_at(tmp_path / "q", config__json=fp8, model__safetensors="")).num_layers == 3
    nested = checkpoint_at(
        tmp_path / "n", config__json={"text_config": {"num_hidden_layers": 2}}, model__safetensors=""
    )
    assert resolve(nested).num_layers == 2


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, ["config.json: is not there", "model.checkpoint must"]),
        ({"config__json": "{"}, ["config.json: is not JSON", "Copy the file again"]),
        ({"config__json": []}, ["config.json: is not a JSON object", "Copy the file again"]),
        ({"config__json": {"text_config": "none"}}, ["has no num_hidden_layers"]),
        ({"config__json": {}}, ["model.checkpoint", "no num_hidden_layers", "Name a decoder"]),
        ({"config__json": {"num_hidden_layers": 2}}, ["model.safetensors", "model.checkpoint must hold safetensors"]),
        (
            {"config__json": {"num_hidden_layers": 2}, "pytorch_model__bin": "x"},
            ["has neither", "model.checkpoint must hold safetensors"],
        ),
        (
            {"config__json": {"num_hidden_layers": 2}, "model__safetensors__index__json": "{"},
            ["model.safetensors.index.json: cannot be read", "Copy the file again"],
        ),
        (
            {"config__json": {"num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq"}}},
            ["is quantized by gptq, which is not supported", "Name one in bf16 or fp8"],
        ),
    ],
)
def test_an_unusable_checkpoint_is_told_in_one_line(tmp_path, files, told):
    message = message_of(checkpoint_at(tmp_path / "m", **files))
    assert all(part in message for part in told), message


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"port:\n  tp: [1, 2\nlayers: all\n", r"config\.yaml: line 3: is not YAML \(expected ',' or '\]'"),
        (b"layers: all\n\tchains: []\n", r"config\.yaml: line 2: is not YAML \(.*\\t"),
        (b"layers: !!python/object:os.system {}\n", r"config\.yaml: line 1: is not YAML"),
        (b"layers: \x00\n", r"config\.yaml: is not YAML"),
        (b"layers: \xff\n", r"config\.yaml: cannot be read"),
        (b"", r"config\.yaml: has no keys"),
        (b"- layers\n", r"config\.yaml: has no keys"),
        (None, r"config\.yaml: cannot be read"),
    ],
)
def test_a_file_that_is_no_config_is_told_in_one_line(tmp_path, capsys, content, told):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    assert cli.run(["preflight", "--side", "port", "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(told, line) and line.endswith("."), line


BROKEN, COMMA = "layers: [1, 2\nchains: []\n", "expected ',' or ']', but got ':'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            yaml.safe_dump(changed(port__modul="a.py")),
            'error: config.yaml: port.modul: is no key. Did you mean "module"?',
        ),
        (yaml.safe_dump(changed(layers="4-2")), 'error: config.yaml: layers: "4-2" counts backwards. Write "2-4".'),
        (BROKEN, f"error: config.yaml: line 2: is not YAML ({COMMA}). Correct that line or the one before it."),
    ],
)
def test_snakemake_prints_the_line_and_runs_nothing(tmp_path, text, line):
    shutil.copy(REPOSITORY / "Snakefile", tmp_path)
    shutil.copytree(REPOSITORY / "workflow", tmp_path / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "config.yaml").write_text(text)
    process = subprocess.run(
        [sys.executable, "-m", "snakemake", "--cores", "1", "-n"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.returncode != 0
    assert line in process.stdout.splitlines()
    assert "Traceback" not in process.stdout
    assert "rule " not in process.stdout and not (tmp_path / "results").exists()


def test_s3_without_its_plugin_is_told_where_snakemake_is(monkeypatch):
    asked = changed(golden__storage="s3://bucket/folder")
    monkeypatch.setattr("layerproof.model.resolve.find_spec", lambda name: name == "snakemake" or None)
    assert "golden.storage: S3 needs a plugin of Snakemake. Run make setup-s3." in message_of(asked)
    monkeypatch.setattr("layerproof.model.resolve.find_spec", lambda name: None)
    assert resolve(asked).resolved["golden"]["storage"] == "s3://bucket/folder", "as in an image"

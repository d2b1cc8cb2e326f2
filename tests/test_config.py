"""config.yaml: what is wrong is told in one line with the key and a remedy, before any job runs."""

import copy
import datetime
import functools
import json
import re
import shutil
import subprocess
import sys

import jsonschema
import pytest
import yaml

from configs import REPOSITORY
from layerproof import cli, config
from layerproof.errors import UserError
from layerproof.model.resolve import resolve
from layerproof.model.stages import all_stages

SHIPPED = yaml.safe_load((REPOSITORY / "config.yaml").read_text(encoding="utf-8"))
SCHEMA = config.schema()


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


def leaves(values, prefix=""):
    """Every value of nested sections by dotted name."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def value_at(key, values):
    """The value of a dotted key."""
    return functools.reduce(lambda part, name: part[name], key.split("."), values)


def resolved(raw):
    """The settings of the run that a config asks for, as JSON."""
    return config.as_json(resolve(raw).settings)


def test_the_shipped_config_runs_the_whole_model():
    run = resolve(SHIPPED)
    assert run.num_layers == len(run.layers) == 6
    assert run.stages == all_stages(6)
    assert run.chains == {"all": tuple(all_stages(6))}
    assert run.captured == {}


def test_the_schema_file_is_what_the_code_says():
    text = (REPOSITORY / config.SCHEMA).read_text(encoding="utf-8")
    comment, _, content = text.partition("\n\n")
    assert all(line.startswith("# ") for line in comment.splitlines())
    assert content == yaml.safe_dump(SCHEMA, sort_keys=False, width=120, allow_unicode=True)


def test_every_key_of_the_shipped_config_is_known_and_shown_with_its_default():
    known = {key: part for key, part in properties(SCHEMA) if "properties" not in part}
    shown = dict(leaves(SHIPPED))
    assert set(shown) <= set(known)
    assert [key for key, part in known.items() if "default" not in part] == []
    # The schema cannot know which of the two inputs a user has, so neither is the default.
    assert known["inputs.prompts"]["default"] is known["inputs.token_ids"]["default"] is None
    # Null stands for what the shipped config says: all stages of the model.
    assert known["chains"]["default"] is None
    filled = resolved({"inputs": SHIPPED["inputs"]})
    assert shown == {key: value_at(key, filled) for key in shown}
    for key in shown.keys() - {"inputs.prompts", "chains"}:
        assert shown[key] == known[key]["default"]


def test_the_schema_takes_what_the_code_takes():
    """Editors check config.yaml by it."""
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    for raw in (SHIPPED, resolved(SHIPPED), {"inputs": {}}, changed(golden__device_map={"": "cpu", "lm_head": 0})):
        config.validate(raw)
        assert validator.is_valid(raw)
    for raw in ({}, changed(port__modul="a.py"), changed(golden__dtype="fp16"), changed(golden__device_map={"": "x"})):
        assert not validator.is_valid(raw)
        with pytest.raises(UserError):
            config.validate(raw)


@pytest.mark.parametrize(("key", "part"), properties(SCHEMA))
def test_every_property_is_described_and_every_section_is_closed(key, part):
    assert part.get("description", "").strip().endswith(".")
    if "properties" in part:
        assert part["additionalProperties"] is False, f"{key} would take unknown keys in silence"


def test_defaults_are_filled_in_and_the_users_mapping_is_left_alone():
    raw = {"inputs": {"prompts": SHIPPED["inputs"]["prompts"]}}
    before = copy.deepcopy(raw)
    filled = resolved(raw)
    assert filled == resolved(SHIPPED)
    assert raw == before
    for key, part in properties(SCHEMA):
        if "properties" not in part and key not in ("inputs.prompts", "chains"):
            assert value_at(key, filled) == part["default"], key


def test_files_that_come_with_layerproof_are_found_from_everywhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    raw = {"inputs": {"prompts": str(REPOSITORY / SHIPPED["inputs"]["prompts"])}}
    settings = resolve(raw).settings
    assert settings.model.checkpoint == str(REPOSITORY / SHIPPED["model"]["checkpoint"])
    assert settings.port.module == str(REPOSITORY / SHIPPED["port"]["module"])
    (tmp_path / SHIPPED["port"]["module"]).parent.mkdir(parents=True)
    shutil.copy(REPOSITORY / SHIPPED["port"]["module"], tmp_path / SHIPPED["port"]["module"])
    assert resolve(raw).settings.port.module == SHIPPED["port"]["module"], "the user's own file goes first"


SELECTED = ["model", "golden.dtype", "port.nxdi.config", "compare.limit", "layers"]


@pytest.fixture
def of_job():
    """The settings of a job, on their way through its job file."""
    settings = resolve(changed(port__nxdi={"config": {"a": [1]}}, compare__limit=2)).settings
    return config.loaded(json.loads(json.dumps(config.selected(settings, SELECTED))))


def test_a_job_has_the_settings_that_its_rule_selects(of_job):
    assert of_job.model == resolve(SHIPPED).settings.model
    assert (of_job.golden.dtype, of_job.compare.limit, of_job.layers) == ("bfloat16", 2.0, "all")
    assert of_job.port.nxdi.config == {"a": [1]}
    assert config.as_json(of_job) == {
        "model": {"checkpoint": SHIPPED["model"]["checkpoint"], "trust_remote_code": False},
        "layers": "all",
        "golden": {"dtype": "bfloat16"},
        "port": {"nxdi": {"config": {"a": [1]}}},
        "compare": {"limit": 2.0},
    }


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ((), "chains"),
        ((), "parallel"),
        (("golden",), "device"),
        (("port",), "dtype"),
        (("port", "nxdi"), "taps"),
        (("compare",), "taps"),
    ],
)
def test_reading_a_setting_that_a_job_did_not_select_raises_an_error_with_its_name(of_job, section, key):
    for settings in (of_job, config.changed(of_job, layers="0")):
        part = functools.reduce(getattr, section, settings)
        with pytest.raises(AttributeError, match=rf"^{type(part).__name__}\.{key} is not among this job's settings"):
            getattr(part, key)


def test_a_section_with_a_changed_key_is_another_one():
    settings = resolve(SHIPPED).settings
    other = config.changed(settings, port=config.changed(settings.port, dtype="float32"))
    assert (settings.port.dtype, other.port.dtype) == ("bfloat16", "float32")
    assert config.changed(other, port=settings.port) == settings and other != settings
    with pytest.raises(AttributeError):
        settings.port.dtype = "float16"


def test_whole_sections_may_be_selected_and_no_key_that_does_not_exist():
    settings = resolve(SHIPPED).settings
    everything = config.as_json(settings)
    assert config.selected(settings, everything) == everything
    assert config.selected(settings, ["port.dtype", "port"]) == {"port": everything["port"]}
    assert config.selected(settings, ["port", "port.dtype"]) == {"port": everything["port"]}
    assert config.selected(settings, []) == {}
    assert config.as_json(config.loaded(everything)) == everything
    for key in ("ports", "port.dtypes", "port.nxdi.tap"):
        with pytest.raises(KeyError, match=key.rpartition(".")[2]):
            config.selected(settings, [key])


def test_a_key_that_is_there_twice_is_told_with_its_line(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model:\n  checkpoint: a\nport:\n  options:\n    - {size: 1}\n    - {size: 2, size: 3}\n")
    with pytest.raises(UserError, match=r"config\.yaml: line 6: size appears twice in this section\. Remove one\.$"):
        config.read(path)
    assert config.read(REPOSITORY / "config.yaml") == SHIPPED


def test_without_chains_fewer_layers_have_none():
    raw = changed(layers="1-3")
    del raw["chains"]
    assert resolve(raw).chains == {}
    del raw["layers"]
    assert list(resolve(raw).chains) == ["all"]


def test_gpus_may_be_numbers_as_accelerate_spells_them():
    limits = resolve(changed(golden__max_memory={0: "1.5GiB", "cpu": "800MB"})).settings.golden.max_memory
    assert limits == {"0": "1.5GiB", "cpu": "800MB"}


def test_a_chain_may_be_one_layer():
    assert resolve(changed(chains=["3"])).chains == {"3": ("layer_003",)}


def test_the_default_checkpoint_may_be_written_in_other_ways():
    default = SHIPPED["model"]["checkpoint"]
    for written in (f"./{default}", f"{default}/", f"workflow/../{default}"):
        assert resolve(changed(model__checkpoint=written)).settings.model.checkpoint == default


def test_an_image_may_be_a_file_or_pulled_by_its_digest():
    for image in (
        "/images/port.sif",
        f"docker://somewhere/neuron@sha256:{'0' * 64}",
        f"oras://a.b:80/c@sha256:{'f' * 64}",
    ):
        assert resolve(changed(containers__port=image)).settings.containers.port == image


def test_one_layer_may_be_written_as_a_number():
    run = resolve(changed(layers=5, chains=[]))
    assert run.stages == ["layer_005", "norm", "lm_head"]
    assert run.settings.layers == "5"


WRONG = {
    "unknown key": (changed(layer="all"), ["layer: unknown key", 'Did you mean "layers"?']),
    "unknown nested key": (changed(port__modul="a.py"), ["port.modul: unknown key", 'Did you mean "module"?']),
    "unknown key like no other": (changed(golden__xyz=1), ["golden.xyz: unknown key", "The keys are mode, device_map"]),
    "number that is a text": (changed(inputs__max_tokens="512"), ["inputs.max_tokens: '512' must be an integer"]),
    "text that is a number": (changed(port__module=3), ["port.module: 3 must be a string", "Python file"]),
    "integer that is a boolean": (changed(inputs__max_tokens=True), ["inputs.max_tokens: True must be an integer"]),
    "section that is a list": (changed(golden=[1]), ["golden: [1] must be a section of keys"]),
    "section that is empty": (changed(golden=None), ["golden: None must be a section of keys"]),
    "no mapping at all": (changed(chains="all"), ["chains: 'all' must be a list"]),
    "a size that is none": (changed(golden__max_memory={"cpu": "lots"}), ["golden.max_memory.cpu: 'lots'", "70GiB"]),
    "a device that is none": (
        changed(golden__max_memory={"gpu": "1GB"}),
        ["golden.max_memory.gpu: 'gpu' does not have the expected form", "number of a GPU"],
    ),
    "a map that is none": (changed(golden__device_map="nowhere"), ["golden.device_map: 'nowhere'", "balanced_low_0"]),
    "a map of nothing": (changed(golden__device_map={}), ["golden.device_map: {}"]),
    "a map to a list": (
        changed(golden__device_map={"": [1]}),
        ["golden.device_map.: [1] must be a string or an integer"],
    ),
    "a map to nowhere": (changed(golden__device_map={"": "nix"}), ["golden.device_map.: 'nix'", "cuda:N, cpu or disk"]),
    "integer with a point": (changed(stages_per_job=2.0), ["stages_per_job: 2.0 must be an integer"]),
    "enum": (changed(golden__dtype="fp16"), ["golden.dtype: 'fp16'", "bfloat16, float16."]),
    "enum with null": (
        changed(golden__attn_implementation="flash"),
        ["golden.attn_implementation", "eager, sdpa, null"],
    ),
    "too small": (changed(inputs__max_tokens=0), ["inputs.max_tokens: 0 must be at least 1"]),
    "limit of zero": (changed(compare__limit=0), ["compare.limit: 0 must be above 0"]),
    "chain twice": (changed(chains=["all", "all"]), ['chains: "all" appears twice. Remove one.']),
    "layer out of range": (changed(layers="0-70"), ['layers: "0-70"', "6 layers (0 to 5)", '"0-5"']),
    "layer that is negative": (changed(layers=-1), ["layers", "not a list of layers"]),
    "backwards range": (changed(layers="4-2"), ["layers", "counts backwards", '"2-4"']),
    "backwards chain": (changed(chains=["4-2"]), ["chains", "counts backwards", '"2-4"']),
    "chain of a list": (changed(chains=["1,3"]), ["chains", "not one range"]),
    "chain out of range": (changed(chains=["0-6"]), ['chains: "0-6"', "6 layers"]),
    "chain outside the layers": (changed(layers="0-2", chains=["2-4"]), ['chains: "2-4" runs layer_003', '"0-2"']),
    "chain of all outside": (changed(layers="0-2"), ['chains: "all" runs layer_003', '"0-2", or chains: []']),
    "chain that is a number": (changed(chains=[0]), ["chains.0: 0 must be a string", 'each a string in quotes: "0-5"']),
    "limit that is no number": (
        changed(compare__limit=float("nan")),
        ["compare.limit: JSON cannot express nan."],
    ),
    "limit that YAML takes for text": (
        changed(compare__limit="1e1"),
        ["compare.limit: '1e1' must be a number", "Write 10.0."],
    ),
    "date in options": (
        changed(port__options={"list": [{"day": datetime.date(2026, 1, 1)}]}),
        ["port.options.list.0.day: JSON cannot express datetime.date(2026, 1, 1)."],
    ),
    "compiled without a device": (
        changed(port__backend="nxdi", port__compile="xla", port__nxdi={"cpu_mode": True}),
        ["port.compile: NxD's CPU mode has no XLA device", "port.nxdi.cpu_mode: false"],
    ),
    "ranks of a model that one has whole": (
        changed(port__backend="transformers", parallel__cp=2),
        ["parallel.cp: port.backend transformers splits a stage by tp alone", "Write cp: 1"],
    ),
    "a plan of transformers that is compiled": (
        changed(port__backend="transformers", parallel__tp=2, port__compile="xla"),
        ["port.compile: the tensor-parallel plan of transformers cannot be traced for XLA", "Write port.compile: null"],
    ),
    "ranks compiled for one core": (
        changed(port__compile="neuron", parallel__tp=2),
        ["port.compile: neuron compiles for one core, but parallel.tp is", "port.captured"],
    ),
    "too large": (changed(stages_per_job=65), ["stages_per_job: 65 must be at most 64"]),
    "no rank at all": (changed(parallel__tp=0), ["parallel.tp: 0 must be at least 1"]),
    "compiled for another device than it runs on": (
        changed(port__compile="neuron", port__device="CPU"),
        [
            "port.compile: stages compiled by neuron run only on Neuron, but port.device is CPU",
            "Write port.device: NEURON",
        ],
    ),
    "a stored golden and no place for it": (
        changed(golden__mode="stored"),
        ["golden.storage: is missing, but golden.mode stored imports", "Write s3://BUCKET/FOLDER"],
    ),
    "a place for the golden that every host has its own of": (
        changed(golden__storage="/data/golden"),
        ["golden.storage: '/data/golden' does not have the expected form", "s3://BUCKET/FOLDER"],
    ),
    "a place for the golden with nothing behind its last slash": (
        changed(golden__storage="s3://bucket/"),
        ["golden.storage: 's3://bucket/' does not have the expected form"],
    ),
    "image by a tag, which may change": (
        changed(containers__port="docker://somewhere/neuron:2.29"),
        ["containers.port: 'docker://somewhere/neuron:2.29' does not have the expected form", "@sha256:DIGEST"],
    ),
    "image by tag and digest, which Apptainer does not take": (
        changed(containers__port=f"docker://somewhere/neuron:2.29@sha256:{'0' * 64}"),
        ["containers.port", "does not have the expected form"],
    ),
    "image that is no image": (changed(containers__cpu="containers/layerproof.def"), ["containers.cpu", ".sif file"]),
    "no such checkpoint": (
        changed(model__checkpoint="no/where"),
        ["model.checkpoint: no/where does not exist", "Name a"],
    ),
    "empty checkpoint": (changed(model__checkpoint=""), ["model.checkpoint", "must not be empty"]),
    "no such prompts": (changed(inputs__prompts="no.txt"), ["inputs.prompts: no.txt does not exist", "Name an"]),
    "prompts are a folder": (changed(inputs__prompts="workflow"), ["inputs.prompts: workflow"]),
    "no such ids": (changed(inputs__prompts=None, inputs__token_ids="no.json"), ["inputs.token_ids: no.json"]),
    "both inputs": (changed(inputs__token_ids="config.yaml"), ["inputs: set exactly one", "the other to null"]),
    "no input": (changed(inputs__prompts=None), ["inputs: set exactly one of prompts and token_ids"]),
    "port of text": (
        changed(port__module="README.md"),
        ["port.module: README.md is not a Python file", "Name a Python file"],
    ),
    "no such port": (changed(port__module="ports/gone.py"), ["port.module: ports/gone.py does not exist", "Name a"]),
    "no inputs": (without("inputs"), ["inputs: is missing. What the model reads."]),
}


@pytest.mark.parametrize("raw, told", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_is_told_in_one_line(raw, told):
    message = message_of(raw)
    assert message.startswith("config.yaml: ")
    assert all(part in message for part in told), message


def test_a_dotted_module_and_another_backend_need_no_file():
    resolve(changed(port__module="installed.port"))
    unmodified = resolve(changed(port__backend="transformers")).settings.port
    assert unmodified.module is None, "the default is for ports"


def test_a_patch_is_asked_of_a_module_for_a_model_of_transformers(tmp_path):
    (tmp_path / "patched.py").write_text("def patch(model, part, stage): ...")
    assert resolve(
        changed(port__module=str(tmp_path / "patched.py"), port__backend="transformers")
    ).settings.port.module
    (tmp_path / "port.py").write_text("def build(stage): ...\ndef convert(stage, weights): ...")
    message = message_of(changed(port__module=str(tmp_path / "port.py"), port__backend="transformers"))
    assert "port.py: the function patch is missing." in message
    assert message.endswith("Write port.module: null to run the unmodified model.")
    for backend in ("xla", "nxdi"):
        message = message_of(changed(port__module=None, port__backend=backend))
        assert message == (
            f"config.yaml: port.module: is null. With port.backend {backend}, name a Python file or a module."
        )


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
        ({}, ["config.json: does not exist", "model.checkpoint must"]),
        ({"config__json": "{"}, ["config.json: is not JSON", "Copy the file again"]),
        ({"config__json": []}, ["config.json: is not a JSON object", "Copy the file again"]),
        ({"config__json": {"text_config": "none"}}, ["num_hidden_layers is missing"]),
        (
            {"config__json": {}},
            ["model.checkpoint", "num_hidden_layers is missing", "Name the checkpoint of a decoder"],
        ),
        ({"config__json": {"num_hidden_layers": 2}}, ["model.safetensors", "model.checkpoint must name safetensors"]),
        (
            {"config__json": {"num_hidden_layers": 2}, "pytorch_model__bin": "x"},
            ["contains neither", "Layerproof does not read pytorch_model.bin. Save the model"],
        ),
        (
            {"config__json": {"num_hidden_layers": 2}, "model__safetensors__index__json": "{"},
            ["model.safetensors.index.json: cannot be read", "Copy the file again"],
        ),
        (
            {"config__json": {"num_hidden_layers": 2, "quantization_config": {"quant_method": "gptq"}}},
            ["is quantized by gptq, which is not supported", "Name a checkpoint in bf16"],
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            yaml.safe_dump(changed(port__modul="a.py")),
            'error: config.yaml: port.modul: unknown key. Did you mean "module"?',
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
    assert "golden.storage: Snakemake's plugin for S3 is not installed. Run make setup-s3." in message_of(asked)
    monkeypatch.setattr("layerproof.model.resolve.find_spec", lambda name: None)
    assert resolve(asked).settings.golden.storage == "s3://bucket/folder", "as in an image"

"""config.yaml, checked against its schema and against what is there, before any job runs."""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import jsonschema
import jsonschema.validators
import yaml

from layerproof import captured, checkpoint, stages, tiny
from layerproof.errors import UserError
from layerproof.files import canonical_json

SCHEMA = Path(__file__).resolve().parents[1] / "schemas" / "config.schema.yaml"


@dataclass(frozen=True)
class Config:
    """The run that config.yaml asks for. `resolved` is the file with every default filled in.

    `captured` holds the files of the chain of that name, by stage.
    """

    resolved: Mapping[str, Any]
    num_layers: int
    layers: tuple[int, ...]
    chains: Mapping[str, tuple[str, ...]]
    captured: Mapping[str, Path]

    @property
    def checkpoint(self) -> str:
        return self.resolved["model"]["checkpoint"]

    @property
    def stages(self) -> list[str]:
        """Stages to port and compare."""
        return stages.selected_stages(self.layers, self.num_layers)


def read(path: Path) -> dict[str, Any]:
    """What a config file says, as YAML does.

    Raises:
        UserError: if it cannot be read, has no keys, or one is twice in a section: YAML would take the last without a word.
    """
    try:
        text = path.read_text(encoding="utf-8")
        node, content = yaml.compose(text, Loader=yaml.SafeLoader), yaml.safe_load(text)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}). Name a text file that is there.") from None
    except yaml.YAMLError as error:
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        where = f"line {mark.line + 1}: " if mark else ""
        reason = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise UserError(f"{path}: {where}is not YAML ({reason}). Correct that line or the one before it.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: has no keys. Begin with the config.yaml that is shipped.")
    _check_keys_once(path, node)
    return content


def _check_keys_once(path: Path, node: yaml.Node | None) -> None:
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        elif isinstance(node, yaml.MappingNode):
            keys: set[str] = set()
            for key, value in node.value:
                if key.value in keys:
                    line = key.start_mark.line + 1
                    raise UserError(f"{path}: line {line}: {key.value} is there twice in this section. Remove one.")
                keys.add(key.value)
                waiting.append(value)


def resolve(raw: Mapping[str, Any]) -> Config:
    """Fills in defaults and checks everything that can be checked without running a job.

    Raises:
        UserError: one line that names the key, what is wrong with it and the remedy.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    resolved = copy.deepcopy(dict(raw))
    if str(resolved.get("layers", "all")) != "all":
        resolved.setdefault("chains", [])  # of the default chain, all, some stages are left out
    _fill_defaults(resolved, schema)
    _name_gpus(resolved)
    _check_schema(resolved, schema)
    _check_plain(resolved)
    resolved["model"]["checkpoint"] = os.path.normpath(resolved["model"]["checkpoint"])
    _check_files(resolved)
    if resolved["model"]["checkpoint"] == checkpoint.DEFAULT:
        num_layers = tiny.CONFIG["num_hidden_layers"]
    else:
        directory = Path(resolved["model"]["checkpoint"])
        described = checkpoint.read_config(directory)
        method = (described.get("quantization_config") or {}).get("quant_method", "fp8")
        if method != "fp8":
            raise UserError(
                f"config.yaml: model.checkpoint: {directory} is quantized by {method}, which is not supported. "
                "Name one in bf16 or fp8."
            )
        num_layers = checkpoint.num_layers(described)
        checkpoint.shards(directory)
    resolved["layers"] = str(resolved["layers"])
    layers = stages.parse_ranges(resolved["layers"], num_layers, "layers")
    chains = {chain: tuple(stages.chain_stages(chain, num_layers)) for chain in resolved["chains"]}
    selected = stages.selected_stages(layers, num_layers)
    for chain, members in chains.items():
        outside = [stage for stage in members if stage not in selected]
        if outside:
            raise UserError(
                f'config.yaml: chains: "{chain}" runs {outside[0]}, which layers: "{resolved["layers"]}" leaves out. '
                f'Write layers: "all", a chain of layers such as "{layers[0]}-{layers[-1]}", or chains: [].'
            )
    captured_files = _captured(resolved["port"]["captured"], selected)
    if captured_files:
        chains[captured.CHAIN] = tuple(captured_files)
    return Config(resolved, num_layers, tuple(layers), chains, captured_files)


def _captured(folder: str | None, selected: Sequence[str]) -> dict[str, Path]:
    """The captured outputs of the stages that are compared, in the order of the model.

    Raises:
        UserError: if there is none.
    """
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise UserError(
            f"config.yaml: port.captured: {folder} is no folder. Name the one that tensors were captured in."
        )
    found = captured.find(Path(folder))
    files = {stage: found[stage] for stage in selected if stage in found}
    if not files:
        raise UserError(
            f"config.yaml: port.captured: {folder} has {stages.ranges(sorted(found))}, which layers leaves out. "
            "Write layers: all."
        )
    return files


def _fill_defaults(values: Any, schema: Mapping[str, Any]) -> None:
    if not isinstance(values, dict):
        return
    for key, part in schema.get("properties", {}).items():
        if key not in values and "default" in part:
            values[key] = copy.deepcopy(part["default"])
        if key in values:
            _fill_defaults(values[key], part)


def _name_gpus(values: dict[str, Any]) -> None:
    """Takes the numbers of GPUs in golden.max_memory as accelerate spells them, `0: 70GiB`, which in JSON are text."""
    golden = values.get("golden")
    if isinstance(golden, dict) and isinstance(golden.get("max_memory"), dict):
        golden["max_memory"] = {
            str(name) if type(name) is int else name: most for name, most in golden["max_memory"].items()
        }


def _check_schema(values: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    draft = jsonschema.Draft202012Validator
    types = draft.TYPE_CHECKER.redefine("integer", lambda _, value: type(value) is int)  # it would take 2.0
    validator = jsonschema.validators.extend(draft, type_checker=types)(schema)
    errors = sorted(validator.iter_errors(values), key=lambda error: list(map(str, error.absolute_path)))
    if errors:
        raise UserError(f"config.yaml: {_explain(errors[0])}")


def _explain(error: jsonschema.ValidationError) -> str:
    key = ".".join(map(str, error.absolute_path))
    schema: Any = error.schema
    if error.validator == "additionalProperties":
        known = list(schema["properties"])
        unknown = sorted(str(name) for name in cast("dict", error.instance) if name not in known)[0]
        guess = difflib.get_close_matches(unknown, known, n=1)
        remedy = f'Did you mean "{guess[0]}"?' if guess else f"The keys are {', '.join(known)}."
        return f"{f'{key}.' if key else ''}{unknown}: is no key. {remedy}"
    if error.validator == "required":
        return f"{f'{key}: ' if key else ''}{error.message}. See workflow/schemas/config.schema.yaml."
    wanted = {
        "type": f"must be {_words(schema.get('type'))}",
        "enum": f"must be one of {', '.join('null' if value is None else str(value) for value in schema.get('enum', []))}",
        "minimum": f"must be at least {schema.get('minimum')}",
        "maximum": f"must be at most {schema.get('maximum')}",
        "exclusiveMinimum": f"must be above {schema.get('exclusiveMinimum')}",
        "minLength": "must not be empty",
        "uniqueItems": "must not name the same twice",
        "pattern": "is not of the form that is wanted",
    }.get(str(error.validator), error.message)
    hint = _number_meant(error)
    return f"{key}: {error.instance!r} {wanted}. {hint}{' '.join(str(schema.get('description', '')).split())}"


def _number_meant(error: jsonschema.ValidationError) -> str:
    """What to write where YAML took for text what its writer meant as a number, such as 1e1."""
    if error.validator != "type" or error.validator_value != "number":
        return ""
    try:
        return f"Write {float(cast('str', error.instance))!r}. "
    except (TypeError, ValueError):
        return ""


def _words(types: Any) -> str:
    return " or ".join(types) if isinstance(types, list) else str(types)


def _check_plain(value: Any, key: str = "") -> None:
    """Raises UserError at the first value that JSON cannot say: NaN, infinity, a date, a set."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        _check_plain(child, f"{key}.{name}" if key else str(name))
    if not isinstance(value, dict | list):
        try:
            canonical_json(value)
        except (TypeError, ValueError):
            raise UserError(
                f"config.yaml: {key}: {value!r} is no value that JSON knows. Write a number, a text or a list."
            ) from None


def _check_module(name: str) -> None:
    """Of a dotted module only the job can tell whether it is there: it may be in the port's image alone."""
    is_python, is_there = name.endswith(".py"), Path(name).is_file()
    if (is_python or "/" in name) and not is_there:
        raise UserError(f"config.yaml: port.module: {name} is not there. Name a Python file or a dotted module.")
    if is_there and not is_python:
        raise UserError(f"config.yaml: port.module: {name} is no Python file. Name one, or a dotted module.")


def _check_files(values: Mapping[str, Any]) -> None:
    inputs, model, port = values["inputs"], values["model"], values["port"]
    if (inputs["prompts"] is None) == (inputs["token_ids"] is None):
        raise UserError("config.yaml: inputs: give exactly one of prompts and token_ids, and set the other to null.")
    for key in ("prompts", "token_ids"):
        if inputs[key] is not None and not Path(inputs[key]).is_file():
            raise UserError(f"config.yaml: inputs.{key}: {inputs[key]} is not there. Name an existing file.")
    if model["checkpoint"] != checkpoint.DEFAULT and not Path(model["checkpoint"]).is_dir():
        raise UserError(
            f"config.yaml: model.checkpoint: {model['checkpoint']} is not there. Name a directory with a checkpoint, "
            f"or {checkpoint.DEFAULT} for the one that the workflow makes."
        )
    _check_storage(values["golden"])
    _check_parallel(port, values["parallel"]["tp"])
    if port["compile"] and port["backend"] == "nxdi" and port["nxdi"]["cpu_mode"]:
        raise UserError(
            "config.yaml: port.compile: NxD's CPU mode has no XLA device to compile for. Set it or port.nxdi.cpu_mode off."
        )
    if port["compile"] == "neuron" and port["device"] not in ("auto", "NEURON"):
        raise UserError(
            f"config.yaml: port.compile: what neuron compiles runs on Neuron, and port.device is {port['device']}. "
            "Write port.device: NEURON, or port.compile: xla."
        )
    if port["backend"] != "transformers":
        _check_module(port["module"])


def _check_parallel(port: Mapping[str, Any], tp: int) -> None:
    if tp > 1 and port["backend"] == "transformers":
        raise UserError(
            "config.yaml: parallel.tp: port.backend transformers runs the unmodified stage, which one rank has whole. "
            "Write tp: 1."
        )
    if tp > 1 and port["compile"] == "neuron":
        raise UserError(
            "config.yaml: port.compile: neuron compiles for one core. With parallel.tp write xla, which tells whether all "
            "ranks have one graph, or null; name what a whole compiled model gave in port.captured."
        )


def _check_storage(golden: Mapping[str, Any]) -> None:
    if golden["mode"] == "stored" and golden["storage"] is None:
        raise UserError(
            "config.yaml: golden.storage: golden.mode stored takes the golden from there. Name s3://BUCKET/FOLDER."
        )
    lacks_plugin = find_spec("snakemake") and not find_spec("snakemake_storage_plugin_s3")  # an image has no use for it
    if str(golden["storage"]).startswith("s3://") and lacks_plugin:
        raise UserError("config.yaml: golden.storage: S3 needs a plugin of Snakemake. Run make setup-s3.")

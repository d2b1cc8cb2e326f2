"""Resolves config.yaml into the run that it asks for: layers, chains and captured files."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from layerproof.config import SCHEMA, check_plain, check_schema, fill_defaults, name_gpus
from layerproof.errors import UserError
from layerproof.model import checkpoint, stages, tiny
from layerproof.model.captured import CHAIN, find


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


def resolve(raw: Mapping[str, Any]) -> Config:
    """Fills in defaults and checks everything that can be checked without running a job.

    Raises:
        UserError: one line that names the key, what is wrong with it and the remedy.
    """
    schema = yaml.safe_load(SCHEMA.read_text(encoding="utf-8"))
    resolved = copy.deepcopy(dict(raw))
    if str(resolved.get("layers", "all")) != "all":
        resolved.setdefault("chains", [])  # of the default chain, all, some stages are left out
    fill_defaults(resolved, schema)
    name_gpus(resolved)
    check_schema(resolved, schema)
    check_plain(resolved)
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
        chains[CHAIN] = tuple(captured_files)
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
    found = find(Path(folder))
    files = {stage: found[stage] for stage in selected if stage in found}
    if not files:
        raise UserError(
            f"config.yaml: port.captured: {folder} has {stages.ranges(sorted(found))}, which layers leaves out. "
            "Write layers: all."
        )
    return files


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

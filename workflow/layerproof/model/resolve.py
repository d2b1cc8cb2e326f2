"""Resolves config.yaml into the run that it asks for: settings, layers, chains and captured files."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from layerproof.config import SHIPPED_PORT, Config, Golden, Inputs, Parallel, Port, changed, validate
from layerproof.errors import UserError
from layerproof.model import captured, checkpoint, stages
from layerproof.model.inputs import read_prompts, read_token_ids, vocabulary_of
from layerproof.paths import shipped
from layerproof.taps import SHAPES


@dataclass(frozen=True)
class Run:
    """The run that config.yaml asks for. `settings` has every default filled in, and paths of files that come with
    Layerproof as they are found from here. `captured` holds the files of the chain of that name, by stage.
    """

    settings: Config
    num_layers: int
    layers: tuple[int, ...]
    chains: Mapping[str, tuple[str, ...]]
    captured: Mapping[str, Path]

    @property
    def stages(self) -> list[str]:
        """Stages to port and compare."""
        return stages.selected_stages(self.layers, self.num_layers)


def resolve(raw: Mapping[str, Any]) -> Run:
    """Fills in defaults and checks everything that can be checked without running a job.

    Raises:
        UserError: one line that names the key, what is wrong with it and the remedy.
    """
    settings = _located(validate(raw))
    _check_inputs(settings.inputs)
    _check_own_taps(settings.golden)
    _check_storage(settings.golden)
    _check_port(settings.port, settings.parallel)
    directory = Path(settings.model.checkpoint)
    if not directory.is_dir():
        what = "is a file" if directory.exists() else "does not exist"
        raise UserError(
            f"config.yaml: model.checkpoint: {directory} {what}. Name a directory with a checkpoint, or leave "
            "the key out for the small model that comes with Layerproof."
        )
    described = checkpoint.read_config(directory)
    _check_quantization(directory, described.get("quantization_config"))
    is_unmodified = settings.port.backend == "transformers" and settings.port.module is None
    if is_unmodified and described.get("model_type") in ENDS_XLA:
        raise UserError(
            f"config.yaml: port.backend: XLA ends the process at the unmodified {described['model_type']}, whose shapes "
            "depend on values. Name a patch in port.module, or a port of your own (port.backend: xla)."
        )
    _read_inputs(settings.inputs, described)
    num_layers = checkpoint.num_layers(described)
    checkpoint.shards(directory)
    written = str(settings.layers)
    names = settings.chains if settings.chains is not None else ["all"] if written == "all" else []
    settings = changed(settings, layers=written, chains=list(names))
    layers = stages.parse_ranges(written, num_layers, "layers")
    selected = stages.selected_stages(layers, num_layers)
    chains = _chains(names, num_layers, selected, written, layers)
    captured_files = _captured(settings.port.captured, selected, num_layers)
    if captured_files:
        chains[captured.CHAIN] = tuple(captured_files)
    _check_is_of(described, settings.port)
    return Run(settings, num_layers, tuple(layers), chains, captured_files)


OF_SHIPPED_PORT = "minimax_m2"
"""The model_type that the shipped port implements."""

ENDS_XLA = ("jetmoe", "qwen4_exp", "qwen4_exp_text")
"""Types whose unmodified model XLA's compiler for the CPU does not survive (xla/shape.h, torch-xla 2.9; `make families`)."""

DEQUANTIZED = ("fp8", "mxfp4", "mxfp8", "compressed-tensors")
"""The methods by which a checkpoint may be quantised: transformers dequantises these as it loads them."""


def _check_quantization(directory: Path, settings: Any) -> None:
    if settings is None:
        return
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    if method is None:
        raise UserError(
            f"{directory / checkpoint.CONFIG}: quantization_config does not say its quant_method. Copy the file again."
        )
    if method not in DEQUANTIZED:
        raise UserError(
            f"config.yaml: model.checkpoint: {directory} is quantized by {method}, which is not supported. "
            f"Name a checkpoint in bf16, or quantized by {', '.join(DEQUANTIZED[:-1])} or {DEQUANTIZED[-1]}."
        )


FUNCTIONS = {"xla": ("build", "convert"), "nxdi": (), "transformers": ("patch",)}
"""What port.module must define, by port.backend."""


def _located(settings: Config) -> Config:
    """The settings with paths in their normal form, of shipped files as they are found from here."""
    module = settings.port.module
    if module is None and settings.port.backend != "transformers":
        raise UserError(
            f"config.yaml: port.module: is null. With port.backend {settings.port.backend}, name a Python file or a module."
        )
    return changed(
        settings,
        model=changed(settings.model, checkpoint=os.path.normpath(shipped(settings.model.checkpoint))),
        port=changed(settings.port, module=str(shipped(module)) if module and module.endswith(".py") else module),
    )


def _chains(
    names: Sequence[str], num_layers: int, selected: Sequence[str], written: str, layers: Sequence[int]
) -> dict[str, tuple[str, ...]]:
    for name in names:
        if list(names).count(name) > 1:
            raise UserError(f'config.yaml: chains: "{name}" appears twice. Remove one.')
    chains = {chain: tuple(stages.chain_stages(chain, num_layers)) for chain in names}
    for chain, members in chains.items():
        outside = [stage for stage in members if stage not in selected]
        if outside:
            raise UserError(
                f'config.yaml: chains: "{chain}" runs {outside[0]}, which layers: "{written}" excludes. '
                f'Write layers: "all", a chain of layers such as "{layers[0]}-{layers[-1]}", or chains: [].'
            )
    return chains


def _captured(folder: str | None, selected: Sequence[str], num_layers: int) -> dict[str, Path]:
    """The captured outputs of the stages that are compared, in the order of the model.

    Raises:
        UserError: if there is none, or one of a layer that the model does not have.
    """
    if folder is None:
        return {}
    if not Path(folder).is_dir():
        raise UserError(
            f"config.yaml: port.captured: {folder} is not a directory. Name the directory of the captured tensors."
        )
    found = captured.find(Path(folder))
    beyond = set(found).difference(stages.all_stages(num_layers))
    if beyond:
        raise UserError(
            f"config.yaml: port.captured: {folder} contains {stages.ranges(sorted(beyond))}, but the model has {num_layers} "
            "layers. Name what was captured of this model."
        )
    files = {stage: found[stage] for stage in selected if stage in found}
    if not files:
        raise UserError(
            f"config.yaml: port.captured: {folder} contains only {stages.ranges(sorted(found))}, which layers excludes. "
            "Write layers: all."
        )
    return files


def _check_inputs(inputs: Inputs) -> None:
    if (inputs.prompts is None) == (inputs.token_ids is None):
        raise UserError("config.yaml: inputs: set exactly one of prompts and token_ids, and the other to null.")
    for key, name in (("prompts", inputs.prompts), ("token_ids", inputs.token_ids)):
        if name is not None and not Path(name).is_file():
            raise UserError(f"config.yaml: inputs.{key}: {name} does not exist. Name an existing file.")


def _read_inputs(inputs: Inputs, config: Mapping[str, Any]) -> None:
    if inputs.prompts is not None:
        read_prompts(Path(inputs.prompts))
    if inputs.token_ids is not None:
        read_token_ids(Path(inputs.token_ids), vocabulary_of(config))


def _check_port(port: Port, parallel: Parallel) -> None:
    above_one = {axis: size for axis, size in parallel.of_stage.items() if size > 1}
    if others := [axis for axis in above_one if axis != "tp" and port.backend != "xla"]:
        raise UserError(
            f"config.yaml: parallel.{others[0]}: port.backend {port.backend} splits a stage by tp alone. Write "
            f"{others[0]}: 1."
        )
    if above_one and port.backend == "transformers" and port.compile:
        raise UserError(
            "config.yaml: port.compile: the tensor-parallel plan of transformers cannot be traced for XLA. Write "
            "port.compile: null."
        )
    if above_one and port.compile == "neuron":
        over = " and ".join(f"parallel.{axis} is {size}" for axis, size in above_one.items())
        raise UserError(
            f"config.yaml: port.compile: neuron compiles for one core, but {over}. Write xla to check that all "
            "ranks have the same graph, or null. To compare a compiled full model, name its tensors in port.captured."
        )
    if port.compile and port.backend == "nxdi" and port.nxdi.cpu_mode:
        raise UserError(
            "config.yaml: port.compile: NxD's CPU mode has no XLA device to compile for. Write port.compile: null, or "
            "port.nxdi.cpu_mode: false."
        )
    if port.compile == "neuron" and port.device not in ("auto", "NEURON"):
        raise UserError(
            f"config.yaml: port.compile: stages compiled by neuron run only on Neuron, but port.device is {port.device}. "
            "Write port.device: NEURON, or port.compile: xla."
        )
    if port.module:
        _check_module(port.module)
    if port.module and port.module.endswith(".py"):
        _check_source(Path(port.module), FUNCTIONS[port.backend])


def _check_is_of(described: Mapping[str, Any], port: Port) -> None:
    """Checks, by config.json, that a checkpoint is of the model that the shipped port implements, if that is the port."""
    model_type = described.get("model_type", OF_SHIPPED_PORT)
    if port.backend == "xla" and port.module == str(shipped(SHIPPED_PORT)) and model_type != OF_SHIPPED_PORT:
        raise UserError(
            f"config.yaml: port.module: {SHIPPED_PORT} is a port of {OF_SHIPPED_PORT}, but the checkpoint is of "
            f"{model_type}. Name the file of your port, or write port.backend: transformers."
        )


def _check_module(name: str) -> None:
    """Only the job can tell whether a dotted module exists: it may be in the port's image alone."""
    is_python, exists = name.endswith(".py"), Path(name).is_file()
    if (is_python or "/" in name) and not exists:
        raise UserError(f"config.yaml: port.module: {name} does not exist. Name a Python file or a dotted module.")
    if exists and not is_python:
        raise UserError(
            f"config.yaml: port.module: {name} is not a Python file. Name a Python file or a dotted module."
        )


def _check_source(path: Path, functions: Sequence[str]) -> None:
    """Checks the syntax of a port's file, and that it can have the functions of a port, without importing it."""
    try:
        tree = ast.parse(path.read_bytes(), path.name)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}). Correct port.module.") from None
    except (SyntaxError, ValueError) as error:
        line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) and error.lineno else str(error)
        raise UserError(f"{path}: {line}. Correct the port's file.") from None
    for function in functions:
        if not _may_define(tree, function):
            unmodified = " Write port.module: null to run the unmodified model." if function == "patch" else ""
            raise UserError(
                f"{path}: the function {function} is missing. docs/ports.md says what a port defines.{unmodified}"
            )


def _may_define(tree: ast.Module, name: str) -> bool:
    """Whether importing a module may bind a name: by a definition, an assignment, an import, or in a way that only running
    it shows.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found = node.name in (name, "__getattr__")
        elif isinstance(node, ast.alias):
            found = name == (node.asname or node.name) or node.name == "*"
        else:
            found = isinstance(node, ast.Name) and node.id in (name, "globals", "setattr", "exec")
        if found:
            return True
    return False


def _check_own_taps(golden: Golden) -> None:
    for name in golden.taps:
        if name in SHAPES:
            raise UserError(f"config.yaml: golden.taps: {name} is a canonical tap already. Choose another name.")


def _check_storage(golden: Golden) -> None:
    if golden.mode == "stored" and golden.storage is None:
        raise UserError(
            "config.yaml: golden.storage: is missing, but golden.mode stored imports the golden from there. Write "
            "s3://BUCKET/FOLDER."
        )
    lacks_plugin = find_spec("snakemake") and not find_spec("snakemake_storage_plugin_s3")  # an image has no use for it
    if str(golden.storage).startswith("s3://") and lacks_plugin:
        raise UserError("config.yaml: golden.storage: Snakemake's plugin for S3 is not installed. Run make setup-s3.")

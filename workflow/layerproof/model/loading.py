"""A checkpoint as transformers sees it: builds the model without weights, finds its stages and loads one of them.

Names on disk differ from names in memory (fused experts, renamed buffers); transformers' own conversion maps them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, initialization
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer

from layerproof.errors import StageError, UserError, first_line
from layerproof.files import read_json, sha256
from layerproof.model import fp8
from layerproof.model.checkpoint import (
    CONFIG,
    INDEX,
    SINGLE,
    TensorOfStage,
    TensorOnDisk,
    describe,
    read_shard_header,
    shards,
    tensors_of_stage,
)
from layerproof.model.stages import EMBED, LM_HEAD, NORM, layer_of, layer_stage
from layerproof.rerun.recorder import cached
from layerproof.tensors.hdf5 import dtype_name

log = logging.getLogger(__name__)


def meta_model(
    directory: Path, trust_remote_code: bool, dtype: torch.dtype | None = None, **implementations: str
) -> PreTrainedModel:
    """Builds the full model from config.json with transformers, in eval mode and without memory for its weights.

    `load_stage` casts weights to `dtype`. `implementations` are transformers' `attn_implementation` and
    `experts_implementation`; transformers chooses those that are not given.

    Raises:
        UserError: if transformers does not know the architecture or rejects the config.
    """
    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.float32, trust_remote_code=trust_remote_code, **implementations
            )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise UserError(
            f"{directory / CONFIG}: transformers cannot build this model ({error}). Correct the file or update transformers."
        ) from error
    return model.eval()


def meta_stage(
    directory: Path, stage: str, trust_remote_code: bool, dtype: torch.dtype, **implementations: str
) -> PreTrainedModel:
    """Builds a `meta_model` whose other layers have no modules; searching them would take most of a job's time.

    A process builds the full model once and copies it for each stage.

    Raises:
        UserError: as `meta_model` does.
    """
    model = _full_model(directory, sha256(directory / CONFIG), trust_remote_code, dtype, **implementations)
    layers = cast("torch.nn.ModuleList", model.get_submodule(parts_of(model).layers))
    empty: dict[int, Any] = {  # deepcopy uses these as the copies of other layers' modules, parameters and hooks
        id(attribute): type(attribute)()
        for index, layer in enumerate(layers)
        if index != layer_of(stage)
        for attribute in vars(layer).values()
        if isinstance(attribute, dict | set)
    }
    return copy.deepcopy(model, empty)


@cached
def _full_model(
    directory: Path, config: str, trust_remote_code: bool, dtype: torch.dtype, **implementations: str
) -> PreTrainedModel:
    """Builds a `meta_model`, cached also by the digest of its config.json; do not change the result.

    The cache ignores code that comes with a checkpoint: processes that trust such code are never shared.
    """
    return meta_model(directory, trust_remote_code, dtype, **implementations)


@dataclass(frozen=True)
class Parts:
    """Dotted module names of the stages in a transformers causal language model."""

    embed: str
    layers: str
    norm: str
    lm_head: str

    def stage_of(self, parameter: str) -> str | None:
        """Returns the stage that owns a parameter or buffer of this name, or None."""
        if parameter.startswith(self.layers + "."):
            return layer_stage(int(parameter.removeprefix(self.layers + ".").split(".")[0]))
        for prefix, stage in ((self.embed, EMBED), (self.norm, NORM), (self.lm_head, LM_HEAD)):
            if parameter.startswith(prefix + "."):
                return stage
        return None

    def path_of(self, stage: str) -> str:
        """Returns the name of a stage's module."""
        if (layer := layer_of(stage)) is not None:
            return f"{self.layers}.{layer}"
        return {EMBED: self.embed, NORM: self.norm, LM_HEAD: self.lm_head}[stage]


def parameters_of(model: PreTrainedModel, stage: str) -> dict[str, torch.Tensor]:
    """Returns a stage's parameters and buffers by name, including those that a tied head shares."""
    tied = stage == LM_HEAD and model.config.get_text_config().tie_word_embeddings
    path = parts_of(model).path_of(EMBED if tied else stage)
    return model.get_submodule(path).state_dict(prefix=f"{path}.")


def weights_in_memory(model: PreTrainedModel, stage: str) -> dict[str, dict[str, Any]]:
    """Returns `dtype` and `shape` of each parameter and buffer of a stage in the model."""
    parameters = parameters_of(model, stage)
    return {name: {"dtype": dtype_name(tensor), "shape": list(tensor.shape)} for name, tensor in parameters.items()}


NORMS = ("norm", "final_layernorm", "final_layer_norm")
"""Names of the norm after the last layer in transformers' decoders."""


def parts_of(model: PreTrainedModel) -> Parts:
    """Finds the stages' modules through transformers' own accessors.

    Raises:
        UserError: if the model is not an embedding, `layers`, a norm and a head, as is usual in transformers.
    """
    decoder = model.get_decoder()
    if decoder is model:  # llama4's accessor returns the model itself
        decoder = cast("torch.nn.Module", model.model)
    head = model.get_output_embeddings()
    norm = next((getattr(decoder, name) for name in NORMS if hasattr(decoder, name)), None)
    if head is None or norm is None or not hasattr(decoder, "layers"):
        raise UserError(
            f"config.yaml: model.checkpoint: {type(model).__name__} does not consist of an embedding, layers, a norm and a "
            "head, so it has no stages. Name a decoder such as Llama, Qwen, Gemma, DeepSeek, gpt-oss or MiniMax."
        )
    layers = cast("torch.nn.Module", decoder.layers)
    inside = set(layers.children())  # exclude them: walking all layers at each call is slow
    names = {module: name for name, module in model.named_modules(memo=inside)}
    return Parts(names[model.get_input_embeddings()], names[layers], names[norm], names[head])


def conversion(model: PreTrainedModel) -> tuple[list[WeightTransform], HfQuantizer | None]:
    """Returns transformers' mapping from names on disk to names in memory, and the dequantiser if one is needed.

    Raises:
        UserError: if the checkpoint is quantised in a way that transformers cannot undo while loading.
    """
    dequantized = _dequantizing(model.config)
    if dequantized is None:
        return get_model_conversion_mapping(model), None
    quantizer = AutoHfQuantizer.from_config(dequantized, pre_quantized=True)
    return get_model_conversion_mapping(model, hf_quantizer=quantizer), quantizer


_dequantize_even = Fp8Dequantize._dequantize_one


def _dequantize_one(
    self: Fp8Dequantize, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Extends transformers' own method to sides whose last block is smaller than the others.

    The original assumes equal blocks. For DeepSeek-V3's `kv_a_proj_with_mqa`, which has 576 rows, it would raise an
    error or apply the scales to the wrong rows.
    """
    block = self.hf_quantizer.quantization_config.weight_block_size
    if block and quantized.dtype == torch.float8_e4m3fn and scales.ndim >= 2:
        scales = fp8.evened(scales, quantized.shape, block)
    return _dequantize_even(self, quantized, scales, output_dtype)


Fp8Dequantize._dequantize_one = _dequantize_one


def dequantizing(directory: Path, trust_remote_code: bool) -> Any:
    """Returns the `quantization_config` that makes `from_pretrained` dequantise; None if nothing is quantised.

    Raises:
        UserError: as `conversion` does.
    """
    return _dequantizing(AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code))


def _dequantizing(config: Any) -> Any:
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if settings is None:
        return None
    try:
        dequantized = AutoQuantizationConfig.from_dict(dict(settings))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(f"config.json: quantization_config: transformers cannot read it ({error}).") from error
    if not hasattr(dequantized, "dequantize"):
        raise UserError(
            f"config.json: quantization_config: transformers cannot dequantize {settings.get('quant_method')} while "
            "loading. Name a checkpoint in FP8, or one that is not quantized."
        )
    dequantized.dequantize = True  # as transformers does on a CPU, but without searching for a GPU
    return dequantized


def assign_stages(model: PreTrainedModel, names: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Returns the tensors on disk that each stage needs, with the parameter each goes into, and the unused tensors.

    A tied head needs the embedding's tensor. transformers' own mapping converts the names.
    """
    mapping, _ = conversion(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    parts = parts_of(model)
    by_stage: dict[str, dict[str, str]] = {}
    unused = []
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        stage = parts.stage_of(target) if target in state else None
        if stage is None:
            unused.append(name)
        else:
            by_stage.setdefault(stage, {})[name] = target
    if model.config.get_text_config().tie_word_embeddings:
        by_stage[LM_HEAD] = by_stage.get(EMBED) or by_stage.get(LM_HEAD, {})
    return by_stage, unused


def describe_stages(
    directory: Path, stages: Sequence[str], trust_remote_code: bool
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Describes what each stage reads, for results/weights/STAGE.json, and lists the tensors that no stage loads.

    By stage: `{"digest", "tensors": {name: {"file", "parameter", "dtype", "shape", "sha256"}}}`. The digest covers
    names, dtypes, shapes and contents. If a shard of the stage is damaged, or a tensor is missing that the index names
    or the model needs, the entry is `{"error": message}`.

    Raises:
        UserError: if the checkpoint as a whole cannot be used.
    """
    found: dict[str, TensorOnDisk] = {}
    damaged: dict[str, str] = {}
    for shard in shards(directory):
        try:
            found |= read_shard_header(directory / shard)
        except StageError as error:
            damaged[shard] = str(error)
    index = directory / INDEX
    if damaged and not index.exists():
        raise UserError(damaged[SINGLE])
    expected: dict[str, str] = read_json(index)["weight_map"] if index.exists() else dict.fromkeys(found, SINGLE)
    model = meta_model(directory, trust_remote_code)
    by_stage, unused = assign_stages(model, sorted({*expected, *found}))
    described = {}
    for number, stage in enumerate(stages, start=1):
        log.info("weights: takes the digests of %s, %d of %d stages", stage, number, len(stages))
        described[stage] = describe(stage, by_stage.get(stage, {}), found, expected, damaged)
    for stage, entry in described.items():
        filled = {tensor["parameter"] for tensor in entry.get("tensors", {}).values()}
        missing = sorted(parameters_of(model, stage).keys() - filled)
        if "tensors" in entry and missing:
            described[stage] = {
                "error": f"{stage}: {directory} has no tensor for {missing[0]}. Copy the checkpoint again."
            }
    return described, unused


def load_stage(
    model: PreTrainedModel,
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
    preloaded: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Loads the weights of one stage into a `meta_model` or `meta_stage`, in place.

    transformers converts the weights and casts them to the model's dtype. Parameters and buffers in `preloaded` (by their
    names in the model) use those tensors, cast to the model's dtype, instead of reading from disk. Buffers that are
    computed rather than loaded (rotary frequencies, embedding scale) are computed for the full model.

    A tensor of all experts is never in memory twice: experts are read and converted one by one.

    Raises:
        StageError: if a tensor is missing, has the wrong shape or cannot be converted.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    preloaded = preloaded or {}
    parts = parts_of(model)
    tied = stage == LM_HEAD and model.config.get_text_config().tie_word_embeddings
    parameters = {name: entry["parameter"] for name, entry in description.get("tensors", {}).items()}
    on_disk = tensors_of_stage(directory, description)
    declared = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    loading = _fill(model, {name: on_disk[name] for name in on_disk if parameters[name] not in preloaded}, device)
    for name, tensor in preloaded.items():
        replace_tensor(model, name, tensor.to(declared[name]))
    if tied:
        model.get_submodule(parts.lm_head).weight = model.get_input_embeddings().weight
    missing = sorted(name for name in loading.missing_keys - set(preloaded) if parts.stage_of(name) == stage)
    if missing and not tied:
        raise StageError(f"{stage}: the checkpoint {directory} lacks {', '.join(missing)}. Copy it again.")
    if loading.mismatched_keys:
        name, found, wanted = sorted(loading.mismatched_keys)[0]
        raise StageError(
            f"{stage}: {name} has shape {list(found)}, but config.json requires {list(wanted)}. Copy the checkpoint again."
        )
    if loading.conversion_errors:
        name, message = sorted(loading.conversion_errors.items())[0]
        raise StageError(f"{stage}: {name} cannot be converted ({first_line(message)}).")
    # With a dequantiser, transformers does not cast the tensors that are not quantised.
    for name in set(parameters.values()) - set(preloaded):
        tensor = model.get_parameter_or_buffer(name)
        if tensor.dtype != declared[name] == torch.promote_types(tensor.dtype, declared[name]):
            replace_tensor(model, name, tensor.to(declared[name]))
    with torch.no_grad(), initialization.guard_torch_init_functions():
        _make_computed_buffers(model, device)


@dataclass(frozen=True)
class _Changed:
    """A tensor on disk that `change` modifies as it is read."""

    tensor: TensorOfStage
    change: Callable[[torch.Tensor], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.change(self.tensor[index])

    def get_dtype(self) -> str:
        return self.tensor.get_dtype()


def load_changed(
    model: PreTrainedModel,
    parameter: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
    ending: str,
    change: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Loads a parameter after changing its tensors on disk whose names end with `ending`; the model stays as it is.

    Raises:
        StageError: if no tensor on disk has this ending.
    """
    found = {
        name: tensor
        for name, tensor in tensors_of_stage(directory, description).items()
        if description["tensors"][name]["parameter"] == parameter
    }
    if not any(name.endswith(ending) for name in found):
        raise StageError(f"{parameter}: no tensor on disk ends with {ending}")
    before = model.get_parameter_or_buffer(parameter)
    read = {name: _Changed(tensor, change) if name.endswith(ending) else tensor for name, tensor in found.items()}
    _fill(model, read, device)
    after = model.get_parameter_or_buffer(parameter)
    replace_tensor(model, parameter, before)
    return after.detach()


def _fill(model: PreTrainedModel, read: Mapping[str, Any], device: torch.device) -> Any:
    """Lets transformers convert tensors by their names on disk and load them into the model; returns its report."""
    mapping, dequantizer = conversion(model)
    config = LoadStateDictConfig(
        dtype=model.dtype,
        device_map={"": device},
        weight_mapping=cast("Any", [_one_expert_at_a_time(entry) for entry in mapping]),
        hf_quantizer=dequantizer,
    )
    with _read_when_needed():
        loading, _ = convert_and_load_state_dict_in_model(model, dict(read), config)
    return loading


def replace_tensor(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replaces a parameter or buffer with another tensor."""
    path, _, leaf = name.rpartition(".")
    owner = model.get_submodule(path)
    if leaf in owner._buffers:
        owner._buffers[leaf] = tensor
    else:
        owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)


@contextlib.contextmanager
def _read_when_needed() -> Iterator[None]:
    """Makes transformers read each tensor only when it needs it; by default, threads read the checkpoint ahead."""
    name = "HF_DEACTIVATE_ASYNC_LOAD"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class _OneExpertAtATime(WeightConverter):
    """A conversion that stacks experts one by one into a tensor that is allocated once.

    transformers collects all experts, stacks gate and up separately, then joins them: three times their memory.
    """

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> Any:
        if len({len(readers) for readers in self.collected_tensors.values()}) != 1:
            return super().convert(layer_name, *args, **kwargs)  # it reports what is wrong
        collected, self.collected_tensors = self.collected_tensors, {}
        number = len(next(iter(collected.values())))
        stacked: dict[str, torch.Tensor] = {}
        for expert in range(number):
            for pattern, readers in collected.items():
                self.collected_tensors[pattern] = [readers[expert]]
            parts: dict[str, Any] = super().convert(layer_name, *args, **kwargs)
            for name, part in parts.items():
                if name not in stacked:
                    stacked[name] = part.new_empty(number, *part.shape[1:])
                if part[0].shape != stacked[name][expert].shape:
                    shapes = (
                        f"{list(part[0].shape)}, but the experts before it have {list(stacked[name][expert].shape)}"
                    )
                    raise StageError(f"{name}: expert {expert} has shape {shapes}. Copy the checkpoint again.")
                stacked[name][expert] = part[0]
        return stacked


def _one_expert_at_a_time(entry: WeightTransform) -> WeightTransform:
    """Converts an entry to `_OneExpertAtATime` if it stacks experts and keeps them as the first dim."""
    operations = [operation for operation in getattr(entry, "operations", ()) if not hasattr(operation, "hf_quantizer")]
    stacks = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    keeps_first = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in operations[1:])
    if not isinstance(entry, WeightConverter) or not stacks or not keeps_first:
        return entry
    sources, targets = entry._original_source_patterns, entry._original_target_patterns
    made = _OneExpertAtATime(list(sources), list(targets), entry.operations, entry.force_cpu)
    made.scope_prefix, made.base_model_prefix = entry.scope_prefix, entry.base_model_prefix
    return made


def _make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint contains, with the model's `_init_weights` as in `from_pretrained`."""
    owners = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        owner.register_buffer(leaf, torch.empty_like(buffer, device=device), persistent=False)
        owners.append(owner)
    for owner in dict.fromkeys(owners):
        for parameter in owner.parameters(recurse=False):
            parameter._is_hf_initialized = True  # loaded or meant to stay on meta: do not initialise at random
        model._init_weights(owner)

"""A checkpoint as transformers sees it: builds the model without weights, finds its stages and loads one of them.

Names on disk differ from names in memory (fused experts, renamed buffers); transformers' own conversion maps them.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    initialization,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.modeling_utils import LoadStateDictConfig
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.quantizers.base import HfQuantizer

from layerproof.errors import StageError, UserError, first_line, one_line
from layerproof.files import read_json, sha256
from layerproof.model import fp8
from layerproof.model.buffers import make_computed_buffers
from layerproof.model.checkpoint import (
    CONFIG,
    INDEX,
    SINGLE,
    TensorOfStage,
    TensorOnDisk,
    cannot_build,
    describe,
    read_shard_header,
    shards,
    tensors_of_stage,
    transformers_config,
)
from layerproof.model.parts import Parts, parts_of
from layerproof.model.stages import layer_of
from layerproof.rerun.recorder import cached
from layerproof.tensors.hdf5 import dtype_name

log = logging.getLogger(__name__)

IMPLEMENTATIONS = {
    "attn_implementation": "attention implementation",
    "experts_implementation": "experts implementation",
}
"""Options of transformers, and the words by which its errors speak of them."""


def meta_model(
    directory: Path, trust_remote_code: bool, dtype: torch.dtype | None = None, **implementations: str
) -> PreTrainedModel:
    """Builds the full model from config.json with transformers, in eval mode and without memory for its weights.

    `load_stage` casts weights to `dtype`. `implementations` are transformers' `attn_implementation` and
    `experts_implementation`; transformers chooses those that are not given.

    Raises:
        UserError: if transformers does not know the architecture or rejects the config.
    """
    config = transformers_config(directory, trust_remote_code)
    try:
        with torch.device("meta"):
            model = _from_config(config, trust_remote_code, dtype=dtype or torch.float32, **implementations)
    except Exception as error:  # of any kind: the code may come with the checkpoint
        raise _not_implemented(error, implementations) or cannot_build(directory, error) from error
    _keep_fp32(model)
    return model.eval()


def _not_implemented(error: Exception, implementations: Mapping[str, str]) -> UserError | None:
    """The error if transformers does not have an implementation that the config asks for in this model."""
    for key, words in IMPLEMENTATIONS.items():
        if key in implementations and words in str(error):
            return UserError(
                f"config.yaml: golden.{key}: the model has no {implementations[key]} ({one_line(error)}). Write null, and "
                "transformers chooses."
            )
    return None


def _from_config(config: PreTrainedConfig, trust_remote_code: bool, **options: Any) -> PreTrainedModel:
    """The causal model of a config, or the model that it names itself, as the text part of some larger models does."""
    named = getattr(transformers, (config.architectures or [""])[0], None)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not getattr(config, "auto_map", None) and named is not None:
        return named._from_config(config, **options)
    return AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code, **options)


def _keep_fp32(model: PreTrainedModel) -> None:
    """Gives parameters and buffers that transformers keeps in fp32, whatever the model's dtype is, that dtype; in place."""
    plan = model._get_dtype_plan(model.dtype)
    if not plan:
        return
    pattern, _, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict().items():
        if pattern.search(name):
            replace_tensor(model, name, tensor.float())


def meta_stage(
    directory: Path, stage: str, trust_remote_code: bool, dtype: torch.dtype, **implementations: str
) -> PreTrainedModel:
    """Builds a `meta_model` whose other layers have no modules; searching them would take most of a job's time.

    A process builds the full model once and copies it for each stage.

    Raises:
        UserError: as `meta_model` does.
    """
    model = _full_model(directory, sha256(directory / CONFIG), trust_remote_code, dtype, **implementations)
    parts = parts_of(model)
    layers = cast("torch.nn.ModuleList", model.get_submodule(parts.layers))
    needed = [f"{parts.layers}.{layer_of(stage)}.", *parameters_of(model, stage)]  # tied ones may be of another layer
    empty: dict[int, Any] = {  # deepcopy uses these as the copies of other layers' modules, parameters and hooks
        id(attribute): type(attribute)()
        for index, layer in enumerate(layers)
        if not any(name.startswith(f"{parts.layers}.{index}.") for name in needed)
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


def parameters_of(model: PreTrainedModel, stage: str) -> dict[str, torch.Tensor]:
    """Returns a stage's parameters and persistent buffers by name; tied ones by the name that they are loaded under."""
    parts = parts_of(model)
    names = list(parts.outside.get(stage, ()))
    if layer_of(stage) is not None:
        path = parts.path_of(stage)
        names += [f"{path}.{name}" for name in model.get_submodule(path).state_dict()]
    found = dict.fromkeys(map(parts.source_of, names))
    return {name: model.get_parameter_or_buffer(name) for name in found}


def weights_in_memory(model: PreTrainedModel, stage: str) -> dict[str, dict[str, Any]]:
    """Returns `dtype` and `shape` of each parameter and buffer of a stage in the model."""
    parameters = parameters_of(model, stage)
    return {name: {"dtype": dtype_name(tensor), "shape": list(tensor.shape)} for name, tensor in parameters.items()}


def conversion(model: PreTrainedModel) -> tuple[list[WeightTransform], HfQuantizer | None]:
    """Returns transformers' mapping from names on disk to names in memory, and the dequantiser if one is needed.

    Raises:
        UserError: if the checkpoint is quantised in a way that transformers cannot undo while loading.
    """
    dequantized = _dequantizing(model.config)
    if dequantized is None:
        return get_model_conversion_mapping(model), None
    quantizer = AutoHfQuantizer.from_config(dequantized, pre_quantized=True)
    quantizer.validate_environment()
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
    return _dequantizing(transformers_config(directory, trust_remote_code))


def _dequantizing(config: Any) -> Any:
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(config.get_text_config(decoder=True), "quantization_config", None)
    if settings is None:
        return None
    try:
        dequantized = AutoQuantizationConfig.from_dict(dict(settings))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"config.json: quantization_config: transformers cannot read it ({one_line(error)}). Correct the file."
        ) from error
    if not hasattr(dequantized, "dequantize"):
        raise UserError(
            f"config.json: quantization_config: transformers cannot dequantize {settings.get('quant_method')} while "
            "loading. Name a checkpoint in FP8, or one that is not quantized."
        )
    dequantized.dequantize = True  # as transformers does on a CPU, but without searching for a GPU
    return dequantized


def assign_stages(
    model: PreTrainedModel, names: Sequence[str]
) -> tuple[dict[str, dict[str, str]], list[str], dict[str, str]]:
    """Returns the tensors on disk that each stage needs, with the parameter each goes into, and the unused tensors.

    The third result maps each unused copy of a tied weight to the tensor that it repeats.

    Stages with tied weights, such as embedding and head, need the same tensor, under the name of the first. transformers'
    own mapping converts the names.
    """
    mapping, _ = conversion(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    state = model.state_dict()
    parts = parts_of(model)

    def target_of(name: str) -> str:
        renamed, _ = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if renamed not in state and name in state:  # as transformers loads it
            renamed, _ = rename_source_key(name, [], [], model.base_model_prefix, state)
        return renamed

    targets = {name: target_of(name) for name in names}
    sources = {target for target in targets.values() if target == parts.source_of(target)}
    by_stage: dict[str, dict[str, str]] = {}
    unused, copies = [], {}
    for name, target in targets.items():
        source = parts.source_of(target)
        is_copy = target != source and source in sources
        if is_copy:
            copies[name] = next(one for one, its in targets.items() if its == source)
        stages = parts.stages_of(target) if target in state and not is_copy else []
        for stage in stages:
            by_stage.setdefault(stage, {})[name] = source
        if not stages:
            unused.append(name)
    return by_stage, unused, copies


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
    by_stage, unused, copies = assign_stages(model, sorted({*expected, *found}))
    for name, source in copies.items():
        if name in found and source in found and found[name].sha256() != found[source].sha256():
            raise UserError(
                f"{directory / CONFIG}: the model ties {name} and {source}, but the checkpoint has another tensor for each, "
                'and transformers then ties nothing. Write "tie_word_embeddings": false.'
            )
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
    names in the model) use those tensors, cast to the model's dtype, instead of reading from disk. Weights that the
    model's first forward changes are changed here. Buffers that are computed rather than loaded (rotary frequencies,
    embedding scale) are computed for the full model.

    A tensor of all experts is never in memory twice: experts are read and converted one by one.

    Raises:
        StageError: if a tensor is missing, has the wrong shape or cannot be converted.
    """
    logging.getLogger("transformers").setLevel(logging.ERROR)
    preloaded = preloaded or {}
    parts = parts_of(model)
    parameters = {name: entry["parameter"] for name, entry in description.get("tensors", {}).items()}
    on_disk = tensors_of_stage(directory, description)
    declared = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    loading = _fill(model, {name: on_disk[name] for name in on_disk if parameters[name] not in preloaded}, device)
    for name, tensor in preloaded.items():
        replace_tensor(model, name, tensor.to(declared[name]))
    _tie(model, parts, parameters_of(model, stage))
    missing = sorted(name for name in parameters_of(model, stage) if model.get_parameter_or_buffer(name).is_meta)
    if missing and not loading.mismatched_keys and not loading.conversion_errors:
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
    for name in sorted(set(parameters.values()) - set(preloaded)):
        tensor = model.get_parameter_or_buffer(name)
        if tensor.is_floating_point() and tensor.itemsize == 1 and declared[name].itemsize > 1:
            raise StageError(
                f"{stage}: the checkpoint has no scales for {name}, which is FP8. Copy the checkpoint again."
            )
        if tensor.dtype != declared[name] == torch.promote_types(tensor.dtype, declared[name]):
            replace_tensor(model, name, tensor.to(declared[name]))
        _write(model, name)
    with torch.no_grad(), initialization.guard_torch_init_functions():
        make_computed_buffers(model, device)


def _write(model: PreTrainedModel, name: str) -> None:
    """Does to a loaded parameter what the model's first forward does to it."""
    for write in parts_of(model).writes.get(name, ()):
        write.apply(model.get_parameter_or_buffer(name))


def _tie(model: PreTrainedModel, parts: Parts, names: Iterable[str]) -> None:
    """Gives tied parameters the weights that one of them was loaded with; `names` are the sources of the tied ones."""
    for source in names:
        group = [source, *(name for name, of in parts.tied.items() if of == source and _has(model, name))]
        loaded = next(
            (model.get_parameter_or_buffer(name) for name in group if not model.get_parameter_or_buffer(name).is_meta),
            None,
        )
        for name in group:
            if loaded is not None and len(group) > 1:
                replace_tensor(model, name, loaded)


def _has(model: PreTrainedModel, name: str) -> bool:
    """Whether a parameter is in a model, whose other layers may have no modules."""
    try:
        model.get_parameter_or_buffer(name)
    except AttributeError:
        return False
    return True


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
    _write(model, parameter)
    after = model.get_parameter_or_buffer(parameter)
    replace_tensor(model, parameter, before)
    return after.detach()


def _fill(model: PreTrainedModel, read: Mapping[str, Any], device: torch.device) -> Any:
    """Lets transformers convert tensors by their names on disk and load them into the model; returns its report."""
    mapping, dequantizer = conversion(model)
    config = LoadStateDictConfig(
        dtype=model.dtype,
        dtype_plan=model._get_dtype_plan(model.dtype),
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

"""A checkpoint directory: which tensors are on disk, which stage each belongs to, and one stage loaded from it.

Names on disk differ from names in memory (fused experts, renamed buffers); transformers' own conversion maps them.
Only safetensors are read: they hold tensors and nothing that runs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from layerproof.errors import StageError, UserError
from layerproof.files import digest_of, read_json
from layerproof.stages import EMBED, LM_HEAD, NORM, layer_stage

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class TensorOnDisk:
    """One tensor of a checkpoint: where its bytes are. `dtype` is the word of safetensors, such as BF16."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def read(self) -> bytes:
        """The tensor's bytes.

        Raises:
            StageError: if the shard ends before the tensor does.
        """
        with open(self.file, "rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        if len(data) != self.end - self.start:
            raise StageError(f"{self.file}: ends inside tensor {self.name} (truncated?). Copy the shard again.")
        return data


def read_config(directory: Path) -> dict[str, Any]:
    """The checkpoint's config.json.

    Raises:
        UserError: if it is missing or is not JSON.
    """
    path = directory / CONFIG
    try:
        return read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: is not there. model.checkpoint must name a transformers checkpoint.") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}). Copy the file again.") from None


def num_layers(config: Mapping[str, Any]) -> int:
    """Number of decoder layers that a config.json states, also when its text model is nested.

    Raises:
        UserError: if it states none.
    """
    for part in (config, config.get("text_config") or {}):
        if isinstance(part.get("num_hidden_layers"), int):
            return part["num_hidden_layers"]
    raise UserError(
        "config.yaml: model.checkpoint: its config.json has no num_hidden_layers. "
        "Name a decoder such as Llama, Qwen, Gemma, DeepSeek, gpt-oss or MiniMax."
    )


def shards(directory: Path) -> list[str]:
    """File names of the checkpoint's shards.

    Raises:
        UserError: if there are no safetensors.
    """
    if (directory / INDEX).exists():
        try:
            return sorted(set(read_json(directory / INDEX)["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{directory / INDEX}: cannot be read ({error}). Copy the file again.") from None
    if (directory / SINGLE).exists():
        return [SINGLE]
    raise UserError(f"{directory}: has neither {INDEX} nor {SINGLE}. model.checkpoint must hold safetensors.")


def read_shard_header(path: Path) -> dict[str, TensorOnDisk]:
    """Tensors that one safetensors file holds, from its header alone.

    Raises:
        StageError: if the file is missing, truncated or not safetensors.
    """
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        base = 8 + length
        return {
            name: TensorOnDisk(
                name,
                path,
                entry["dtype"],
                tuple(entry["shape"]),
                base + entry["data_offsets"][0],
                base + entry["data_offsets"][1],
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except FileNotFoundError:
        raise StageError(f"{path}: is not there; the index names it. Copy the shard again.") from None
    except (struct.error, ValueError, MemoryError, OverflowError, AttributeError, TypeError, KeyError, IndexError):
        raise StageError(f"{path}: has no readable header (truncated?). Copy the shard again.") from None


def meta_model(
    directory: Path, trust_remote_code: bool, dtype: torch.dtype | None = None, **implementations: str
) -> PreTrainedModel:
    """The whole model as transformers builds it from config.json, in eval mode and without memory for its weights.

    `dtype` is what `load_stage` will cast weights to. `implementations` are transformers' `attn_implementation` and
    `experts_implementation`; what is not named is left to transformers.

    Raises:
        UserError: if transformers does not know the architecture or rejects the config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                config, dtype=dtype or torch.float32, trust_remote_code=trust_remote_code, **implementations
            )
    except (ValueError, TypeError, KeyError, ImportError) as error:
        raise UserError(f"{directory / CONFIG}: transformers cannot build this model ({error}).") from error
    return model.eval()


@dataclass(frozen=True)
class Parts:
    """Where the stages are in a transformers causal language model: dotted module names."""

    embed: str
    layers: str
    norm: str
    lm_head: str

    def stage_of(self, parameter: str) -> str | None:
        """The stage that owns a parameter or buffer of this name."""
        if parameter.startswith(self.layers + "."):
            return layer_stage(int(parameter.removeprefix(self.layers + ".").split(".")[0]))
        for prefix, stage in ((self.embed, EMBED), (self.norm, NORM), (self.lm_head, LM_HEAD)):
            if parameter.startswith(prefix + "."):
                return stage
        return None


NORMS = ("norm", "final_layernorm", "final_layer_norm")
"""What transformers' decoders call the norm after their last layer."""


def parts_of(model: PreTrainedModel) -> Parts:
    """Finds the stages' modules by transformers' own accessors.

    Raises:
        UserError: if the decoder is not an embedding, `layers`, a norm and a head, as those of transformers' style are.
    """
    names = {module: name for name, module in model.named_modules()}
    decoder = model.get_decoder()
    if decoder is model:  # llama4's accessor answers with the model itself
        decoder = cast("torch.nn.Module", model.model)
    head = model.get_output_embeddings()
    norm = next((getattr(decoder, name) for name in NORMS if hasattr(decoder, name)), None)
    if head is None or norm is None or not hasattr(decoder, "layers"):
        raise UserError(
            f"config.yaml: model.checkpoint: {type(model).__name__} is not made of an embedding, layers, a norm and a head, "
            f"so it cannot be cut in stages. Name a decoder such as Llama, Qwen, Gemma, DeepSeek, gpt-oss or MiniMax."
        )
    return Parts(names[model.get_input_embeddings()], names[decoder.layers], names[norm], names[head])


def assign_stages(model: PreTrainedModel, names: Sequence[str]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """By stage the tensors on disk that it needs, each with the parameter in memory it goes into; and those none needs.

    A tied head needs the embedding's tensor. Names are converted by transformers' own mapping.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(model)
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
    """What each stage reads from the checkpoint, for results/weights/STAGE.json, and tensors that no stage loads.

    By stage: `{"digest", "tensors": {name: {"file", "parameter", "dtype", "shape", "sha256"}}}`, or `{"error": message}` if
    a shard of that stage is damaged or a tensor that the index names is not there. The digest covers names, dtypes,
    shapes and contents.

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
    expected: dict[str, str] = read_json(index)["weight_map"] if index.exists() else dict.fromkeys(found, SINGLE)
    model = meta_model(directory, trust_remote_code)
    by_stage, unused = assign_stages(model, sorted({*expected, *found}))
    return {stage: _describe(stage, by_stage.get(stage, {}), found, expected, damaged) for stage in stages}, unused


def _describe(
    stage: str,
    parameters: Mapping[str, str],
    found: Mapping[str, TensorOnDisk],
    expected: Mapping[str, str],
    damaged: Mapping[str, str],
) -> dict[str, Any]:
    tensors = {}
    try:
        for name, parameter in parameters.items():
            if name not in found:
                shard = expected[name]
                raise StageError(
                    damaged.get(shard)
                    or f"{shard}: tensor {name} is missing; the index names it. Copy the shard again."
                )
            tensor = found[name]
            tensors[name] = {
                "file": tensor.file.name,
                "parameter": parameter,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "sha256": hashlib.sha256(tensor.read()).hexdigest(),
            }
    except (StageError, OSError) as error:
        return {"error": f"{stage}: {error}"}
    content = {name: [entry["dtype"], entry["shape"], entry["sha256"]] for name, entry in tensors.items()}
    return {"digest": digest_of(content), "tensors": tensors}


@contextlib.contextmanager
def opened(directory: Path, description: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Lazy slices (safetensors' `get_slice`) of a stage's tensors by their names on disk; nothing is read yet.

    Raises:
        StageError: if the stage's description holds an error, or a shard cannot be opened.
    """
    from safetensors import SafetensorError, safe_open

    if "error" in description:
        raise StageError(description["error"])
    files: dict[str, list[str]] = {}
    for name, entry in description["tensors"].items():
        files.setdefault(entry["file"], []).append(name)
    with contextlib.ExitStack() as stack:
        slices = {}
        for file, names in files.items():
            try:
                handle = stack.enter_context(safe_open(directory / file, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise StageError(f"{directory / file}: cannot be opened ({error}). Copy the shard again.") from None
            slices |= {name: handle.get_slice(name) for name in names}
        yield slices


def read_tensors(directory: Path, description: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """A stage's tensors as they are on disk: names, dtypes and shapes of the release.

    Raises:
        StageError: as `opened` does.
    """
    with opened(directory, description) as slices:
        return {name: slice_[...] for name, slice_ in slices.items()}


def load_stage(
    model: PreTrainedModel,
    stage: str,
    directory: Path,
    description: Mapping[str, Any],
    device: torch.device,
) -> None:
    """Fills the weights of one stage into a `meta_model`, converted as transformers does, cast to its dtype; in place.

    Buffers that are computed and not loaded (rotary frequencies, embedding scale) are made for the whole model.

    Raises:
        StageError: if a tensor is missing, has the wrong shape or cannot be converted.
    """
    import torch
    from transformers import initialization
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import convert_and_load_state_dict_in_model
    from transformers.modeling_utils import LoadStateDictConfig

    logging.getLogger("transformers").setLevel(logging.ERROR)
    parts = parts_of(model)
    tied = stage == LM_HEAD and model.config.get_text_config().tie_word_embeddings
    with opened(directory, description) as slices:
        loading, _ = convert_and_load_state_dict_in_model(
            model,
            slices,
            LoadStateDictConfig(
                dtype=model.dtype,
                device_map={"": device},
                weight_mapping=cast("Any", get_model_conversion_mapping(model)),
            ),
        )
    if tied:
        model.get_submodule(parts.lm_head).weight = model.get_input_embeddings().weight
    missing = [] if tied else sorted(name for name in loading.missing_keys if parts.stage_of(name) == stage)
    if missing:
        raise StageError(f"{stage}: the checkpoint {directory} lacks {', '.join(missing)}. Copy it again.")
    if loading.mismatched_keys:
        name, found, wanted = sorted(loading.mismatched_keys)[0]
        raise StageError(f"{stage}: {name} has shape {list(found)} where config.json asks for {list(wanted)}.")
    if loading.conversion_errors:
        name, message = sorted(loading.conversion_errors.items())[0]
        raise StageError(f"{stage}: {name} cannot be converted ({str(message).strip().splitlines()[0]}).")
    with torch.no_grad(), initialization.guard_torch_init_functions():
        _make_computed_buffers(model, device)


def _make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint holds, by the model's own `_init_weights` as `from_pretrained` does."""
    import torch

    owners = []
    for name, buffer in list(model.named_non_persistent_buffers()):
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        owner.register_buffer(leaf, torch.empty_like(buffer, device=device), persistent=False)
        owners.append(owner)
    for owner in dict.fromkeys(owners):
        for parameter in owner.parameters(recurse=False):
            parameter._is_hf_initialized = True  # loaded or meant to stay on meta: not to be drawn at random
        model._init_weights(owner)

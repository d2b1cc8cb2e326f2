"""Models of NxD Inference (`neuronx_distributed_inference`) as ports: their layers, run one at a time.

A modelling module of that library, or one written like it, has a class `NeuronXForCausalLM` that names the others: its
configuration (`get_config_cls`), its model (`_model_cls`), and the conversion of released tensors into the model's
(`convert_hf_to_neuron_state_dict`, then a `preshard_hook` of each module). Layerproof calls all of these as the library
does when it compiles the prefill, so a stage is the same as in the shipped model:

- the whole model is built on the meta device, and only one stage of it gets values;
- tensors are converted as one state dict, in which those of other stages are on the meta device, since a conversion may
  go through all layers and treat them differently;
- the model's own loop over layers runs a layer, so it builds the masks and the other arguments of a layer.

Only this module imports the library's packages. They are Neuron's: see docs/nxdi.md for versions that belong together.
"""

from __future__ import annotations

import contextlib
import copy
import difflib
import gc
import inspect
import logging
import os
import re
import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from layerproof.config import Nxdi
from layerproof.errors import StageError
from layerproof.model import checkpoint
from layerproof.model.stages import EMBED, LM_HEAD, NORM
from layerproof.port import nxdi_taps
from layerproof.port.contract import Stage
from layerproof.taps import check_known, leaving_out

PARTS = {EMBED: "embed_tokens", NORM: "norm", LM_HEAD: "lm_head"}
"""The parts of a model other than its layers."""
LANGUAGE_MODEL = re.compile(r"Neuron\w+ForCausalLM\w*")
OF_THE_RUN: tuple[str, ...] = ("batch_size", "seq_len", "torch_dtype", "tp_degree")
"""Arguments of a NeuronConfig that the run sets."""


def load(module: ModuleType, settings: Nxdi, own_taps: Collection[str] = ()) -> Port:
    """The port that a modelling module defines; `settings` are the config's `port.nxdi`, and `own_taps` the names in
    golden.taps.

    Raises:
        StageError: if the module lacks the class that names the others, or has more than one.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    if not parallel_state.model_parallel_is_initialized():  # the module may have done so when it was imported
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size())
    named = settings.causal_lm
    own = {name: one for name, one in vars(module).items() if getattr(one, "__module__", None) == module.__name__}
    fitting = [name for name in own if LANGUAGE_MODEL.fullmatch(name)] if named is None else [named]
    found = list(dict.fromkeys(vars(module)[name] for name in fitting if isinstance(vars(module).get(name), type)))
    if len(found) != 1:
        names = ", ".join(one.__name__ for one in found) or "none"
        there = ", ".join(name for name, one in own.items() if isinstance(one, type)) or "none"
        raise StageError(
            f"{module.__file__}: expected one class {named or LANGUAGE_MODEL.pattern}, found {names}. Name "
            f"one in port.nxdi.causal_lm; the module defines {there}."
        )
    reserved = [name for name in OF_THE_RUN if name in settings.neuron_config]
    if reserved:
        raise StageError(f"port.nxdi.neuron_config: the run sets {reserved[0]} itself. Remove this key.")
    check_known(settings.taps, "port.nxdi.taps", own_taps)
    return Port(found[0], _config_class(found[0], list(own.values())), settings)


def _config_class(causal_lm: Any, own: list[Any]) -> Any:
    """The configuration class that a `NeuronXForCausalLM` names, or else the only one that its module defines.

    `own` are the objects that the module defines. Code that builds an application with a configuration does not need
    `get_config_cls`, so a class may lack it.

    Raises:
        StageError: if there is none, or more than one.
    """
    from neuronx_distributed_inference.models.config import InferenceConfig

    try:
        return causal_lm.get_config_cls()
    except (NotImplementedError, NameError) as error:
        found = [one for one in own if isinstance(one, type) and issubclass(one, InferenceConfig)]
        if len(set(found)) != 1:
            name = causal_lm.__name__
            raise StageError(
                f"{causal_lm.__module__}: {name}.get_config_cls() returns no configuration class ({error}). Implement it."
            ) from error
        return found[0]


@dataclass(frozen=True)
class Port:
    """Implements the contract of a port with the `NeuronXForCausalLM` class of a modelling module."""

    causal_lm: Any
    config_class: Any
    settings: Nxdi

    def build(self, stage: Stage) -> nn.Module:
        """The stage as a module on the meta device; buffers outside the state dict have their values."""
        model = self._model(stage, self._application(stage))
        if stage.name == EMBED:
            return _Embedding(model)
        if stage.layer is None:
            size = model.config.vocab_size if stage.name == LM_HEAD else model.config.hidden_size
            return _Part(getattr(model, PARTS[stage.name]), size)
        nxdi_taps.check_places(model.layers, self.settings.taps)
        layer = model.layers[stage.layer]
        nxdi_taps.put_in(layer, *stage.shape, self.settings.taps)
        return _Layer(model, layer, [name for name, place in self.settings.taps.items() if place is None])

    def convert(self, stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The stage's released tensors as the library passes them to a rank's module, in the module's dtypes.

        Raises:
            StageError: if the conversion fails.
        """
        from neuronx_distributed.trace.trace import get_sharded_checkpoint

        application = self._application(stage)
        model = self._model(stage, application)
        gc.freeze()  # conversions collect garbage for each layer, which would search everything in memory
        try:
            with _AmongMeta():
                converted = self._converted(application.config, _state_on_disk(stage, weights))
            given = {name: tensor for name, tensor in converted.items() if name.startswith(_prefix(stage))}
            part = _stage_alone(model, stage)
            get_sharded_checkpoint(given, part, torch.distributed.get_rank(), torch.distributed.get_world_size())
        except (AssertionError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise StageError(
                f"{stage.name}: {self.causal_lm.__name__} cannot convert the checkpoint ({self._said(error)})."
            ) from error
        finally:
            gc.unfreeze()
        wanted = part.state_dict()
        self._refuse_codes(stage, given, wanted)
        made = wanted | _rank_tensors(part) | given | _by_other_names(part, given)  # missing buffers keep their value
        own = "layer." if stage.layer is not None else "part."
        return {
            own + name.removeprefix(_prefix(stage)): made[name].to(to.dtype)
            for name, to in wanted.items()
            if not made[name].is_meta
        }

    def _refuse_codes(
        self, stage: Stage, given: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]
    ) -> None:
        """Raises StageError for FP8 or integer values that would become weights without their scales."""
        for name in wanted.keys() & given.keys():
            is_code = given[name].itemsize == 1 or not given[name].is_floating_point()
            if is_code and wanted[name].is_floating_point() and given[name].dtype != wanted[name].dtype:
                raise StageError(
                    f"{stage.name}: {self.causal_lm.__name__} leaves {name} in {given[name].dtype}, but the model has "
                    f"{wanted[name].dtype}. Apply its scales in convert_hf_to_neuron_state_dict."
                )

    def _converted(self, config: Any, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's state dict from the released one, built as an application builds it.

        Does not call an application's `get_state_dict` and `checkpoint_loader_fn`, because ports override them to read
        their own files.
        """
        old, new = self.causal_lm._STATE_DICT_MODEL_PREFIX, self.causal_lm._NEW_STATE_DICT_MODEL_PREFIX
        names = {name: new + name.removeprefix(old) if name.startswith(old) else name for name in state}
        named = {re.sub(r"\.weight_scale$", ".scale", names[name]): tensor for name, tensor in state.items()}
        converted = self.causal_lm.convert_hf_to_neuron_state_dict(named, config)
        if getattr(config, "tie_word_embeddings", False):
            self.causal_lm.update_state_dict_for_tied_weights(converted)
        dtype = config.neuron_config.torch_dtype
        if dtype == torch.float32 or config.neuron_config.cast_type != "config":
            return converted

        def is_cast(name: str, tensor: torch.Tensor) -> bool:
            return tensor.is_floating_point() and tensor.dtype != torch.float8_e4m3fn and not name.endswith("scale")

        return {name: tensor.to(dtype) if is_cast(name, tensor) else tensor for name, tensor in converted.items()}

    def _model(self, stage: Stage, application: Any) -> Any:
        """The application's model, built by `_meta_model`.

        Raises:
            StageError: if it cannot be built for this configuration, for example for this number of ranks.
        """
        try:
            return _meta_model(application)
        except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
            ranks = torch.distributed.get_world_size()
            raise StageError(
                f"{stage.name}: {self.causal_lm.__name__} cannot be built for {ranks} rank{'s' * (ranks > 1)} "
                f"({self._said(error)}). Correct parallel.tp, port.nxdi.config or port.nxdi.neuron_config."
            ) from error

    def _application(self, stage: Stage) -> Any:
        """The library's application for the checkpoint, with the shapes and dtype of this run.

        Raises:
            StageError: if the library rejects the configuration.
        """
        neuron_config = self.config_class.get_neuron_config_cls()
        given = self._neuron_settings(stage, neuron_config)
        attributes = copy.deepcopy(dict(self.settings.config))  # the library modifies its arguments
        try:
            with _Unexpected() as unexpected:
                made = neuron_config(**given)
            config = _configuration(self.config_class, made, stage, attributes)
            application = self.causal_lm(str(stage.checkpoint), config)
        except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise StageError(
                f"{stage.name}: {self.causal_lm.__name__} does not accept the configuration "
                f"({self._said(error)}). Set what is missing in port.nxdi.config or port.nxdi.neuron_config."
            ) from error
        for name in self.settings.neuron_config:
            if any(repr(name) in said for said in unexpected.said):
                near = difflib.get_close_matches(name, vars(made), 1)
                remedy = f"Did you mean {near[0]}?" if near else "Remove this key."
                raise StageError(f"port.nxdi.neuron_config: {neuron_config.__name__} does not know {name}. {remedy}")
        if config.neuron_config.sequence_parallel_enabled:
            raise StageError(
                f"{stage.name}: sequence_parallel_enabled keeps only the last token, but Layerproof compares all "
                "tokens. Set it to false in port.nxdi.neuron_config."
            )
        return application

    def _said(self, error: Exception) -> str:
        """An error with its type, and the last line of the model's own file that it came from, if any."""
        file = inspect.getfile(self.causal_lm)
        own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        where = f" at {Path(file).name}:{own[-1]}" if own else ""
        return f"{type(error).__name__}{where}: {error}"

    def _neuron_settings(self, stage: Stage, neuron_config: type) -> dict[str, Any]:
        from neuronx_distributed_inference.models.config import MoENeuronConfig

        dtype, ranks = str(stage.dtype).removeprefix("torch."), torch.distributed.get_world_size()
        settings = copy.deepcopy(dict(self.settings.neuron_config))  # the library modifies its arguments
        is_on_neuron = os.environ.get("PJRT_DEVICE") == "NEURON" and not self.settings.cpu_mode
        if issubclass(neuron_config, MoENeuronConfig) and not is_on_neuron:  # its kernels run only there
            given = settings.get("blockwise_matmul_config", {})
            settings["blockwise_matmul_config"] = {"use_torch_block_wise": True, **given}
        return settings | dict(zip(OF_THE_RUN, (*stage.shape, dtype, ranks), strict=True))


class _Unexpected(logging.Handler):
    """What a NeuronConfig says inside the block of arguments that it does not know: it only logs them, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "Unexpected keyword arguments" in record.getMessage():
            self.said.append(record.getMessage())

    def __enter__(self) -> _Unexpected:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *raised: object) -> None:
        logging.getLogger().removeHandler(self)


def _configuration(of: Any, neuron_config: Any, stage: Stage, attributes: Mapping[str, Any]) -> Any:
    """An InferenceConfig of this class, built as those who ship the model build it.

    That is by its own `from_pretrained`, which most models written outside the library have and the library's own do
    not, or else from config.json.
    """
    if hasattr(of, "from_pretrained"):
        return of.from_pretrained(str(stage.checkpoint), neuron_config=neuron_config, **attributes)
    return of(neuron_config, load_config=lambda config: _load_config(config, stage), **attributes)


def _load_config(config: Any, stage: Stage) -> None:
    """Sets config.json's values as NxD Inference does, including keys that its transformers never had or dropped."""
    from neuronx_distributed_inference.utils.hf_adapter import load_pretrained_config

    with contextlib.suppress(KeyError, ValueError):  # if it does not know the model
        load_pretrained_config(str(stage.checkpoint))(config)
    for key, value in stage.config.items():
        if not hasattr(config, key):
            setattr(config, key, value)
    by_layer_type = stage.config.get("rope_parameters") or {}
    rope, local = (by_layer_type.get(f"{layer_type}_attention", by_layer_type) for layer_type in ("full", "sliding"))
    if "rope_theta" in local and "rope_local_base_freq" not in stage.config and local is not rope:
        config.rope_local_base_freq = local["rope_theta"]
    if "rope_theta" in rope and "rope_theta" not in stage.config:  # transformers 4 would use its default
        config.rope_theta = rope["rope_theta"]
        config.rope_scaling = None if rope.get("rope_type", "default") == "default" else dict(rope)


def _meta_model(application: Any) -> Any:
    """The model that is compiled for the prefill, with its parameters on the meta device and without a cache."""
    from neuronx_distributed.utils.model_utils import init_on_device

    wrapper = application.context_encoding_model
    wrapper.model_init_kwargs["optimize_inference"] = False
    instance = wrapper.get_model_instance()
    with init_on_device(torch.device("meta"), force_custom_init_on_device=True):
        instance.load_module()
    return instance.module


def _state_on_disk(stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors of the checkpoint by their names on disk; those of other stages are on the meta device."""
    state = {}
    for shard in checkpoint.shards(stage.checkpoint):
        if (stage.checkpoint / shard).exists():
            for name, tensor in checkpoint.read_shard_header(stage.checkpoint / shard).items():
                dtype = getattr(torch, checkpoint.torch_name(tensor.dtype))
                state[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return state | dict(weights)


class _AmongMeta(TorchDispatchMode):
    """Lets a conversion mix tensors on the meta device with real ones, such as zeros that it creates for padding.

    The result of such a mix is on the meta device too. A meta tensor is never written into a real one.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        tensors = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        if any(one.is_meta for one in tensors) and not all(one.is_meta for one in tensors):
            args, kwargs = tree_map_only(torch.Tensor, _to_meta, (args, kwargs))
        return func(*args, **(kwargs or {}))


def _to_meta(tensor: Any) -> torch.Tensor:
    return tensor.to("meta")


def _prefix(stage: Stage) -> str:
    """The prefix of a stage's tensor names in a model's state dict."""
    return f"{PARTS[stage.name]}." if stage.name in PARTS else f"layers.{stage.layer}."


def _stage_alone(model: Any, stage: Stage) -> Any:
    """The model without its other stages: searching all of it for each tensor takes minutes if there are many."""
    alone = copy.copy(model)
    if stage.layer is None:
        name = PARTS[stage.name]
        alone._modules = {name: getattr(model, name)}
    else:
        layers = nn.Module()
        layers.add_module(str(stage.layer), model.layers[stage.layer])
        alone._modules = {"layers": layers}
    return alone


def _rank_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The parameters that store a rank. A conversion may leave them out because its graph does not use them."""
    from neuronx_distributed.parallel_layers.layers import SPMDRank

    rank = torch.tensor([torch.distributed.get_rank()], dtype=torch.int32)
    return {f"{name}.rank": rank for name, module in model.named_modules() if isinstance(module, SPMDRank)}


def _by_other_names(model: Any, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The converted tensors of modules that several others contain, under all the names that these use.

    Examples are a norm that is fused into the experts' kernel, and the router and experts of a module for decoding
    only.
    """
    held = model.state_dict(keep_vars=True)
    given_as = {id(held[name]): name for name in held.keys() & given.keys()}
    return {name: given[given_as[id(tensor)]] for name, tensor in held.items() if id(tensor) in given_as}


class _Part(nn.Module):
    """The norm after the last layer, or the head without the logits of a padded vocabulary's padding."""

    def __init__(self, part: nn.Module, size: int) -> None:
        super().__init__()
        self.part, self.size = part, size

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return self.part(x)[..., : self.size]


def _run_by_itself(model: Any, layers: list[nn.Module]) -> Any:
    """The model with these layers only, and without the norm after them."""
    alone = copy.copy(model)
    alone._modules = {**model._modules, "layers": nn.ModuleList(layers), "norm": nn.Identity()}
    return alone


class _Embedding(nn.Module):
    """Token ids [batch, seq] to hidden states as they enter the model's first layer: some models scale them."""

    model: Any

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.part = model.embed_tokens
        self.__dict__["model"] = _run_by_itself(model, [])  # not a submodule: its state dict is the table's

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        position_ids = positions[None].expand(valid.shape)
        return self.model.get_model_output(input_ids=ids, position_ids=position_ids, is_for_context_encoding=True)[0]


class _Layer(nn.Module):
    """One decoder layer, run by its model as if it were the only one, without the taps in `left_out`."""

    model: Any

    def __init__(self, model: Any, layer: nn.Module, left_out: list[str]) -> None:
        super().__init__()
        self.layer, self.left_out = layer, left_out
        self.__dict__["model"] = _run_by_itself(model, [layer])  # not a submodule: its state dict is the layer's

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        model = self.model
        kept = valid.int()
        position_ids = positions[None].expand(valid.shape)
        local = None
        if model.attention_chunk_size:
            local = model._create_chunked_attn_mask_cte(kept, model.attention_chunk_size)
        elif model.sliding_window:
            local = model._create_windowed_attn_mask_cte(kept, model.sliding_window)
        with leaving_out(self.left_out):
            hidden, _ = model.get_model_output(
                input_ids=kept.long(),
                inputs_embeds=x,
                seq_ids=torch.arange(len(x), device=x.device),
                attention_mask=model.create_attn_mask(kept, True, False, position_ids=position_ids),
                local_attn_mask=local,
                position_ids=position_ids,
                padding_mask=model.create_padding_mask(position_ids),
                is_for_context_encoding=True,
            )
        return hidden

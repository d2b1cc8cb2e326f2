"""The full golden model in one process, spread over devices by accelerate, instead of one stage at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from accelerate.utils import check_device_map
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerproof.config import Config
from layerproof.errors import UserError, first_line
from layerproof.golden.layer_taps import first_of
from layerproof.golden.transformers_stage import stage_module
from layerproof.model import loading
from layerproof.model.parts import Call, hooked, parts_of
from layerproof.model.stages import EMBED, LM_HEAD, NORM, all_stages
from layerproof.model.tokens import Tokens


@dataclass(frozen=True)
class FullModel:
    """The full model, and the output of every stage [batch, seq, ...] on the host from one forward of it."""

    model: PreTrainedModel
    outputs: Mapping[str, torch.Tensor]

    @classmethod
    def start(cls, directory: Path, tokens: Tokens, settings: Config) -> FullModel:
        """Loads the model, spread over devices as the config's `golden` says, and runs it once.

        Raises:
            UserError: if transformers or accelerate cannot do so.
        """
        model = _load(directory, settings)
        ids, valid = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.valid)
        return cls(model, _outputs(model, ids, valid))

    def change(self, stage: str, output: torch.Tensor) -> float:
        """Relative L2 between a stage's output when it runs alone and its output in the full model."""
        wanted = self.outputs[stage].double()
        difference = (output.cpu().double() - wanted).norm()
        return float(difference / wanted.norm().clamp_min(1e-300))


def _load(directory: Path, settings: Config) -> PreTrainedModel:
    golden, trust = settings.golden, settings.model.trust_remote_code
    options = golden.implementations | ({"offload_folder": golden.offload_folder} if golden.offload_folder else {})
    limits = golden.max_memory
    quantization = loading.dequantizing(directory, trust)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, golden.dtype),
            trust_remote_code=trust,
            device_map=golden.device_map,
            max_memory=limits and {int(name) if name.isdigit() else name: size for name, size in limits.items()},
            quantization_config=quantization,
            **options,
        )
        if isinstance(golden.device_map, Mapping):  # transformers checks this only with several devices
            check_device_map(model, dict(golden.device_map))
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        raise UserError(
            f"config.yaml: golden.device_map: {golden.device_map}: "
            f"transformers cannot load the full model this way ({first_line(error)}). "
            "Correct device_map, max_memory or offload_folder, or write golden.mode: streamed."
        ) from error
    _keep_dtypes(model)
    return model.eval()


def _keep_dtypes(model: PreTrainedModel) -> None:
    """Makes offloaded parameters come back in the dtype in which transformers stored them.

    accelerate casts each to the dtype of its placeholder. That is the model's dtype, even where transformers keeps the
    checkpoint's own, as for modules that FP8 leaves out.
    """
    for prefix, module in model.named_modules():
        weights = getattr(getattr(module, "_hf_hook", None), "weights_map", None)
        dataset = getattr(weights, "dataset", None)
        if dataset is None:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            key = f"{prefix}.{name}"
            laid_down = dataset.index.get(key, {})
            if key in dataset.state_dict:
                dtype = dataset.state_dict[key].dtype
            elif laid_down.get("weight_name") == key:  # otherwise it is still in its original file, and must be cast
                dtype = getattr(torch, laid_down["dtype"])
            else:
                continue
            if parameter.is_meta and parameter.dtype != dtype:
                kept = torch.empty_like(parameter, dtype=dtype)
                setattr(module, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))


def device_of(model: PreTrainedModel, stage: str) -> torch.device:
    """The device of a stage: that of its weights or, if they are offloaded, the one to which accelerate moves them."""
    for module in stage_module(model, stage).modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next((parameter.device for parameter in stage_module(model, stage).parameters()), model.device)


def _outputs(model: PreTrainedModel, ids: torch.Tensor, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of every stage in one forward."""
    outputs: dict[str, torch.Tensor] = {}
    parts = parts_of(model)
    _check_one_output(model)
    layers = cast("nn.ModuleList", model.get_submodule(parts.layers))
    stages = all_stages(len(layers))

    def keep(stage: str, hidden: torch.Tensor) -> None:
        outputs[stage] = hidden.movedim(parts.hidden, (0, 1)).cpu()

    def before(index: int) -> Callable:
        """Keeps the output of the stage before a layer, which is what the layer is called with."""
        return lambda module, args, kwargs: keep(stages[index], Call.of(module, args, kwargs).hidden)

    with contextlib.ExitStack() as stack, torch.no_grad():
        for index, layer in enumerate(layers):
            stack.enter_context(hooked(layer.register_forward_pre_hook(before(index), with_kwargs=True)))
        last = layers[-1].register_forward_hook(lambda module, args, output: keep(stages[-3], first_of(output)))
        stack.enter_context(hooked(last))
        head = model.get_submodule(parts.lm_head)
        kept = head.register_forward_pre_hook(lambda module, args: outputs.update({NORM: args[0].cpu()}))
        stack.enter_context(hooked(kept))
        device = device_of(model, EMBED)
        result = model(input_ids=ids.to(device), attention_mask=valid.to(device).long(), use_cache=False)
    return outputs | {LM_HEAD: result.logits.cpu()}


def _check_one_output(model: PreTrainedModel) -> None:
    """Checks that a model's stages hand over one tensor each.

    Raises:
        UserError: if they do not.
    """
    if parts_of(model).inputs:
        raise UserError(
            f"config.yaml: golden.mode: whole cannot keep what the layers of {type(model).__name__} hand to each other "
            "besides their hidden states. Write golden.mode: streamed."
        )

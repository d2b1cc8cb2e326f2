"""The whole golden model in one process, spread over devices by accelerate, in place of one stage at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import check_device_map
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from layerproof.errors import UserError, first_line
from layerproof.golden.transformers_stage import first_of, hooked, stage_module
from layerproof.model import loading
from layerproof.model.stages import EMBED, LM_HEAD, all_stages, layer_of
from layerproof.model.tokens import Tokens


@dataclass(frozen=True)
class Whole:
    """The model, and the output of every stage [batch, seq, ...] on the host from one forward of it."""

    model: PreTrainedModel
    outputs: Mapping[str, torch.Tensor]

    @classmethod
    def start(cls, directory: Path, tokens: Tokens, settings: Mapping[str, Any]) -> Whole:
        """Loads the model as `settings`, the config's `golden`, have it spread over devices, and runs it once.

        Raises:
            UserError: if transformers or accelerate cannot do so.
        """
        model = _load(directory, settings)
        ids, valid = torch.from_numpy(tokens.ids), torch.from_numpy(tokens.valid)
        return cls(model, _outputs(model, ids, valid))

    def change(self, stage: str, output: torch.Tensor) -> float:
        """Relative L2 between a stage's output, run alone, and the one that it had in the forward of all."""
        wanted = self.outputs[stage].double()
        difference = (output.cpu().double() - wanted).norm()
        return float(difference / wanted.norm().clamp_min(1e-300))


def _load(directory: Path, settings: Mapping[str, Any]) -> PreTrainedModel:
    names = ("attn_implementation", "experts_implementation", "offload_folder")
    options = {name: settings[name] for name in names if settings.get(name)}
    limits = settings.get("max_memory")
    quantization = loading.dequantizing(directory, settings["trust_remote_code"])
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=getattr(torch, settings["dtype"]),
            trust_remote_code=settings["trust_remote_code"],
            device_map=settings["device_map"],
            max_memory=limits and {int(name) if name.isdigit() else name: size for name, size in limits.items()},
            quantization_config=quantization,
            **options,
        )
        if isinstance(settings["device_map"], Mapping):  # transformers does so only where there are several devices
            check_device_map(model, dict(settings["device_map"]))
    except (ValueError, RuntimeError, AssertionError, OSError) as error:
        raise UserError(
            f"config.yaml: golden.device_map: {settings['device_map']}: "
            f"the whole model cannot be loaded so ({first_line(error)}). "
            "Correct device_map, max_memory or offload_folder, or write golden.mode: streamed."
        ) from error
    _keep_dtypes(model)
    return model.eval()


def _keep_dtypes(model: PreTrainedModel) -> None:
    """Has offloaded parameters come back in the dtype in which transformers laid them down.

    accelerate casts each to that of the parameter that stands for it, which has the model's dtype also where a checkpoint's
    own is kept, as of modules that FP8 leaves out.
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
            elif laid_down.get("weight_name") == key:  # else it is still where it was, and has to be cast
                dtype = getattr(torch, laid_down["dtype"])
            else:
                continue
            if parameter.is_meta and parameter.dtype != dtype:
                kept = torch.empty_like(parameter, dtype=dtype)
                setattr(module, name, nn.Parameter(kept, requires_grad=parameter.requires_grad))


def device_of(model: PreTrainedModel, stage: str) -> torch.device:
    """Where a stage runs: where its weights are or, if they are offloaded, where accelerate brings them."""
    for module in stage_module(model, stage).modules():
        device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if device is not None:
            return torch.device(device)
    return next(parameter.device for parameter in stage_module(model, stage).parameters())


def _outputs(model: PreTrainedModel, ids: torch.Tensor, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    """The output of every stage in one forward."""
    outputs: dict[str, torch.Tensor] = {}

    def keep(stage: str, output: Any) -> None:
        outputs[stage] = first_of(output).cpu()

    layers = cast("nn.ModuleList", model.get_submodule(loading.parts_of(model).layers))
    with contextlib.ExitStack() as stack, torch.no_grad():
        # What goes into the first layer is the embedding's output with all that the model does to it.
        before = layers[0].register_forward_pre_hook(lambda module, args: keep(EMBED, args[0]))
        stack.enter_context(hooked(before))
        for stage in all_stages(len(layers)):
            if layer_of(stage) is not None or stage == "norm":
                module = stage_module(model, stage)
                handle = module.register_forward_hook(lambda module, args, output, stage=stage: keep(stage, output))
                stack.enter_context(hooked(handle))
        device = device_of(model, EMBED)
        result = model(input_ids=ids.to(device), attention_mask=valid.to(device).long(), use_cache=False)
    return outputs | {LM_HEAD: result.logits.cpu()}

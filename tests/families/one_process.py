"""Runs the stages of a model by the product's own code in one process, with unmodified transformers as the port."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from configs import config_with
from layerproof.compare.stage import compare_stage
from layerproof.config import Config
from layerproof.diagnose.diagnose import FailedStage, Files, diagnose
from layerproof.golden import stage as golden_stage
from layerproof.golden.layer_taps import modules_without_tap
from layerproof.golden.transformers_stage import run_stage, stage_module
from layerproof.measure.rule import LIMIT
from layerproof.model import checkpoint, handed, loading, tokens
from layerproof.model.stages import all_stages, layer_of, previous_stage
from layerproof.port import stage as port_stage
from layerproof.port.contract import Patch
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5

LENGTHS = (23, 11, 30)
"""Tokens of the prompts; the shorter ones are padded."""


def drawn_prompts(seed: int) -> tokens.Tokens:
    words = np.random.default_rng(seed)
    return tokens.pad([words.integers(3, 90, length).tolist() for length in LENGTHS], 0)


@dataclass(frozen=True)
class Run:
    """A checkpoint, its prompts and its settings; the files of a part and stage lie in `directory`, where `file` says."""

    directory: Path
    checkpoint: Path
    prompts: tokens.Tokens
    settings: Config
    descriptions: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, directory: Path, prompts: tokens.Tokens, **settings: Any) -> Run:
        made = directory / "checkpoint"
        given = {"golden": {"device": "cpu"}, "port": {"backend": "transformers"}} | settings
        stages = all_stages(checkpoint.num_layers(checkpoint.read_config(made)))
        return cls(directory, made, prompts, config_with(**given), loading.describe_stages(made, stages, False)[0])

    @property
    def model_type(self) -> str:
        return checkpoint.read_config(self.checkpoint)["model_type"]

    @property
    def stages(self) -> list[str]:
        return list(self.descriptions)

    @property
    def layers(self) -> list[str]:
        return [stage for stage in self.stages if layer_of(stage) is not None]

    def file(self, part: str, stage: str) -> Path:
        path = self.directory / part / f"{stage}.h5"
        path.parent.mkdir(exist_ok=True)
        return path

    def previous(self, stage: str, part: str = "golden") -> Path | None:
        before = previous_stage(stage, len(self.stages) - 3)
        return self.file(part, before) if before else None

    def golden(self, stage: str) -> None:
        before = self.previous(stage), self.previous(stage, "noise")
        files = self.file("golden", stage), self.file("noise", stage)
        golden_stage.make_stage(
            stage, self.checkpoint, self.descriptions[stage], self.prompts, *before, *files, self.settings
        )

    def runner(self, patch: Patch | None) -> Runner:
        started = Runner.start(self.checkpoint, self.prompts, self.settings)
        return replace(started, patch=patch) if patch else started

    def port(self, stage: str, patch: Patch | None = None) -> dict[str, Any]:
        """The comparison of the port of the settings, or of the model as `patch` changes it."""
        runner = self.runner(patch)
        fed = handed.stage_input(self.previous(stage), stage)
        port_stage.make_stage(runner, stage, self.descriptions[stage], fed, self.file("port", stage))
        golden, noise, port = (self.file(part, stage) for part in ("golden", "noise", "port"))
        return compare_stage(stage, golden, noise, port, self.prompts.valid, LIMIT)

    def diagnosis(self, stage: str, comparison: dict[str, Any], patch: Patch) -> dict[str, Any]:
        """The diagnosis of a stage that fails with this patch."""
        runner = self.runner(patch)
        files = Files(
            golden=self.file("golden", stage),
            noise=self.file("noise", stage),
            port=self.file("port", stage),
            forced=self.file("forced", stage),
        )
        before = self.previous(stage)
        wanted = hdf5.read_group(files.golden, "golden")
        fed = handed.stage_input(before, stage)
        port_stage.teacher_force_stage(runner, stage, self.descriptions[stage], fed, wanted, files.forced)
        subject = FailedStage(stage, self.checkpoint, self.descriptions, self.prompts, before, self.settings, LIMIT)
        return diagnose(subject, comparison, files)

    def is_the_model(self, whole: Any) -> bool:
        """Whether the golden's logits are, bit for bit, those of this model, which transformers loaded as a whole."""
        ids, valid = torch.from_numpy(self.prompts.ids), torch.from_numpy(self.prompts.valid)
        with torch.no_grad():
            logits = whole(input_ids=ids, attention_mask=valid.long(), use_cache=False).logits
        streamed = hdf5.to_torch(hdf5.read(self.file("golden", self.stages[-1]), "golden/out"))
        return torch.equal(streamed[valid], logits[valid])

    def exact(self, stage: str) -> Exact:
        """Transformers' own stage in fp32, with the golden's input."""
        description, device = self.descriptions[stage], torch.device("cpu")
        model = golden_stage.load(stage, self.checkpoint, description, device, torch.float32, self.settings)
        return Exact(self, stage, model)

    def modules(self, stage: str) -> dict[str, bool]:
        """The modules of a stage that have weights of their own: whether a tap holds what they return."""
        exact = self.exact(stage)
        returned: dict[str, torch.Tensor] = {}
        for name, module in exact.part.named_modules():
            if any(one is not None for one in module._parameters.values()):
                module.register_forward_hook(partial(_keep, returned, name))
        taps = list(exact.taps().values())
        did_not_run = {name: False for name in modules_without_tap(exact.part) if name not in returned}
        return did_not_run | {name: any(_is_same(tensor, tap) for tap in taps) for name, tensor in returned.items()}


@dataclass(frozen=True)
class Exact:
    """A stage in fp32, and its module."""

    run: Run
    stage: str
    model: Any

    @property
    def part(self) -> nn.Module:
        return stage_module(self.model, self.stage)

    def taps(self) -> dict[str, torch.Tensor]:
        fed = handed.stage_input(self.run.previous(self.stage), self.stage)
        x = hdf5.to_torch(fed.out).float() if fed else None
        given = {name: hdf5.to_torch(tensor) for name, tensor in fed.handed.items()} if fed else {}
        ids, valid = torch.from_numpy(self.run.prompts.ids), torch.from_numpy(self.run.prompts.valid)
        return run_stage(self.model, self.stage, x, ids, valid, handed=given)


def _keep(returned: dict[str, torch.Tensor], name: str, module: nn.Module, given: Any, output: Any) -> None:
    first = output[0] if isinstance(output, tuple | list) else output
    if isinstance(first, torch.Tensor):
        returned[name] = first


def _is_same(tensor: torch.Tensor, tap: torch.Tensor) -> bool:
    """Whether a tap holds a tensor, also if that has its channels before its positions, as a convolution has."""
    layouts = [tensor, tensor.transpose(1, -1)] if tensor.ndim > 2 else [tensor]
    return tensor.numel() == tap.numel() and any(torch.equal(one.flatten(), tap.flatten()) for one in layouts)

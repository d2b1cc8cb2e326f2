"""Runs one stage of a port against its golden in this process, with a mistake or without, and asks every rule."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import models
from configs import REPOSITORY, config_with
from layerproof import config
from layerproof.compare.stage import compare_stage
from layerproof.config import Config
from layerproof.diagnose.diagnose import FailedStage, Files, Sibling, diagnose
from layerproof.files import read_json, write_json
from layerproof.golden import stage as golden_stage
from layerproof.measure.rule import LIMIT
from layerproof.model import checkpoint, handed, loading, tiny, tokens
from layerproof.model.stages import all_stages, previous_stage
from layerproof.paths import TINY_CHECKPOINT
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5

PROMPTS = REPOSITORY / "workflow/resources/prompts.txt"
TINY = "tiny"
"""The trained model of the default run; the others are the random ones of tests/models.py."""

SETTINGS = config_with(golden={"device": "cpu"})


@dataclass(frozen=True)
class Model:
    """A checkpoint with its golden run: `directory` is laid out as results/ is."""

    name: str
    seed: int
    directory: Path
    prompts: tokens.Tokens

    @property
    def checkpoint(self) -> Path:
        return self.directory / "checkpoint"

    @property
    def stages(self) -> list[str]:
        return all_stages(checkpoint.num_layers(checkpoint.read_config(self.checkpoint)))

    def description(self, stage: str) -> dict[str, Any]:
        return read_json(self.directory / f"weights/{stage}.json")

    def previous(self, stage: str, folder: str = "golden") -> Path | None:
        before = previous_stage(stage, len(self.stages) - 3)
        return self.directory / folder / f"{before}.h5" if before else None


def make_model(
    name: str, seed: int, directory: Path, lengths: Sequence[int] | None = None, attention: str | None = None
) -> Model:
    """Makes a checkpoint, or copies the one that ships, and runs its golden, on random prompts of these lengths or on the
    default run's.
    """
    made = directory / "checkpoint"
    if not made.exists():
        directory.mkdir(parents=True, exist_ok=True)
        if name == TINY and seed == 0:
            shutil.copytree(REPOSITORY / TINY_CHECKPOINT, made)
        elif name == TINY:
            tiny.make(made, seed)
        else:
            models.save(name, made, seed)
    prompts = tokens.pad(_random_ids(made, seed, lengths), 0) if lengths else _read(directory, made)
    return with_golden(Model(name, seed, directory, prompts), attention)


def with_golden(model: Model, attention: str | None = None) -> Model:
    """The model, after its golden has run."""
    descriptions, _ = loading.describe_stages(model.checkpoint, model.stages, False)
    for stage in model.stages:
        write_json(model.directory / f"weights/{stage}.json", descriptions[stage])
    for stage in model.stages:
        output, noise = (model.directory / part / f"{stage}.h5" for part in ("golden", "noise"))
        for path in (output, noise):
            path.parent.mkdir(exist_ok=True)
        settings = config.changed(SETTINGS, golden=config.changed(SETTINGS.golden, attn_implementation=attention))
        before = [model.previous(stage, folder) for folder in ("golden", "noise")]
        golden_stage.make_stage(
            stage, model.checkpoint, descriptions[stage], model.prompts, *before, output, noise, settings
        )
    return model


def _read(directory: Path, made: Path) -> tokens.Tokens:
    path = directory / "tokens.json"
    tokens.make(path, made, checkpoint.read_config(made), PROMPTS, None, 512, False)
    return tokens.Tokens.read(path)


def _random_ids(made: Path, seed: int, lengths: Sequence[int]) -> list[list[int]]:
    words = checkpoint.read_config(made)["vocab_size"]
    generator = np.random.default_rng(seed)
    return [generator.integers(3, words, length).tolist() for length in lengths]


@dataclass(frozen=True)
class Outcome:
    """What each rule says of one run: the rules' names with True for "this port is wrong", and the diagnosis.

    `comparison` and `diagnosis` are what the jobs write; the diagnosis is None if there was none.

    `effect` is the largest R of a tap in units of its band: how many times the noise the mistake is. None if a tap of floats
    fails without an R.
    """

    verdicts: dict[str, bool]
    failed: list[str]
    culprits: list[dict[str, Any]]
    together: dict[str, Any] | None
    effect: float | None
    comparison: dict[str, Any]
    diagnosis: dict[str, Any] | None


def port_settings(path: Path | None, dtype: str = "bfloat16") -> Config:
    """The config for a port in this file, or for unmodified transformers without one."""
    module = None if path is None else str(path)
    return config_with(port={"backend": "xla" if module else "transformers", "module": module, "dtype": dtype})


def run(
    model: Model,
    stage: str,
    source: str | None,
    directory: Path,
    dtype: str = "bfloat16",
    diagnosed: bool = True,
    also_loads: Sequence[str] = (),
    sibling: str | None = None,
) -> Outcome:
    """Runs a stage of the port with this source, or of unmodified transformers without one, and judges it."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "port.py"
    if source is not None:
        path.write_text(source)
    settings = port_settings(None if source is None else path, dtype)
    runner = Runner.start(model.checkpoint, model.prompts, settings)
    before = model.previous(stage)
    fed = handed.stage_input(before, stage)
    description = model.description(stage)
    for other in also_loads:
        description["tensors"] = model.description(other)["tensors"] | description["tensors"]
    files = Files(
        golden=model.directory / f"golden/{stage}.h5",
        noise=model.directory / f"noise/{stage}.h5",
        port=directory / "port.h5",
        forced=directory / "forced.h5",
    )
    port_stage.make_stage(runner, stage, description, fed, files.port)
    comparison = compare_stage(stage, files.golden, files.noise, files.port, model.prompts.valid, LIMIT)
    failed = [name for name, tap in comparison["taps"].items() if tap["status"] == "fail"]
    diagnosis = None
    if comparison["status"] == "fail" and diagnosed:
        wanted = hdf5.read_group(files.golden, "golden")
        port_stage.teacher_force_stage(runner, stage, description, fed, wanted, files.forced)
        descriptions = {name: model.description(name) for name in model.stages}
        subject = FailedStage(stage, model.checkpoint, descriptions, model.prompts, before, SETTINGS, LIMIT)
        other = sibling and Sibling(
            replace(subject, name=sibling, previous=model.previous(sibling)),
            *(model.directory / f"{folder}/{sibling}.h5" for folder in ("golden", "noise")),
        )
        diagnosis = diagnose(subject, comparison, files, other or None)
    out = comparison["taps"]["out"]
    effect = max(map(effect_of, comparison["taps"].values()))
    return Outcome(
        verdicts={"layerproof": comparison["status"] != "pass", **_other_rules(out)},
        failed=failed,
        culprits=diagnosis["culprits"] if diagnosis else [],
        together=diagnosis["together"] if diagnosis else None,
        effect=None if np.isinf(effect) else effect,
        comparison=comparison,
        diagnosis=diagnosis,
    )


def effect_of(tap: dict[str, Any]) -> float:
    """R of a tap, or of its worst group, in units of the band; infinite if it fails without an R."""
    if tap.get("weighted_R") is None or not tap["band"]:
        return float("inf") if tap["status"] == "fail" and tap.get("kind") != "exact" else 0.0
    band = tap["band"]
    groups = {"token": "worst_token", "block": "worst_block", "head": "worst_head", "expert": "worst_expert"}
    worst = [tap[key]["R"] / band[kind] for kind, key in groups.items() if kind in band and tap.get(key)]
    return max([tap["weighted_R"] / band["weighted"], *worst])


def _other_rules(out: dict[str, Any]) -> dict[str, bool]:
    """The rules that others use, on the stage's output: whether each calls the port wrong. Undefined is wrong."""
    fixed = out.get("fixed") or {}
    R, rel_l2 = out.get("R"), out.get("rel_l2")
    broken = out["status"] == "fail" and not out.get("count")
    nonfinite = out.get("nonfinite", {}).get("port", {"nan": 0, "inf": 0})
    broken = broken or bool(nonfinite["nan"] or nonfinite["inf"])  # which is in whatever they compute over all elements
    return {
        "fixed": broken or not all(fixed.values()) or not fixed,
        "cosine_pearson": broken or not (fixed.get("cosine") and fixed.get("pearson")),
        "R": broken or R is None or R > 1.2,
        "rel_l2": broken or rel_l2 is None or rel_l2 >= 0.05,
    }

"""Puts a drawn mistake into one stage of an unmodified model, and asks whether Layerproof finds its stage and its tap."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from bugs.harness import effect_of
from families.one_process import Run
from layerproof.port.contract import Stage
from mistakes import Mistake, NoMistakeFits, draw

SHOWS_FROM = 2.0
"""Another mistake is drawn if the effect of one is less than this many times the limit at every tap."""
DRAWS = 20
LAYERS = 0.8
"""How often the stage is drawn from the layers alone."""
DIFFERS_FROM = 1e-4
"""Relative L2, in fp32, from which a tap is another one: far above rounding."""


def of_one(run: Run, seed: int) -> dict[str, Any]:
    """The first mistake drawn whose effect shows: what it is, at which tap it first shows in fp32, and what is found.

    `drawn` counts the mistakes up to it.
    """
    random = np.random.default_rng([seed, *run.model_type.encode()])
    for drawn in range(1, DRAWS + 1):
        stages = run.layers if random.random() < LAYERS else run.stages
        stage = str(random.choice(stages))
        put = _Drawn(random)
        try:
            comparison = run.port(stage, put)
        except NoMistakeFits:
            continue
        shows = max(map(effect_of, comparison["taps"].values()))
        if shows >= SHOWS_FROM:
            mistake = put.mistake
            assert mistake is not None
            found = {"stage": None, "tap": None, "cause": None}
            if comparison["status"] == "fail":
                first = run.diagnosis(stage, comparison, put)["culprits"][0]
                found = {"stage": stage, "tap": first["tap"], "cause": (first["cause"] or {}).get("text")}
            expected = {"stage": stage, "tap": _first_tap(run, stage, mistake)}
            told = {"kind": mistake.kind, "text": mistake.text, "effect": shows if np.isfinite(shows) else None}
            return told | {"expected": expected, "found": found, "drawn": drawn}
    raise RuntimeError(f"none of {DRAWS} drawn mistakes shows")


class _Drawn:
    """A patch that draws its mistake when it first sees the stage's module, and makes the same one from then on."""

    def __init__(self, random: np.random.Generator) -> None:
        self.random = random
        self.mistake: Mistake | None = None

    def __call__(self, model: nn.Module, part: nn.Module, stage: Stage) -> None:
        self.mistake = self.mistake or draw(part, self.random)
        self.mistake.put(part)


def _first_tap(run: Run, stage: str, mistake: Mistake) -> str | None:
    """The first tap that is another one with the mistake, when transformers runs the stage in fp32."""
    exact = run.exact(stage)

    def taps() -> Mapping[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in exact.taps().items()}

    before = taps()
    mistake.put(exact.part)
    after = taps()
    return next((name for name in before if name in after and _differs(before[name], after[name])), None)


def _differs(before: torch.Tensor, after: torch.Tensor) -> bool:
    if before.shape != after.shape:
        return True
    if not before.is_floating_point():
        return not torch.equal(before, after)
    both = torch.isfinite(before) & torch.isfinite(after)
    change = (after - before)[both].double().norm() / before[both].double().norm().clamp_min(1e-30)
    return bool(change > DIFFERS_FROM)

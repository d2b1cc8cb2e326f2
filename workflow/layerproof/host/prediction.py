"""Predicts what a run will need: memory of each job, disk space for each stage's files, and machines that have enough.

Weights are counted from the checkpoint's headers, and activations by running each kind of stage on torch's meta device,
which computes nothing, under torch's own memory tracker. The prediction assumes that a port stores its weights as the
golden does, in `port.dtype`, and needs no more activations than eager transformers. The memory that its compiler needs
is unknown before it runs.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import PreTrainedModel

from layerproof.config import Config
from layerproof.golden import stage as golden_stage
from layerproof.golden.transformers_stage import check_submodules, run_stage
from layerproof.golden.variants import VARIANTS, Stepwise
from layerproof.model import checkpoint, loading
from layerproof.model.experts import ONE_EXPERT, STATIC_EXPERTS, register
from layerproof.model.stages import EMBED, LM_HEAD, layer_of
from layerproof.model.tokens import Tokens
from layerproof.taps import OUT, is_optional

SCHEMA_VERSION = 1
GIB = 1 << 30


@dataclass(frozen=True)
class Machine:
    """A type of machine: its number of devices, and the memory of each in bytes."""

    name: str
    devices: int
    memory: int


GPUS = (
    Machine("1 x A100 40 GB", 1, 40 * GIB),
    Machine("1 x H100 80 GB", 1, 80 * GIB),
    Machine("8 x A100 80 GB", 8, 80 * GIB),
    Machine("8 x H200 141 GB", 8, 141 * 10**9),
)
NEURON = (
    Machine("trn1.32xlarge, 32 NeuronCores of 16 GiB", 32, 16 * GIB),
    Machine("trn2.48xlarge, 64 logical NeuronCores of 24 GiB", 64, 24 * GIB),
)
"""Neuron's cores according to its documentation; on trn2, a logical core is two physical cores (LNC 2)."""


def predict(
    directory: Path,
    descriptions: Mapping[str, Mapping[str, Any]],
    tokens: Tokens,
    settings: Config,
    compared: Collection[str],
    before: Collection[str],
    chains: Mapping[str, int],
) -> dict[str, Any]:
    """Predicts bytes by stage and for the run, without the memory that a process needs for its imports.

    `settings` contain dtypes and the port's backend. `compared` names the stages that are compared, and `before` those
    of which only the golden runs. `chains` maps a stage to the number of chains that run it. Each stage has `weights`
    by side, the peak of its `golden` and its `port` job, `files`, its tensors in results/, and `kept`, the part of them
    that stays with `compare.taps: auto` if the stage passes. The run has the largest job of each side, the model's
    `weights` by side, the full golden in one process (`whole`), all `files`, `kept` if all stages pass, `forced`, which
    is needed in addition if all fail, and `machines`, with whether their memory suffices.

    Raises:
        UserError: as `loading.meta_model` and `transformers_stage.check_submodules` do.
    """
    register()
    dtype, port_dtype = (getattr(torch, side.dtype) for side in (settings.golden, settings.port))
    trust = settings.model.trust_remote_code

    def model(dtype: torch.dtype, experts: str) -> PreTrainedModel:
        return loading.meta_model(directory, trust, dtype, attn_implementation="eager", experts_implementation=experts)

    trusted, exact = model(dtype, ONE_EXPERT), model(torch.float32, ONE_EXPERT)
    check_submodules(trusted, settings.golden.taps)
    ported = model(port_dtype, STATIC_EXPERTS if settings.port.backend == "transformers" else ONE_EXPERT)
    known: dict[Any, list[Activations]] = {}
    stages = {}
    forced = 0
    for stage, description in descriptions.items():
        if "error" in description:
            continue
        lossless = golden_stage.lossless(description, dtype)
        golden_stage.keep_experts(exact, stage, lossless, dtype)
        own = loading.parameters_of(trusted, stage)
        signature = (layer_of(stage) is not None or stage, *(tuple(tensor.shape) for tensor in own.values()))
        if signature not in known:
            shape, own_taps = tokens.ids.shape, settings.golden.taps
            with Stepwise(dtype):  # the variant that needs the most memory
                variant = activations(trusted, stage, shape, own_taps)
            port_taps = settings.port.backend == "transformers"
            port = activations(ported, stage, shape, own_taps, with_optional=port_taps)
            known[signature] = [variant, activations(exact, stage, shape, own_taps), port]
        run, truth, port = known[signature]
        weights = _bytes(own.values())
        twin = _bytes(
            tensor
            for name, tensor in loading.parameters_of(exact, stage).items()
            if name not in lossless or tensor.dtype != own[name].dtype
        )
        variants = 0 if stage == EMBED else len(VARIANTS)
        largest = max(map(checkpoint.bytes_on_disk, description["tensors"].values()), default=0)
        ported_weights = _bytes(loading.parameters_of(ported, stage).values())
        files = kept = 0
        if stage in compared:
            outs = run.out + chains.get(stage, 0) * port.out  # in the noise file, and in the chains
            files = run.taps + truth.taps + port.taps + outs
            kept = run.out + truth.out + port.out + outs
            forced += port.taps
        elif stage in before:
            files = kept = 2 * run.out  # golden and noise
        stages[stage] = {
            "weights": {"golden": weights, "port": ported_weights},
            "golden": weights + max(largest, run.taps * (1 + variants) + max(run.peak, twin + truth.peak)),
            "port": ported_weights + max(largest, 2 * port.taps + port.peak),
            "files": files,
            "kept": kept,
        }
    own = [stages[stage]["weights"] for stage in stages if not (stage == LM_HEAD and _is_tied(descriptions))]
    of_model = {side: sum(one[side] for one in own) for side in ("golden", "port")}
    beside = max((one["golden"] - one["weights"]["golden"] for one in stages.values()), default=0)
    prediction = {
        "schema_version": SCHEMA_VERSION,
        "stages": stages,
        "golden": max((one["golden"] for one in stages.values()), default=0),
        "port": max((one["port"] for one in stages.values()), default=0),
        "weights": of_model,
        "whole": of_model["golden"] + beside,
        "files": sum(one["files"] for one in stages.values()),
        "kept": sum(one["kept"] for one in stages.values()),
        "forced": forced,
    }
    return prediction | {"machines": machines(prediction)}


def unknown(why: str) -> dict[str, Any]:
    """The prediction of a run whose memory could not be predicted: every number is None, and `error` says why."""
    numbers = ("golden", "port", "weights", "whole", "files", "kept", "forced")
    return {"schema_version": SCHEMA_VERSION, "error": why, "stages": {}, **dict.fromkeys(numbers), "machines": []}


def _is_tied(descriptions: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the model's head is its embedding, which the full model stores only once."""
    embed, head = (set(descriptions.get(stage, {}).get("tensors", ())) for stage in (EMBED, LM_HEAD))
    return bool(embed & head)


@dataclass(frozen=True)
class Activations:
    """Bytes of a stage's taps and of its output, and its peak memory without its weights."""

    taps: int
    out: int
    peak: int


def activations(
    model: PreTrainedModel,
    stage: str,
    shape: tuple[int, ...],
    own_taps: Mapping[str, str] = MappingProxyType({}),
    with_optional: bool = True,
) -> Activations:
    """Measures the activations of a stage of a `loading.meta_model` for token ids of this shape, [batch, seq].

    `own_taps` are those of `run_stage`. Taps that a port need not hand over count only `with_optional`.
    """
    # Token ids have values: some models compute their rotary tables from the length.
    ids, valid = torch.zeros(shape, dtype=torch.long), torch.ones(shape, dtype=torch.bool)
    x = None
    if stage != EMBED:
        x = run_stage(model, EMBED, None, ids, valid, with_taps=False, without_weights=True)[OUT]
    with MemTracker() as tracker:
        taps = run_stage(model, stage, x, ids, valid, own_taps=own_taps, without_weights=True)
    found = tracker.get_tracker_snapshot("peak").values()
    peak = sum(size for one in found for use, size in one.items() if getattr(use, "name", None) in ("ACT", "TEMP"))
    counted = [tensor for name, tensor in taps.items() if with_optional or not is_optional(name, own_taps)]
    return Activations(_bytes(counted), _bytes([taps[OUT]]), peak)


def machines(prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Whether the run fits each known machine, for the side that runs there.

    `stage` says whether the largest job of one stage fits one device, and `whole` whether the whole model fits all
    devices: the golden with its activations, or only the weights of the port. `devices` is the number of devices that
    the whole model needs.
    """
    weights = prediction["weights"]["port"]
    rows = [
        {
            "machine": machine.name,
            "side": "golden",
            "stage": prediction["golden"] <= machine.memory,
            "whole": prediction["whole"] <= machine.devices * machine.memory,
            "devices": math.ceil(prediction["whole"] / machine.memory),
        }
        for machine in GPUS
    ]
    return rows + [
        {
            "machine": machine.name,
            "side": "port",
            "stage": prediction["port"] <= machine.memory,
            "whole": weights <= machine.devices * machine.memory,
            "devices": math.ceil(weights / machine.memory),
        }
        for machine in NEURON
    ]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

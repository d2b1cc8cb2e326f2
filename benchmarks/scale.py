"""The whole MiniMax-M2 on paper: what `results/prediction.json` says of all 62 layers, in bf16, by length of the prompt; and
how long a run would take on machines that were not here, and cost.

The time of a stage is that of reading its weights, at the speed of the machine's disk; of putting them into a model and of
writing its taps, both measured here on one core (the first of a golden, for either side); of statistics, noise and
comparing, a tap each on THREADS; of its matrix products, at EFFICIENCY of what the device's vendor says; and JOBS. The port
has each stage alone and in the chain of all. The golden's side also takes the digests of all weights, once and on THREADS,
and each file in results/ is digested once (a test counts it). Machines differ and prices change: MACHINES is the place for
yours.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerproof.config import validate
from layerproof.files import write_json
from layerproof.golden.variants import VARIANTS
from layerproof.host import prediction
from layerproof.measure.metrics import compare
from layerproof.measure.noise import noise_of_taps
from layerproof.model import loading
from layerproof.model.stages import LM_HEAD, all_stages, layer_of
from layerproof.model.tokens import pad
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor, statistics
from measure import Result, seconds
from memory import CONFIG, STAGE, make_checkpoint, shapes

FULL = CONFIG | {"num_hidden_layers": 62, "vocab_size": 200064, "attn_type_list": [1] * 62}
LENGTHS = (512, 4096)
SETTINGS = validate({"inputs": {"prompts": "prompts.txt"}})
"""The defaults: golden and port in bf16."""
PLACED = CONFIG | {"num_local_experts": 16}
"""A model with a layer that is large enough to measure how fast weights are put into place."""
EFFICIENCY = 0.3
"""Of a device's peak, in products as large as these."""
JOBS = 0.62
"""Seconds that Snakemake and the processes take for all jobs of a stage on one side, in blocks of 16 stages and without warm
starts: of 62 tiny layers, what they took longer than one process (docs/performance.md), by stages and sides, rounded up.
"""
THREADS = 4
"""Of a job under `--cores 4 --set-threads golden_stage=4 port_stage=4`."""
DIGESTED = 1 << 28
"""Bytes by which the speed of digests is measured."""


@dataclass(frozen=True)
class Machine:
    """A machine with a golden on one of its GPUs, or a port on one of its cores: peaks of the device in FLOP/s for bf16 and
    fp32, bytes/s of the local disks, and US dollars for an hour.
    """

    name: str
    bf16: float
    fp32: float
    disk: float
    hour: float


# Peaks by NVIDIA's data sheets (dense) and the Neuron documentation (a trn2 chip's 667 TFLOP/s over 4 logical cores of two
# physical ones each, as prediction.py counts them; a quarter of it in fp32). One NVMe disk
# is taken for 3 GB/s, eight for 8. Prices of AWS's Capacity Blocks in US East (Ohio): of January 2025, of trn2 of May 2026.
MACHINES = {
    "golden": (
        Machine("1 x H100, an eighth of p5.48xlarge", 989e12, 67e12, 3e9, 4.916),
        Machine("8 x A100, p4d.24xlarge, one in use", 312e12, 19.5e12, 8e9, 14.75),
    ),
    "port": (Machine("trn2.48xlarge, one logical core in use", 167e12, 42e12, 8e9, 35.7608),),
}


@dataclass(frozen=True)
class Speeds:
    """Seconds on one core of this machine: by element of a tap of each side for `writing` it and for `judging` it, by byte
    of weights for `placing` them in a model, and by byte for `digests`.
    """

    writing: dict[str, float]
    judging: dict[str, float]
    placing: float
    digests: float


def predict(directory: Path, length: int) -> dict[str, Any]:
    """The prediction for one prompt of this length; the checkpoint is its config and the names of its tensors."""
    write_json(directory / "config.json", FULL)
    needed = dict(shapes(FULL))
    by_stage, *_ = loading.assign_stages(loading.meta_model(directory, False), list(needed))
    descriptions = {
        stage: {
            "tensors": {
                name: {"parameter": parameter, "dtype": "BF16", "shape": list(needed[name])}
                for name, parameter in by_stage[stage].items()
            }
        }
        for stage in all_stages(FULL["num_hidden_layers"])
    }
    stages = list(descriptions)
    chains = dict.fromkeys(stages, 1)
    return prediction.predict(directory, descriptions, pad([[7] * length], 0), SETTINGS, stages, [], chains)


def products(stage: str, length: int, experts: int) -> float:
    """Floating-point operations of one run of a stage on a prompt, with so many experts a token: of weights by tokens, and
    of the attention's scores.
    """
    hidden, inner, head = (FULL[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    if layer_of(stage) is None:
        return 2.0 * length * hidden * FULL["vocab_size"] if stage == LM_HEAD else 0.0
    queries, keys = (FULL[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    weights = 2 * hidden * (queries + keys) + hidden * (3 * inner * experts + FULL["num_local_experts"])
    return 2.0 * length * weights + 4.0 * queries * length**2


def seconds_by_element() -> tuple[dict[str, float], dict[str, float]]:
    """What a side does with its taps, on one core of this machine, by element of a tap in bf16: what writing takes (the
    golden writes its truth, too), and what statistics and measuring the noise of the golden or comparing the port take.
    """
    shape = (1, 512, FULL["hidden_size"])
    random = torch.Generator().manual_seed(0)
    exact = torch.randn(shape, generator=random)
    taps = [(exact * (1 + 2e-3 * torch.randn(shape, generator=random))).bfloat16() for _ in range(1 + len(VARIANTS))]
    truth, (golden, *variants) = hdf5.to_array(exact), map(hdf5.to_array, taps)
    valid = np.ones(shape[:2], bool)
    with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:

        def write(groups: dict[str, dict[str, Tensor]]) -> None:
            hdf5.write(Path(directory) / "taps.h5", groups, valid=valid)

        def describe(*tensors: Tensor) -> None:
            for tensor in tensors:
                statistics(tensor, valid)

        def by_element(work: Callable[[], object]) -> float:
            return seconds(work, time.process_time) / exact.numel()

        writing = {
            "golden": by_element(lambda: write({"golden": {"out": golden}, "truth": {"out": truth}})),
            "port": by_element(lambda: write({"port": {"out": golden}})),
        }
        described = {
            "golden": by_element(lambda: describe(golden, truth)),
            "port": by_element(lambda: describe(golden)),
        }
        ways = [{"out": one} for one in variants]
        judging = {
            "golden": by_element(lambda: noise_of_taps({"out": golden}, ways, {"out": truth}, valid)),
            "port": by_element(lambda: compare(golden, golden, truth, valid)),
        }
    return (
        {side: writing[side] - described[side] for side in writing},
        {side: judging[side] + described[side] for side in judging},
    )


def seconds_by_byte() -> float:
    """What putting weights that are in memory into a model takes, on one core of this machine, by byte on disk."""
    with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:
        model = Path(directory) / "model"
        size = make_checkpoint(model, "bf16", PLACED)
        descriptions, _ = loading.describe_stages(model, [STAGE], False)

        def place() -> None:
            stage = loading.meta_stage(model, STAGE, False, torch.bfloat16)
            loading.load_stage(stage, STAGE, model, descriptions[STAGE], torch.device("cpu"))

        return seconds(place, time.process_time) / size


def seconds_by_byte_digested() -> float:
    """What the digest of weights that are in memory takes, on one core of this machine, by byte."""
    data = bytearray(DIGESTED)
    return seconds(lambda: hashlib.sha256(data).digest(), time.process_time) / DIGESTED


def seconds_of_stage(
    stage: str, side: str, machine: Machine, found: dict[str, Any], length: int, speeds: Speeds
) -> dict[str, float]:
    """By what they are spent on; `found` is what the prediction says of the stage."""
    # Elements: in bf16 of the golden, its noise, the port and a chain, in fp32 of the truth.
    output = found["kept"] / 12
    elements = (found["files"] - 4 * output) / 8  # of all taps, without the noise and the chain
    if side == "golden":
        # Itself, its variants, and what strays along the noise; the truth. Of its experts those that tokens go to.
        flops = products(stage, length, FULL["num_experts_per_tok"])
        compute = (2 + len(VARIANTS)) * flops / machine.bf16 + flops / machine.fp32
        loads = 1
        written = 6 * elements + 2 * output
    else:
        # With taps and without, and in the chain. The shipped port has each token go through all experts.
        compute = 3 * products(stage, length, FULL["num_local_experts"]) / machine.bf16
        loads = 2
        written = 2 * elements + 2 * output
        elements += output
    return {
        "reading": loads * found["weights"][side] / machine.disk,
        "placing": loads * found["weights"][side] * speeds.placing,
        "products": compute / EFFICIENCY,
        "taps": elements * (speeds.writing[side] + speeds.judging[side] / THREADS),
        "jobs": loads * JOBS,
        "digests": speeds.digests * written,
    }


def hours(found: dict[str, Any], length: int, speeds: Speeds) -> list[Result]:
    """Time and cost of one side of the run on each machine."""
    results = []
    weights = found["weights"]["golden"]
    for side, machines in MACHINES.items():
        for machine in machines:
            total: dict[str, float] = {}
            for stage, of_stage in found["stages"].items():
                for part, value in seconds_of_stage(stage, side, machine, of_stage, length, speeds).items():
                    total[part] = total.get(part, 0.0) + value
            if side == "golden":
                total["digests"] += weights * max(1 / machine.disk, speeds.digests / THREADS)
            said = ", ".join(f"{part} {value / 60:.1f} min" for part, value in total.items())
            time_h = sum(total.values()) / 3600
            name = f"62 layers, 1 x {length} tokens: {side}, {machine.name}"
            results.append(Result(name, time_h, "hours", said))
            results.append(Result(f"{name}: cost", time_h * machine.hour, "US dollars", f"{machine.hour} an hour"))
    return results


def run() -> list[Result]:
    """The figures for each length."""
    results = []
    torch.set_num_threads(1)
    speeds = Speeds(*seconds_by_element(), seconds_by_byte(), seconds_by_byte_digested())
    for told, by_side in (("writing taps", speeds.writing), ("judging taps", speeds.judging)):
        for side, of_one in by_side.items():
            results.append(Result(f"{told}, {side}", of_one * 1e9, "ns an element", "one core of this machine"))
    results.append(Result("putting weights into a model", speeds.placing * 1e9, "s a GB", "one core of this machine"))
    results.append(Result("digest of weights", speeds.digests * 1e9, "s a GB", "one core of this machine"))
    for length in LENGTHS:
        with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:
            found = predict(Path(directory), length)
        weights = found["weights"]["golden"]
        baseline = f"{weights / 1e9:.1f} GB of weights"
        layer = found["stages"]["layer_000"]
        for name, size in (
            ("golden job, layer", layer["golden"]),
            ("golden job, lm_head", found["stages"]["lm_head"]["golden"]),
            ("port job, layer", layer["port"]),
            ("golden, whole model", found["whole"]),
            ("tensors in results/", found["files"]),
            ("tensors in results/, compare.taps: auto, all pass", found["kept"]),
            ("disk, with the checkpoint in bf16", found["files"] + weights),
        ):
            results.append(Result(f"62 layers, 1 x {length} tokens: {name}", size / 1e9, "GB", baseline))
        for machine in found["machines"]:
            name = f"62 layers, 1 x {length} tokens: {machine['side']}, whole model on {machine['machine']}"
            fits = "which it fits" if machine["whole"] else "more than it has"
            results.append(Result(name, machine["devices"], "devices", fits))
        results += hours(found, length, speeds)
    return results

"""The whole MiniMax-M2 on paper: what `results/prediction.json` says of all 62 layers, in bf16, by length of the prompt; and
how long a run would take on machines that were not here, and cost.

The time of a layer is that of reading its weights, at the speed of the machine's disk; of putting them into a model and of
the work on its taps, both measured here on one core (the first of a golden, for either side); of its matrix products, at
EFFICIENCY of what the device's vendor says; and JOBS. Machines differ and prices change: MACHINES is the place for yours.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from layerproof import loading, prediction, tensors
from layerproof.files import write_json
from layerproof.metrics import compare
from layerproof.noise import noise_of_taps
from layerproof.stages import all_stages
from layerproof.tokens import pad
from layerproof.variants import VARIANTS
from measure import Result, seconds
from memory import CONFIG, STAGE, make_checkpoint, shapes

FULL = CONFIG | {"num_hidden_layers": 62, "vocab_size": 200064, "attn_type_list": [1] * 62}
LENGTHS = (512, 4096)
PLACED = CONFIG | {"num_local_experts": 16}
"""A model with a layer that is large enough to measure how fast weights are put into place."""
EFFICIENCY = 0.3
"""Of a device's peak, in products as large as these."""
JOBS = 3.0
"""Seconds that Snakemake and the processes take for all jobs of a stage (benchmarks/overhead.py), rounded up."""


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


# Peaks by NVIDIA's data sheets (dense) and the Neuron documentation (a trn2 chip's 667 TFLOP/s over 8 cores). One NVMe disk
# is taken for 3 GB/s, eight for 8. Prices of AWS's Capacity Blocks in US East (Ohio): of January 2025, of trn2 of May 2026.
MACHINES = {
    "golden": (
        Machine("1 x H100, an eighth of p5.48xlarge", 989e12, 67e12, 3e9, 4.916),
        Machine("8 x A100, p4d.24xlarge, one in use", 312e12, 19.5e12, 8e9, 14.75),
    ),
    "port": (Machine("trn2.48xlarge, one core in use", 83e12, 21e12, 8e9, 35.7608),),
}


def predict(directory: Path, length: int) -> dict[str, Any]:
    """The prediction for one prompt of this length; the checkpoint is its config and the names of its tensors."""
    write_json(directory / "config.json", FULL)
    needed = dict(shapes(FULL))
    by_stage, _ = loading.assign_stages(loading.meta_model(directory, False), list(needed))
    descriptions = {
        stage: {
            "tensors": {
                name: {"parameter": parameter, "dtype": "BF16", "shape": list(needed[name])}
                for name, parameter in by_stage[stage].items()
            }
        }
        for stage in all_stages(FULL["num_hidden_layers"])
    }
    sides = {"golden": {"dtype": "bfloat16"}, "port": {"dtype": "bfloat16", "backend": "xla"}}
    stages = list(descriptions)
    run = {"trust_remote_code": False, "compared": stages, "before": [], "chains": dict.fromkeys(stages, 1)}
    return prediction.predict(directory, descriptions, pad([[7] * length], 0), sides | run)


def products(length: int) -> float:
    """Floating-point operations of one run of a layer on a prompt: of weights by tokens, and of the attention's scores."""
    hidden, inner, head = (FULL[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (FULL[key] * head for key in ("num_attention_heads", "num_key_value_heads"))
    weights = 2 * hidden * (queries + keys) + hidden * (
        3 * inner * FULL["num_experts_per_tok"] + FULL["num_local_experts"]
    )
    return 2 * length * weights + 4 * queries * length**2


def seconds_by_element() -> dict[str, float]:
    """What a side does with its taps, on one core of this machine, by element of a tap in bf16: the golden writes them and
    its truth and measures the noise; the port writes them, and they are compared.
    """
    shape = (1, 512, FULL["hidden_size"])
    random = torch.Generator().manual_seed(0)
    exact = torch.randn(shape, generator=random)
    taps = [(exact * (1 + 2e-3 * torch.randn(shape, generator=random))).bfloat16() for _ in range(1 + len(VARIANTS))]
    truth, (golden, *variants) = tensors.to_array(exact), map(tensors.to_array, taps)
    valid = np.ones(shape[:2], bool)
    with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:

        def of_golden() -> None:
            groups = {"golden": {"out": golden}, "truth": {"out": truth}}
            tensors.write(Path(directory) / "golden.h5", groups, valid=valid)
            noise_of_taps({"out": golden}, [{"out": one} for one in variants], {"out": truth}, valid)

        def of_port() -> None:
            tensors.write(Path(directory) / "port.h5", {"port": {"out": golden}}, valid=valid)
            compare(golden, golden, truth, valid)

        return {
            side: seconds(work, time.process_time) / exact.numel()
            for side, work in (("golden", of_golden), ("port", of_port))
        }


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


def hours(found: dict[str, Any], length: int, by_element: dict[str, float], by_byte: float) -> list[Result]:
    """Time and cost of one side of the run on each machine."""
    results = []
    layers = FULL["num_hidden_layers"]
    layer = found["stages"]["layer_000"]
    output = layer["kept"] / 10  # elements; in bf16 of the golden, the port and a chain, in fp32 of the truth
    elements = (layer["files"] - 2 * output) / 8  # of all taps, without the chain
    for side, machines in MACHINES.items():
        for machine in machines:
            # The golden, its variants and what strays along the noise; the port with taps and without.
            runs = 2 + len(VARIANTS) if side == "golden" else 2
            compute = runs * products(length) / (EFFICIENCY * machine.bf16)
            compute += products(length) / (EFFICIENCY * machine.fp32) if side == "golden" else 0.0
            parts = {
                "reading": layer["weights"][side] / machine.disk,
                "placing": layer["weights"][side] * by_byte,
                "products": compute,
                "taps": elements * by_element[side],
                "jobs": JOBS,
            }
            said = ", ".join(f"{part} {value:.1f} s" for part, value in parts.items())
            total = layers * sum(parts.values()) / 3600
            name = f"62 layers, 1 x {length} tokens: {side}, {machine.name}"
            results.append(Result(name, total, "hours", f"a layer: {said}"))
            results.append(Result(f"{name}: cost", total * machine.hour, "US dollars", f"{machine.hour} an hour"))
    return results


def run() -> list[Result]:
    """The figures for each length."""
    results = []
    torch.set_num_threads(1)
    by_element = seconds_by_element()
    for side, of_one in by_element.items():
        results.append(Result(f"work on taps, {side}", of_one * 1e9, "ns an element", "one core of this machine"))
    by_byte = seconds_by_byte()
    results.append(Result("putting weights into a model", by_byte * 1e9, "s a GB", "one core of this machine"))
    for length in LENGTHS:
        with tempfile.TemporaryDirectory(prefix="layerproof-scale-") as directory:
            found = predict(Path(directory), length)
        weights = sum(one["weights"]["golden"] for one in found["stages"].values())
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
        results += hours(found, length, by_element, by_byte)
    return results

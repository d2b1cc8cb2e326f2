"""The comparison of one tap, 1 x 4096 x 3072 in bf16 with an fp32 truth, against torch in fp32, metric by metric."""

from __future__ import annotations

import tempfile
from pathlib import Path

import h5py
import numpy as np
import torch

from layerproof.measure.metrics import LOG10_EDGES, PROBABILITIES, compare
from layerproof.measure.noise import measure as measure_noise
from layerproof.tensors import hdf5
from measure import Result, seconds

SHAPE = (1, 4096, 3072)
DRAWS = 5
"""A golden and its variants, of which the noise is measured."""


def one_by_one(port: torch.Tensor, golden: torch.Tensor, truth: torch.Tensor) -> None:
    """The numbers of `compare`, each by what torch has for it, as one would write them down."""
    p, g = port.float(), golden.float()
    for error in ((p - g).abs(), (p - g).abs() / g.abs().clamp_min(1e-30)):
        error.max(), error.mean(), error.median()
    torch.isclose(p, g, rtol=1e-2, atol=1e-3).float().mean()
    torch.nn.functional.cosine_similarity(p.flatten(), g.flatten(), dim=0)
    torch.corrcoef(torch.stack((p.flatten(), g.flatten())))
    (p - g).norm() / g.norm()
    20 * torch.log10(g.norm() / (p - g).norm())
    (g - truth).norm() / truth.norm()
    for of in (p, g, truth.bfloat16().float()):
        error = (of - truth).square()
        error.mean().sqrt(), error.mean(dim=2).sqrt(), error.mean(dim=(0, 1)).sqrt()
    for of in (p, g):
        error = (of - truth).abs().flatten()
        ordered = error.sort().values
        [ordered[int(probability * (len(ordered) - 1))] for probability in PROBABILITIES]
        torch.histc(error.clamp_min(1e-12).log10(), len(LOG10_EDGES) - 1, -12, 4)
        error.argmax()
    patterns = [of.view(torch.int16).int() for of in (port, golden)]
    steps = [torch.where(of < 0, -32768 - of, of) for of in patterns]
    ulp = (steps[0] - steps[1]).abs().float()
    ulp.max(), ulp.mean(), ulp.median()
    for of in (p, g, truth):
        of.isnan().sum(), of.isinf().sum()


def run() -> list[Result]:
    """The figures, on one thread."""
    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(0)
    truth = torch.randn(SHAPE, generator=random)
    port, golden = ((truth * (1 + 2e-3 * torch.randn(SHAPE, generator=random))).bfloat16() for _ in range(2))
    valid = np.ones(SHAPE[:2], bool)
    with tempfile.TemporaryDirectory(prefix="layerproof-comparer-") as directory:
        path = Path(directory) / "tap.h5"
        stored = {name: hdf5.to_array(of) for name, of in (("port", port), ("golden", golden), ("truth", truth))}
        hdf5.write(path, {"tap": stored}, valid=valid)
        with h5py.File(path) as file:
            read = seconds(lambda: [file[f"tap/{name}"][...] for name in stored])
    varied = [(truth * (1 + 2e-3 * torch.randn(SHAPE, generator=random))).bfloat16() for _ in range(DRAWS)]
    draws = [hdf5.to_array(of) for of in varied]
    arrays = [of.data for of in stored.values()]
    memory = seconds(lambda: [array.copy() for array in arrays])
    ours = seconds(lambda: compare(*stored.values(), valid=valid))
    theirs = seconds(lambda: one_by_one(port, golden, truth))
    noise = seconds(lambda: measure_noise(draws, stored["truth"], valid))
    name = "x".join(map(str, SHAPE))
    return [
        Result(f"compare {name}", theirs / ours, "times as fast as torch", f"{theirs:.2f} s"),
        Result(f"compare {name}", ours / read, "of reading the files", f"{read:.3f} s"),
        Result(f"compare {name}", ours / memory, "of copying what is in them", f"{memory:.3f} s"),
        Result(f"noise of {name}, {DRAWS} draws", noise / ours, "of comparing once", f"{ours:.3f} s"),
    ]

"""What a stage's file takes on disk: with the lossless filters that every HDF5 has, and without the taps of what passes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from layerproof import tensors, trimming
from layerproof.metrics import Tensor
from measure import Result, seconds

SHAPE = (1, 1024, 3072)
TAPS = 20
"""Of about this size in a layer of MiniMax-M2, with its output."""
FILTERS: dict[str, dict[str, Any]] = {
    "gzip, level 1, shuffled": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "lzf, shuffled": {"compression": "lzf", "shuffle": True},
}


def run() -> list[Result]:
    """The ratios, on one core."""
    exact = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    golden, truth = tensors.to_array(exact.bfloat16()), tensors.to_array(exact)
    results = []
    with tempfile.TemporaryDirectory(prefix="layerproof-storage-") as directory:
        plain = Path(directory) / "plain.h5"
        for name, tap in (("bf16", golden), ("fp32", truth)):
            bytes_before, seconds_before = _written(plain, tap, {})
            for filtered, options in FILTERS.items():
                size, took = _written(Path(directory) / "filtered.h5", tap, options)
                told = f"{bytes_before / 1e6:.1f} MB in {seconds_before:.3f} s"
                results.append(Result(f"{name} tap, {filtered}: size", size / bytes_before, "of unfiltered", told))
                results.append(Result(f"{name} tap, {filtered}: time", took / seconds_before, "of unfiltered", told))
        stage = Path(directory) / "layer_000.h5"
        taps = {f"tap{number}": golden for number in range(TAPS - 1)} | {"out": golden}
        tensors.write(stage, {"golden": taps, "truth": dict.fromkeys(taps, truth)}, valid=np.ones(SHAPE[:2], bool))
        before = stage.stat().st_size
        trimming.trim(stage)
        told = f"{before / 1e6:.0f} MB, {TAPS} taps"
        results.append(
            Result("stage that passes, compare.taps: auto: size", stage.stat().st_size / before, "of all", told)
        )
    return results


def _written(path: Path, tap: Tensor, options: dict[str, Any]) -> tuple[int, float]:
    """Bytes of a file with one tap, in chunks as `tensors.write` makes them, and the seconds that writing it took."""

    def write() -> None:
        with h5py.File(path, "w") as file:
            file.create_dataset("tap", data=tap.data, chunks=tensors.chunks_of(tap.data), fletcher32=True, **options)

    took = seconds(write)
    return path.stat().st_size, took

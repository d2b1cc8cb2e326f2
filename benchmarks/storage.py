"""What a layer's files take on disk: with the lossless filters that every HDF5 has, and without the taps of what passes.

The taps are those of a layer of MiniMax-M2 at full width, with random weights and fewer experts, which no tap shows.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from runs import Workflow

import memory
from layerproof.files import write_json
from layerproof.tensors import hdf5, pruning
from measure import Result, measure, seconds

CONFIG = memory.CONFIG | {"num_local_experts": 16}
TOKENS = 256
STAGE = "layer_000"
FILTERS: dict[str, dict[str, Any]] = {
    "gzip, level 1, shuffled": {"compression": "gzip", "compression_opts": 1, "shuffle": True},
    "lzf, shuffled": {"compression": "lzf", "shuffle": True},
}


def run() -> list[Result]:
    """The ratios, on one core."""
    results = []
    with tempfile.TemporaryDirectory(prefix="layerproof-storage-") as folder:
        directory = Path(folder)
        files = _stage_files(directory)
        for group in ("golden", "truth"):
            taps = _taps(files["golden"], group)
            bytes_before, seconds_before = _written(directory / "plain.h5", taps, {})
            told = f"{len(taps)} taps of {TOKENS} tokens, {bytes_before / 1e6:.1f} MB in {seconds_before:.3f} s"
            for name, options in FILTERS.items():
                size, took = _written(directory / "filtered.h5", taps, options)
                results += [
                    Result(f"taps of {group}, {name}: size", size / bytes_before, "of unfiltered", told),
                    Result(f"taps of {group}, {name}: time", took / seconds_before, "of unfiltered", told),
                ]
        for side, path in files.items():
            whole = path.stat().st_size
            pruning.prune(path)
            name = f"{side}/{STAGE}.h5, compare.taps: auto, if it passes: size"
            results.append(Result(name, path.stat().st_size / whole, "of all", f"{whole / 1e6:.1f} MB"))
    return results


def _stage_files(directory: Path) -> dict[str, Path]:
    """The layer's files by side, made as the workflow makes them."""
    memory.make_checkpoint(directory / "model", "bf16", CONFIG)
    write_json(directory / "ids.json", [[3 + number % 500 for number in range(TOKENS)]])
    inputs = {"prompts": None, "token_ids": "ids.json"}
    Workflow(directory, model={"checkpoint": "model"}, inputs=inputs, chains=[])
    measure([sys.executable, str(Path(__file__).with_name("one_process.py"))], directory)
    return {side: directory / f"results/{side}/{STAGE}.h5" for side in ("golden", "port")}


def _taps(path: Path, group: str) -> dict[str, np.ndarray]:
    with h5py.File(path) as file:
        return {name: node[...] for name, node in file[group].items()}


def _written(path: Path, taps: Mapping[str, np.ndarray], options: Mapping[str, Any]) -> tuple[int, float]:
    """Bytes of a file with these taps, in chunks as `tensors.write` makes them, and the seconds that writing it took."""

    def write() -> None:
        with h5py.File(path, "w") as file:
            for name, tap in taps.items():
                file.create_dataset(name, data=tap, chunks=hdf5.chunks_of(tap), fletcher32=True, **options)

    took = seconds(write)
    return path.stat().st_size, took

"""HDF5 files of noise: results/noise/STAGE.h5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import h5py

from layerproof.measure.noise import Noise
from layerproof.tensors.hdf5 import attributes, creating, reading, set_attributes, write_dataset
from layerproof.tensors.tensor import Tensor

NOISE_ARRAYS = ("compared", "token", "channel")


def write_noise(path: Path, noise: Mapping[str, Noise], variants: Sequence[str], chained: Tensor) -> None:
    """Writes the noise of each tap as a group with that name: arrays as datasets, bands as attributes.

    `chained`, the output of a variant that runs on its own outputs, becomes `chained/out`.

    Raises:
        StageError: as `hdf5.write` does.
    """
    with creating(path) as file:
        set_attributes(file, {"variants": " ".join(variants)})
        write_dataset(file, "chained/out", chained, None)
        for tap, measured in noise.items():
            for name in NOISE_ARRAYS:
                data = getattr(measured, name)
                file.create_dataset(f"{tap}/{name}", data=data, chunks=data.shape, fletcher32=True)
            set_attributes(file[tap], {"rounding": measured.rounding, **measured.band})


def read_noise(path: Path) -> dict[str, Noise]:
    """Reads the noise by tap name.

    Raises:
        StageError: as `hdf5.reading` does.
    """
    found: dict[str, Noise] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Group) and "token" in node:
            arrays = {key: cast("h5py.Dataset", node[key])[...] for key in NOISE_ARRAYS}
            band = attributes(node)
            found[name] = Noise(**arrays, rounding=band.pop("rounding"), band=band)

    with reading(path) as file:
        file.visititems(visit)
    return found

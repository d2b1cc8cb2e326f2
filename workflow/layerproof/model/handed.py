"""What stages hand over to later ones besides their output: shared keys and values, inputs of each layer, other streams.

It lies in the file of the stage that computes it, as `out/NAME`, or `out/NAME.STAGE` if later stages get different
tensors. Every file names the sources of all that stages before it have handed over, with their digests, so a stage
needs only the file of the stage before it to find them and to know whether they changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerproof.errors import StageError, StageMissing
from layerproof.model.stages import layer_of
from layerproof.taps import OUT
from layerproof.tensors import hdf5
from layerproof.tensors.tensor import Tensor


@dataclass(frozen=True)
class StageInput:
    """The input of a stage: the output of the stage before, from its file, and what else earlier stages hand over."""

    out: Tensor
    handed: Mapping[str, Tensor] = field(default_factory=dict)
    file: Path | None = None


def stage_input(previous: Path | None, stage: str | None, name: str = f"golden/{OUT}") -> StageInput | None:
    """Reads the input of a stage from the file of the stage before, whose output has this name; None for `embed`.

    What runs between the last layer and the head gets the same from earlier stages as that layer. Without `stage`, the
    input has all that is handed over, under the names of `for_stage`.

    Raises:
        StageMissing: if a file cannot be read; the message is that of the first stage that failed.
    """
    if previous is None:
        return None
    sources = _sources(previous)
    if stage is not None:
        sources = for_stage(sources, stage if layer_of(stage) is not None else previous.stem)
    found = {plain: _read(previous.parent / source["file"], source["tensor"]) for plain, source in sources.items()}
    return StageInput(_read(previous, name), found, previous.absolute())  # a port may change the directory


def for_stage[T](values: Mapping[str, T], stage: str) -> dict[str, T]:
    """Selects what a layer gets from values by the names that they are handed over under, by their names there.

    What is for one layer counts before what is for all.
    """
    of_all = {name: value for name, value in values.items() if not name.rpartition(".")[2].startswith("layer_")}
    of_one = {name.removesuffix(f".{stage}"): value for name, value in values.items() if name.endswith(f".{stage}")}
    return of_all | of_one


def _read(path: Path, name: str) -> Tensor:
    with _as_missing():
        return hdf5.read(path, name)


@contextlib.contextmanager
def _as_missing() -> Iterator[None]:
    """Turns the error of an earlier stage's file into one that says that the input is missing."""
    try:
        yield
    except StageMissing:
        raise
    except StageError as error:
        raise StageMissing(f"no input, because an earlier stage failed: {error}") from error


def sources(previous: Path | None, output: Path, group: str, taps: Mapping[str, Tensor]) -> dict[str, Any]:
    """The document SOURCES of the file `output`, whose `group` has the tensors `taps`: the earlier ones, and its own."""
    found = {}
    for name, source in _sources(previous).items():
        assert previous is not None
        file = os.path.relpath(previous.parent / source["file"], output.parent)
        found[name] = {**source, "file": file}
    own = {}
    for name, tensor in of_outputs(taps).items():
        digest = hashlib.sha256(tensor.data[...].tobytes()).hexdigest()
        own[name] = {"file": output.name, "tensor": f"{group}/{OUT}/{name}", "sha256": digest}
    return after(found, own)


def of_outputs[T](taps: Mapping[str, T]) -> dict[str, T]:
    """What a stage hands over among its taps, by its name."""
    return {name.removeprefix(f"{OUT}/"): value for name, value in taps.items() if name.startswith(f"{OUT}/")}


def after[T](earlier: Mapping[str, T], own: Mapping[str, T]) -> dict[str, T]:
    """What is handed over behind a stage that adds its `own`; what is for all layers replaces what was for one."""
    kept = {name: value for name, value in earlier.items() if name.partition(".layer_")[0] not in own}
    return kept | dict(own)


def _sources(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    with _as_missing(), hdf5.reading(path) as file:
        return hdf5.document_if_there(file, hdf5.SOURCES) or {}

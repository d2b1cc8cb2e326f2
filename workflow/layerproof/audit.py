"""The weights' books: of each stage what is on disk, what the golden holds of it and what the port made of it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import str_to_torch_dtype

from layerproof import loading, tensors
from layerproof.errors import StageError
from layerproof.files import size
from layerproof.port import CONVERSION
from layerproof.taps import OUT

SCHEMA_VERSION = 1
SMALL = 0.01
"""Share of a stage's bytes up to which wider parameters, such as a router's bias, are but noted."""
SHOWN = 3
"""Tensors that a finding names; of more it says how many."""

Description = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the port: `of` are the tensors on disk that went into it; the rest is as in `port._Ready`."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    of: tuple[str, ...]
    transposed: bool
    initial: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)


def audit(
    directory: Path,
    descriptions: Mapping[str, Description],
    golden_files: Mapping[str, Path],
    port_files: Mapping[str, Path],
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """The content of results/audit.json: `audit_stage` of every stage, all mappings being by stage.

    `settings` holds `trust_remote_code` and the `golden_dtype` and `port_dtype` of the config.
    """
    dtypes = [getattr(torch, settings[key]) for key in ("golden_dtype", "port_dtype")]
    model = loading.meta_model(directory, settings["trust_remote_code"], dtypes[0])
    stages = {
        stage: audit_stage(
            *(description, loading.parameters_of(model, stage), dtypes[1], golden_files[stage], port_files[stage])
        )
        for stage, description in descriptions.items()
    }
    return {"schema_version": SCHEMA_VERSION, "stages": stages}


def audit_stage(
    description: Description,
    golden: Mapping[str, torch.Tensor],
    port_dtype: torch.dtype,
    golden_file: Path,
    port_file: Path,
) -> dict[str, Any]:
    """Bytes by dtype on `disk`, in the `golden` and in the `port`, and `findings`, each a `text` with its `kind` and whether
    it is a mere `note`.

    `description` is results/weights/STAGE.json, `golden` its parameters as the golden holds them, of any device. `port` is
    None where the port did not run.
    """
    on_disk: dict[str, int] = {}
    for entry in description.get("tensors", {}).values():
        on_disk[entry["dtype"]] = on_disk.get(entry["dtype"], 0) + loading.bytes_on_disk(entry)
    result: dict[str, Any] = {
        "disk": on_disk,
        "golden": _by_dtype((tensor.dtype, tensor.numel()) for tensor in golden.values()),
        "port": None,
        "findings": [],
    }
    try:
        conversion = tensors.read_document(port_file, CONVERSION)
        with tensors.reading(golden_file) as file:
            wanted = _dtypes(tensors.taps(file, "golden"))
        with tensors.reading(port_file) as file:
            found = _dtypes(tensors.taps(file, "port"))
    except StageError:
        return result
    parameters = [
        Parameter(
            name,
            getattr(torch, entry["dtype"]),
            tuple(entry["shape"]),
            tuple(entry["of"]),
            entry["transposed"],
            entry["initial"],
        )
        for name, entry in conversion["parameters"].items()
    ]
    books = _Books(description["tensors"], golden, port_dtype, conversion["reads"], parameters)
    findings = [*books.dtypes(), *books.use(), *books.layout(), *_activations(found, wanted)]
    return result | {
        "port": _by_dtype((parameter.dtype, parameter.count) for parameter in parameters),
        "findings": [{"kind": kind, "note": kind in NOTES, "text": text} for kind, text in findings],
    }


NOTES = ("transposed", "read twice", "origin", "widened")
"""Kinds of findings that are well in many ports."""

Finding = tuple[str, str]


@dataclass(frozen=True)
class _Books:
    tensors: Mapping[str, Mapping[str, Any]]
    golden: Mapping[str, torch.Tensor]
    port_dtype: torch.dtype
    reads: Mapping[str, int]
    parameters: Sequence[Parameter]

    def dtypes(self) -> Iterator[Finding]:
        """Parameters that are wider than need be, or narrower than the golden's."""
        wide: list[tuple[Parameter, torch.dtype]] = []
        narrow: list[tuple[Parameter, torch.dtype]] = []
        for parameter in self.parameters:
            if not parameter.of or not parameter.dtype.is_floating_point:
                continue
            golden = self._widest(self.golden[self.tensors[name]["parameter"]].dtype for name in parameter.of)
            disk = self._widest(self._disk_dtype(name) for name in parameter.of)
            if parameter.dtype.itemsize > max(golden.itemsize, disk.itemsize, self.port_dtype.itemsize):
                wide.append((parameter, disk))
            if parameter.dtype.itemsize < min(golden.itemsize, disk.itemsize):
                narrow.append((parameter, disk))
        for (dtype, disk), group in _grouped(wide):
            more = sum(parameter.count * (dtype.itemsize - disk.itemsize) for parameter in group)
            yield (
                "upcast" if more > SMALL * self._port_bytes else "widened",
                f"{_names(one.name for one in group)}: {_word(dtype)} in the port and {_word(disk)} on disk, "
                f"which takes {size(more)} more.",
            )
        for (dtype, disk), group in _grouped(narrow):
            names = _names(one.name for one in group)
            yield "rounded", f"{names}: rounded to {_word(dtype)}, where checkpoint and golden have {_word(disk)}."

    def use(self) -> Iterator[Finding]:
        """Tensors on disk that are not used, or used in part or more than once; parameters that come from none."""
        used = {name for parameter in self.parameters for name in parameter.of}
        never = [name for name, reads in self.reads.items() if not reads]
        if never:
            yield "never read", f"{_names(never)}: on disk and never asked for by convert()."
        lost = [name for name, reads in self.reads.items() if reads and name not in used]
        initial = [one.name for one in self.parameters if one.initial]
        if initial:
            yield "initial", f"{_names(initial)}: as build() left it; nothing on disk went into it."
        unknown = [one.name for one in self.parameters if not one.of and not one.initial]
        if unknown:
            yield "origin", f"{_names(unknown)}: cannot be followed to a tensor on disk through convert()."
        elif lost:  # what cannot be followed may be in a parameter whose origin is not known
            yield "dropped", f"{_names(lost)}: read by convert() and used in no parameter."
        for sources, group in self._sharing():
            parts, whole = sum(one.count for one in group), sum(map(self._counted, sources))
            names = _names(one.name for one in group)
            if parts > whole and len(group) > 1:
                yield "twice", f"{_names(sources)}: loaded more than once, into {names}."
            elif parts > whole:
                yield "twice", f"{names}: has {parts / whole:.4g} times the elements of {_names(sources)}."
            elif parts < whole:
                yield "in part", f"{_names(sources)}: only {parts / whole:.2%} of it went into {names}."

    def layout(self) -> Iterator[Finding]:
        """Parameters that are transposed, and tensors that are read more often than need be."""
        for square in (False, True):
            names = [one.name for one in self.parameters if one.transposed and self._is_square(one) == square]
            if names:
                why = " It is square, so no shape would tell if that were wrong." if square else ""
                yield "transposed", f"{_names(names)}: transposed in convert().{why}"
        again = [name for name, reads in self.reads.items() if reads > 1]
        if again:
            more = sum((self.reads[name] - 1) * _count(self.tensors[name]) for name in again)
            yield "read twice", f"{_names(again)}: read from disk more than once ({more:,} elements too many)."

    def _sharing(self) -> Iterator[tuple[list[str], list[Parameter]]]:
        """Parameters that have a tensor on disk in common, together, with all that went into them."""
        left = [parameter for parameter in self.parameters if parameter.of]
        while left:
            group, sources = [left.pop(0)], set[str]()
            while not sources.issuperset(name for one in group for name in one.of):
                sources = {name for one in group for name in one.of}
                group += [one for one in left if sources.intersection(one.of)]
                left = [one for one in left if not sources.intersection(one.of)]
            yield sorted(sources), group

    @property
    def _port_bytes(self) -> int:
        return sum(parameter.count * parameter.dtype.itemsize for parameter in self.parameters)

    @cached_property
    def _quantised(self) -> set[str]:
        """The golden's parameters whose values on disk are 8 bits wide, with scales in tensors of their own."""
        return {one["parameter"] for one in self.tensors.values() if _of_word(one["dtype"]).itemsize == 1}

    def _counted(self, name: str) -> int:
        """Elements that a tensor on disk adds to a parameter: none if it is the scales of a quantised one."""
        entry = self.tensors[name]
        scales = entry["parameter"] in self._quantised and _of_word(entry["dtype"]).itemsize > 1
        return 0 if scales else _count(entry)

    def _disk_dtype(self, name: str) -> torch.dtype:
        """The dtype of the numbers on disk, of quantised ones that of the golden."""
        parameter = self.tensors[name]["parameter"]
        return self.golden[parameter].dtype if parameter in self._quantised else _of_word(self.tensors[name]["dtype"])

    def _is_square(self, parameter: Parameter) -> bool:
        return len(parameter.shape) > 1 and parameter.shape[-1] == parameter.shape[-2]

    @staticmethod
    def _widest(dtypes: Iterable[torch.dtype]) -> torch.dtype:
        return max(dtypes, key=lambda dtype: dtype.itemsize)


def _activations(found: Mapping[str, torch.dtype], wanted: Mapping[str, torch.dtype]) -> Iterator[Finding]:
    """Taps that the port computes in a wider dtype than the golden."""
    wide = {
        name: dtype
        for name, dtype in found.items()
        if name in wanted and dtype.is_floating_point and dtype.itemsize > wanted[name].itemsize
    }
    for dtype in dict.fromkeys(wide.values()):
        names = [name for name, its in wide.items() if its == dtype]
        stage = " The next stage gets it so unless the port narrows it." if OUT in names else ""
        yield "activations", f"{_names(names)}: {_word(dtype)}, where the golden has {_word(wanted[names[0]])}.{stage}"


def _grouped(
    pairs: Collection[tuple[Parameter, torch.dtype]],
) -> Iterator[tuple[tuple[torch.dtype, torch.dtype], list[Parameter]]]:
    """Parameters by their dtype and the one on disk."""
    for key in dict.fromkeys((parameter.dtype, disk) for parameter, disk in pairs):
        yield key, [parameter for parameter, disk in pairs if (parameter.dtype, disk) == key]


def _dtypes(taps: Mapping[str, tensors.Tensor]) -> dict[str, torch.dtype]:
    return {name: getattr(torch, tap.dtype) for name, tap in taps.items()}


def _by_dtype(parts: Iterable[tuple[torch.dtype, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for dtype, count in parts:
        found[_word(dtype)] = found.get(_word(dtype), 0) + count * dtype.itemsize
    return found


def _of_word(word: str) -> torch.dtype:
    """The torch dtype of safetensors' word for it."""
    return str_to_torch_dtype[word]


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _count(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"])


def _names(names: Iterable[str]) -> str:
    """Names as one reads them: those that differ in one number are one, `experts.*.w1.weight (256)`."""
    by_pattern: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = re.split(r"(\d+)", name)
        by_pattern.setdefault((str(len(parts)), *parts[::2]), []).append(parts)
    shown = []
    for group in by_pattern.values():
        columns = [set(column) for column in zip(*group, strict=True)]
        merged = "".join(next(iter(column)) if len(column) == 1 else "*" for column in columns)
        shown.append(f"{merged} ({len(group)})" if len(group) > 1 else merged)
    more = f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    return ", ".join(shown[:SHOWN]) + more

"""The weight ledger: for each stage, the weights on disk, in the golden and in the port."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from layerproof.errors import StageError
from layerproof.files import size
from layerproof.model.checkpoint import bytes_on_disk, itemsize, torch_name
from layerproof.taps import OUT, in_order
from layerproof.tensors import hdf5, pruning

SCHEMA_VERSION = 1
OF_RUN = ("golden", "port", "whole", "files", "kept", "machines")
"""What of the prediction of a run is part of its audit."""
SMALL = 0.01
"""Wider parameters, such as a router's bias, get only a note if they add at most this share of a stage's bytes."""
LARGEST_CHANGE = 2**-6
"""Up to this relative L2, the difference between a stage and its compiled graph is rounding.

A bf16 layer of real width differed by 8e-3, including experts that it chose differently because of rounding. The limit
is twice that.
"""
SHOWN = 3
"""How many tensors a finding names; it counts the rest."""

Description = Mapping[str, Any]


@dataclass(frozen=True)
class Parameter:
    """A parameter of the port; `of` names the tensors on disk that went into it (for the rest see `prepare._Ready`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    of: tuple[str, ...]
    transposed: bool
    initial: bool
    constant: bool

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.count * itemsize(self.dtype)


def audit(
    descriptions: Mapping[str, Description],
    golden_files: Mapping[str, Path],
    port_files: Mapping[str, Path],
    prediction: Mapping[str, Any],
    port_dtype: str,
) -> dict[str, Any]:
    """Returns the content of results/audit.json: `audit_stage` of every stage, and the prediction for the `run`.

    Each stage also gets the memory of its jobs as `predicted` by `prediction`; None if its weights cannot be read. The
    other mappings are by stage.
    """
    stages = {
        stage: audit_stage(description, golden_files[stage], port_files[stage], port_dtype)
        | {"predicted": predicted and {side: predicted[side] for side in ("golden", "port")}}
        for stage, description in descriptions.items()
        for predicted in [prediction["stages"].get(stage)]
    }
    run = {key: prediction[key] for key in OF_RUN}
    warning = prediction.get("error")
    warnings = [f"the memory of the jobs could not be predicted: {warning}"] if warning else []
    return {"schema_version": SCHEMA_VERSION, "warnings": warnings, "stages": stages, "run": run}


def unknown(why: str) -> dict[str, Any]:
    """Returns the content of results/audit.json for a run that could not be audited."""
    warnings = [f"what became of the weights is not known, because the audit failed: {why}"]
    run = {**dict.fromkeys(OF_RUN), "machines": []}
    return {"schema_version": SCHEMA_VERSION, "warnings": warnings, "stages": {}, "run": run}


def audit_stage(description: Description, golden_file: Path, port_file: Path, port_dtype: str) -> dict[str, Any]:
    """Returns bytes by dtype on `disk`, in the `golden` and in the `port`, bytes of both `files`, and `findings`.

    Files count with all their taps, even if they are pruned. A finding is a `text` with its type as `kind`, and whether
    it is only a `note`. `description` is results/weights/STAGE.json, `port_dtype` as in the config. `golden` and `port`
    are None if that side did not run.
    """
    on_disk = _by_dtype((entry["dtype"], bytes_on_disk(entry)) for entry in description.get("tensors", {}).values())
    files = sum(pruning.original_bytes(path) for path in (golden_file, port_file))
    result: dict[str, Any] = {"disk": on_disk, "golden": None, "port": None, "files": files, "findings": []}
    try:
        golden = hdf5.read_document(golden_file, hdf5.WEIGHTS)
        result["golden"] = _by_dtype((weight["dtype"], bytes_on_disk(weight)) for weight in golden.values())
        conversion = hdf5.read_document(port_file, hdf5.CONVERSION)
        with hdf5.reading(golden_file) as file:
            wanted = hdf5.dtypes(file, "golden")
        with hdf5.reading(port_file) as file:
            found = hdf5.dtypes(file, "port")
            tracing = hdf5.document_if_there(file, hdf5.COMPILED)
    except StageError:
        return result
    golden_dtypes = {name: weight["dtype"] for name, weight in golden.items()}
    parameters = [
        Parameter(name, **entry | {"shape": tuple(entry["shape"]), "of": tuple(entry["of"])})
        for name, entry in conversion["parameters"].items()
    ]
    ranks = conversion.get("ranks", 1)
    ledger = _WeightLedger(description["tensors"], golden_dtypes, port_dtype, conversion["reads"], parameters, ranks)
    findings = [*ledger.dtypes(), *ledger.use(), *ledger.layout(), *_activations(found, wanted)]
    if tracing:
        findings += _compiled(tracing)
    return result | {
        "port": _by_dtype((parameter.dtype, ranks * parameter.bytes) for parameter in parameters),
        "findings": [
            {"kind": finding_type, "note": finding_type in NOTES, "text": text} for finding_type, text in findings
        ],
    }


NOTES = ("transposed", "read twice", "origin", "widened")
"""Types of findings that are harmless in many ports."""

Finding = tuple[str, str]


@dataclass(frozen=True)
class _WeightLedger:
    tensors: Mapping[str, Mapping[str, Any]]
    golden: Mapping[str, str]
    port_dtype: str
    reads: Mapping[str, int]
    parameters: Sequence[Parameter]
    ranks: int
    """Number of ranks, each with a part or all of each tensor; `parameters` are those of the first rank."""

    def dtypes(self) -> Iterator[Finding]:
        """Finds parameters that are wider than necessary, or narrower than the golden's."""
        wide: list[tuple[Parameter, str]] = []
        narrow: list[tuple[Parameter, str]] = []
        for parameter in self.parameters:
            if not parameter.of or "float" not in parameter.dtype:
                continue
            if {parameter.dtype} == {torch_name(self.tensors[name]["dtype"]) for name in parameter.of}:
                continue  # as on disk, including quantised values and their scales
            golden = max((self.golden[self.tensors[name]["parameter"]] for name in parameter.of), key=itemsize)
            disk = max((self._disk_dtype(name) for name in parameter.of), key=itemsize)
            if itemsize(parameter.dtype) > max(map(itemsize, (golden, disk, self.port_dtype))):
                wide.append((parameter, disk))
            if itemsize(parameter.dtype) < min(itemsize(golden), itemsize(disk)):
                narrow.append((parameter, disk))
        for (dtype, disk), group in _grouped(wide):
            more = sum(parameter.count * (itemsize(dtype) - itemsize(disk)) for parameter in group)
            yield (
                "upcast" if more > SMALL * self._port_bytes else "widened",
                f"{_names(one.name for one in group)}: {dtype} in the port and {disk} on disk, "
                f"which takes {size(more)} more.",
            )
        for (dtype, disk), group in _grouped(narrow):
            names = _names(one.name for one in group)
            yield "rounded", f"{names}: rounded to {dtype}, but checkpoint and golden have {disk}."

    def use(self) -> Iterator[Finding]:
        """Finds tensors on disk that are unused, used in part or used twice, and parameters that come from none."""
        used = {name for parameter in self.parameters for name in parameter.of}
        never = [name for name, reads in self.reads.items() if not reads]
        if never:
            yield "never read", f"{_names(never)}: on disk, but never read by convert()."
        lost = [name for name, reads in self.reads.items() if reads and name not in used]
        initial = [one.name for one in self.parameters if one.initial]
        if initial:
            yield "initial", f"{_names(initial)}: still as build() created it; nothing on disk was loaded into it."
        constant = [one.name for one in self.parameters if one.constant and not one.initial]
        if constant:
            yield "origin", f"{_names(constant)}: created by convert() without any tensor on disk."
        unknown = [one.name for one in self.parameters if not (one.of or one.initial or one.constant)]
        if unknown:
            yield "origin", f"{_names(unknown)}: cannot be traced through convert() to a tensor on disk."
        elif lost:  # otherwise it may be in a parameter of unknown origin
            yield "dropped", f"{_names(lost)}: read by convert(), but used in no parameter."
        for sources, group in self._sharing():
            parts, whole = sum(one.count for one in group), sum(map(self._counted, sources))
            names = _names(one.name for one in group)
            if not whole:
                continue  # scales that the port stores beside the quantised values
            if parts > whole and len(group) > 1:
                yield "twice", f"{_names(sources)}: loaded more than once, into {names}."
            elif parts > whole:
                yield "twice", f"{names}: has {parts / whole:.4g} times the elements of {_names(sources)}."
            elif parts * self.ranks < whole:
                yield "in part", f"{_names(sources)}: only {parts / whole:.2%} of it went into {names}."

    def layout(self) -> Iterator[Finding]:
        """Finds parameters that are transposed, and tensors that are read more often than necessary."""
        for square in (False, True):
            names = [one.name for one in self.parameters if one.transposed and self._is_square(one) == square]
            if names:
                why = " It is square, so its shape would not reveal a mistake." if square else ""
                yield "transposed", f"{_names(names)}: transposed in convert().{why}"
        again = [name for name, reads in self.reads.items() if reads > 1]
        if again:
            more = sum((self.reads[name] - 1) * _count(self.tensors[name]) for name in again)
            yield "read twice", f"{_names(again)}: read from disk more than once ({more:,} elements too many)."

    def _sharing(self) -> Iterator[tuple[list[str], list[Parameter]]]:
        """Groups parameters that share tensors on disk; yields all the tensors of each group, and its parameters."""
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
        return sum(parameter.bytes for parameter in self.parameters)

    @cached_property
    def _quantised(self) -> set[str]:
        """The golden's parameters whose values on disk are 8 bits wide, with scales in separate tensors."""
        return {one["parameter"] for one in self.tensors.values() if itemsize(one["dtype"]) == 1}

    def _counted(self, name: str) -> int:
        """Returns how many elements a tensor on disk adds to a parameter: 0 for the scales of a quantised one."""
        entry = self.tensors[name]
        scales = entry["parameter"] in self._quantised and itemsize(entry["dtype"]) > 1
        return 0 if scales else _count(entry)

    def _disk_dtype(self, name: str) -> str:
        """Returns the dtype on disk; for quantised numbers, the dtype in the golden."""
        parameter = self.tensors[name]["parameter"]
        return self.golden[parameter] if parameter in self._quantised else torch_name(self.tensors[name]["dtype"])

    def _is_square(self, parameter: Parameter) -> bool:
        return len(parameter.shape) > 1 and parameter.shape[-1] == parameter.shape[-2]


def _activations(found: Mapping[str, str], wanted: Mapping[str, str]) -> Iterator[Finding]:
    """Finds taps that the port computes in a wider dtype than the golden."""
    wide = {
        name: dtype
        for name, dtype in found.items()
        if name in wanted and "float" in dtype and itemsize(dtype) > itemsize(wanted[name])
    }
    for dtype in dict.fromkeys(wide.values()):
        names = [name for name, its in wide.items() if its == dtype]
        stage = " The next stage receives it in this dtype unless the port casts it." if OUT in names else ""
        yield "activations", f"{_names(names)}: {dtype}, but the golden has {wanted[names[0]]}.{stage}"


def moved_by_compiling(tracing: Mapping[str, Any]) -> list[str]:
    """Returns the taps that compiling changed by more than rounding, from the document of `compiled.describe`."""
    change = tracing["change"]
    return [name for name in in_order(change) if change[name] is None or change[name] > LARGEST_CHANGE]


def _compiled(tracing: Mapping[str, Any]) -> Iterator[Finding]:
    """Finds what compiling changed in a stage, from the document of `compiled.describe`."""
    if tracing["depends_on_values"]:
        yield (
            "value baked in",
            "the graph depends on the values that it is traced on: forward reads a number from a tensor during tracing "
            "(.item(), an if on it), and that number becomes a constant. Compute it with tensors.",
        )
    for constant in tracing["constants"]:
        yield (
            "constant baked in",
            f"{constant['name'] or 'a tensor'} ({constant['dtype']}, {constant['shape']}): a constant of the compiled "
            "graph, because it is neither a parameter nor a buffer. Register it; otherwise each layer and rank needs its "
            "own graph.",
        )
    if ranks := tracing.get("other_on_ranks"):
        yield (
            "rank baked in",
            f"the graph of rank {ranks[0]} differs from that of rank 0: forward computes with the number of its rank, or "
            "with a tensor that is neither a parameter nor a buffer. If one graph is compiled for all ranks, each does what "
            "rank 0 does. Make the rank a parameter.",
        )
    for name, (eager, compiled) in tracing["dtypes"].items():
        yield "compiled dtype", f"{name}: {compiled} when compiled, {eager} when not."
    moved = moved_by_compiling(tracing)
    if moved:
        largest = tracing["change"][moved[0]]
        by = "in shape or in non-finite values" if largest is None else f"by a relative L2 of {largest:.2g}"
        yield "compiled", f"compiling changes the result, first at {moved[0]} ({by})."


def _grouped(
    pairs: Collection[tuple[Parameter, str]],
) -> Iterator[tuple[tuple[str, str], list[Parameter]]]:
    """Groups parameters by their dtype and the dtype on disk."""
    for key in dict.fromkeys((parameter.dtype, disk) for parameter, disk in pairs):
        yield key, [parameter for parameter, disk in pairs if (parameter.dtype, disk) == key]


def _by_dtype(parts: Iterable[tuple[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for dtype, count in parts:
        found[dtype] = found.get(dtype, 0) + count
    return found


def _count(entry: Mapping[str, Any]) -> int:
    return math.prod(entry["shape"])


def _names(names: Iterable[str]) -> str:
    """Shortens a list of names: names that differ only in numbers become one, `experts.*.w1.weight (256)`."""
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

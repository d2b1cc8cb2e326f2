"""A stage of the port as one compiled graph, as users ship it: traced once, then run on other values.

Weights and inputs are arguments of the graph. Everything else that a stage's forward uses becomes a constant of the
graph, even if it is constant only by accident: a number read from a tensor, or a tensor that is neither a parameter nor
a buffer. So Layerproof traces the graph on other values than it runs it on, and compares the result with the stage run
without compiling (`eager`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerproof.tensors.hdf5 import dtype_name

Taps = dict[str, torch.Tensor]
Tensors = Sequence[torch.Tensor]

XLA, NEURON = "xla", "neuron"
LARGEST_CONSTANTS = 2**24
"""Elements of constants that a digest of a graph covers: they are copied to the host for it."""


@dataclass(frozen=True)
class Graph:
    """A traced graph. `run` accepts tensors of the shapes and dtypes that it was traced with.

    `constants` are the tensors and numbers that tracing made part of the graph. `digest` covers the graph and its
    constants; it is None if the compiler does not report them.
    """

    run: Callable[[Tensors], Tensors]
    constants: tuple[torch.Tensor, ...] = ()
    digest: str | None = None


Trace = Callable[[Callable[..., Tensors], Tensors, str], Graph]
"""Traces a function on these example tensors, under a name for the graph."""


def trace_xla(function: Callable[..., Tensors], given: Tensors, name: str) -> Graph:
    """Traces with torch-xla: captures the graph that it would run, so that it can run again."""
    import torch_xla

    xla: Any = torch_xla._XLAC  # pyright: ignore[reportPrivateImportUsage]
    # Otherwise torch-xla would trace pending work too. It also recognises parameters by their buffers, which pending
    # tensors do not have yet.
    torch_xla.sync(wait=True)
    # Trace copies: code that writes to its inputs in place, such as a cache, then leaves the originals alone, and the
    # graph is the same.
    outputs = [output.to(given[0].device) for output in function(*(tensor.clone() for tensor in given))]
    lowered = _Lowered.of(outputs, given, name)
    computation = xla._xla_op_computation_from_module_proto(name, lowered.program)

    def run(tensors: Tensors) -> Tensors:
        return xla._xla_user_computation(f"xla::{name}", lowered.arguments(tensors), computation)

    return Graph(run, tuple(lowered.constants.values()), lowered.digest)


@dataclass(frozen=True)
class _Lowered:
    """What torch-xla recorded of pending outputs: a program whose parameters, by number, are tensors that were given, at
    their `places`, or `constants`.
    """

    program: bytes
    places: Mapping[int, int]
    constants: Mapping[int, torch.Tensor]

    @classmethod
    def of(cls, outputs: Tensors, given: Tensors, name: str) -> _Lowered:
        import torch_xla

        context = torch_xla._XLAC.lowering.LoweringContext(name)  # pyright: ignore[reportPrivateImportUsage]
        context.build(list(outputs))
        place = {context.tensor_parameter_id(tensor): index for index, tensor in enumerate(given)}
        held = context.device_parameter_id_tensor_mapping()
        places = {number: place[number] for number in sorted(held) if number in place}
        return cls(context.hlo(), places, {number: held[number] for number in sorted(held) if number not in place})

    def arguments(self, given: Tensors) -> list[torch.Tensor]:
        arguments = {**self.constants, **{number: given[place] for number, place in self.places.items()}}
        return [arguments[number] for number in sorted(arguments)]

    @property
    def digest(self) -> str:
        digest = hashlib.sha256(self.program)
        digest.update(str(self.places).encode())
        for number, constant in self.constants.items():
            digest.update(b"%d" % number + _bytes(constant))
        return digest.hexdigest()


def graph_digest(outputs: Tensors, given: Tensors) -> str | None:
    """A digest of the graph of pending `outputs` on an XLA device, whatever the values of the tensors in `given`.

    It covers all other numbers. None without an XLA device, if the compiler does not report the graph, or if tensors of
    more than `LARGEST_CONSTANTS` elements are not in `given`, such as weights that were cast on the device.
    """
    if any(tensor.device.type != "xla" for tensor in outputs):
        return None
    try:
        lowered = _Lowered.of(outputs, [tensor for tensor in given if tensor.device.type == "xla"], "stage")
    except RuntimeError:
        return None
    is_large = sum(tensor.numel() for tensor in lowered.constants.values()) > LARGEST_CONSTANTS
    return None if is_large else lowered.digest


def trace_neuron(flags: Sequence[str], folder: Path) -> Trace:
    """Traces with torch_neuronx and compiles with neuronx-cc and these flags; `folder` keeps the compiler's files."""

    def trace(function: Callable[..., Tensors], given: Tensors, name: str) -> Graph:
        import torch_neuronx  # pyright: ignore[reportMissingImports]

        (folder / name).mkdir(parents=True, exist_ok=True)
        example = tuple(tensor.cpu() for tensor in given)
        kept = str(folder / name)
        traced = torch_neuronx.trace(function, example, compiler_workdir=kept, compiler_args=list(flags))

        def run(tensors: Tensors) -> Tensors:
            outputs = traced(*(tensor.cpu() for tensor in tensors))
            return [outputs] if isinstance(outputs, torch.Tensor) else outputs

        return Graph(run)

    return trace


@dataclass(frozen=True)
class Stage:
    """A stage to compile. `call` runs it on inputs, with or without taps, with the tensors of `module`.

    Tracing uses `others`, which have the same shapes as `inputs`.
    """

    module: nn.Module
    inputs: Tensors
    others: Tensors
    call: Callable[[Tensors, bool], Taps]

    def compiled(self, trace: Trace, with_taps: bool) -> Taps:
        """The stage's taps, computed from its inputs by a graph that was traced on other values."""
        names, graph = self.traced(trace, with_taps, self.others)
        outputs = graph.run([*self._weights.values(), *self.inputs])
        return dict(zip(names, outputs, strict=True))

    @property
    def _weights(self) -> dict[str, torch.Tensor]:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: tensor.detach() for name, tensor in tensors if not tensor.is_meta}

    def traced(self, trace: Trace, with_taps: bool, inputs: Tensors) -> tuple[list[str], Graph]:
        """Returns the names of the outputs, and the graph."""
        weights = self._weights
        names: list[str] = []

        def function(*tensors: torch.Tensor) -> Tensors:
            own = dict(zip(weights, tensors, strict=False))
            taps = torch.func.functional_call(
                _Called(self, with_taps),
                {f"module.{name}": tensor for name, tensor in own.items()},
                tensors[len(own) :],
            )
            names[:] = taps
            return tuple(taps.values())

        return names, trace(function, [*weights.values(), *inputs], "taps" if with_taps else "plain")


class _Called(nn.Module):
    """A stage as the call of a module, so that `functional_call` can replace its tensors."""

    def __init__(self, stage: Stage, with_taps: bool) -> None:
        super().__init__()
        self.module, self.call, self.with_taps = stage.module, stage.call, with_taps

    def forward(self, *inputs: torch.Tensor) -> Taps:
        return self.call(inputs, self.with_taps)


def describe(stage: Stage, compiled: Taps, eager: Taps) -> dict[str, Any]:
    """Describes what tracing and compiling changed, as JSON.

    `change` is the relative L2 of each float tap from `eager` to `compiled` (null if the shapes or the non-finite
    values differ), and `dtypes` lists the taps whose dtype differs. The rest is what `graph_of` returns.

    Both `Taps` are on the host.
    """
    both = [name for name in eager if name in compiled]
    facts, _ = graph_of(stage)
    return {
        "change": {
            name: relative_change(compiled[name], eager[name]) for name in both if eager[name].is_floating_point()
        },
        "dtypes": {
            name: [dtype_name(eager[name]), dtype_name(compiled[name])]
            for name in both
            if eager[name].dtype != compiled[name].dtype
        },
        **facts,
    }


def relative_change(tensor: torch.Tensor, reference: torch.Tensor) -> float | None:
    """The relative L2 of `tensor` against `reference` over the elements where both are finite.

    None if their shapes differ, or the places and signs of NaN and Inf. Both are on the host.
    """
    if tensor.shape != reference.shape:
        return None
    if tensor.dtype == reference.dtype and torch.equal(tensor, reference):
        return 0.0  # skips the fp64 copies, which are large for logits
    tensor, reference = tensor.double(), reference.double()
    finite = tensor.isfinite() & reference.isfinite()
    if not torch.equal(tensor[~finite].nan_to_num(0.5), reference[~finite].nan_to_num(0.5)):
        return None
    return float((tensor - reference)[finite].norm() / reference[finite].norm().clamp_min(1e-300))


def graph_of(stage: Stage) -> tuple[dict[str, Any], str]:
    """Describes what tracing alone shows about a stage, as JSON, and returns the digest of its graph.

    `constants` are the constants in the graph that are more than one number. `depends_on_values` says whether tracing
    the same stage on other values gives another graph.
    """
    (_, graph), (_, other) = (stage.traced(trace_xla, False, inputs) for inputs in (stage.inputs, stage.others))
    assert graph.digest is not None
    constants = [_constant(tensor, stage.module) for tensor in graph.constants if tensor.numel() > 1]
    return {"constants": constants, "depends_on_values": graph.digest != other.digest}, graph.digest


def _constant(tensor: torch.Tensor, module: nn.Module) -> dict[str, Any]:
    host = tensor.cpu()
    names = (name for name, other in _attributes(module) if _is_equal(host, other))
    return {"name": next(names, None), "dtype": dtype_name(tensor), "shape": list(tensor.shape)}


def _attributes(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors that modules store as plain attributes, with their dotted names."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if isinstance(value, torch.Tensor) and not value.is_meta:
                yield ".".join(filter(None, (path, name))), value


def _is_equal(host: torch.Tensor, other: torch.Tensor) -> bool:
    return host.shape == other.shape and torch.equal(host.double(), other.cpu().double())


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

"""Runs a stage of the port on its device and writes its taps: isolated, in a chain, or teacher-forced."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerproof.distributed import process_group
from layerproof.errors import StageError
from layerproof.model import handed
from layerproof.model.handed import StageInput
from layerproof.model.stages import layer_of
from layerproof.port import compiled, shards
from layerproof.port.contract import Patch, Taps
from layerproof.port.prepare import StageRun, in_dtype, prepare_stage
from layerproof.port.runner import Runner
from layerproof.taps import OUT, PAD_ON_THE_RIGHT, Place, forward_place, in_order, is_choice, is_output, locating
from layerproof.tensors import hdf5

log = logging.getLogger(__name__)

BF16 = 2.0**-8
"""Precision of bf16: how far two graphs of a stage may be apart."""
OTHER_EXPERTS = 2.0**-5
"""A token whose output moves by more than this share of it goes to other experts."""
COMPILER_FILES = Path(".layerproof/neuron").absolute()  # before a port changes the directory
"""Folder for the files of Neuron's compiler for each stage: its log, and the graph that it compiled."""


def make_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: StageInput | None, output: Path
) -> dict[str, Any]:
    """Runs a stage of the port twice, without and with taps, and writes `port/TAP` and how its weights were converted.

    `port/out` is the output of the run without taps, as a user ships it. The two runs must agree: bit for bit, or at
    least within the precision of bf16 (relative L2 below 2^-8). Otherwise the taps do not show what the stage computes.

    The two runs are two graphs, and the first is exactly the shipped one. In a single graph, XLA's CPU compiler would
    share and keep whatever both runs compute from the weights alone, such as fp32 copies of all experts, so a layer at
    full size would take twice its memory.

    With `port.compile`, it writes the outputs of the compiled graph, and how they differ from the stage run without
    compiling.

    Returns facts for the record: the device, the stage's signature as `kind`, and how many graphs were compiled.

    Raises:
        StageError: if the port fails on this stage, or taps change its output.
    """
    compilations = _compilations()
    ready = prepare_stage(StageRun.on_device(runner, stage, description, stage_input))
    documents: dict[str, Any] = {hdf5.CONVERSION: ready.conversion}
    log.info("port/%s: weights converted, compiles and runs without taps", stage)
    with torch.no_grad():
        pending = ready.forward(with_taps=False)
        graph = compiled.graph_digest(list(pending.values()), ready.given)
        plain = _on_host(pending)
        log.info("port/%s: compiles and runs with taps", stage)
        with locating() as places:
            tapped = _on_host(ready.forward(with_taps=True))
        if runner.port and (place := forward_place(ready.module)):
            places.setdefault(OUT, place)
        if runner.patch:
            places = _in_patch(places, runner.patch, ready.module)
        documents[hdf5.PLACES] = {name: place.as_json() for name, place in places.items()}
        change = _check_taps(stage, plain, tapped, lambda: _on_host(ready.forward(with_taps=False)))
        if trace := _trace(runner, output):
            log.info("port/%s: compiles as it is shipped", stage)
            shipped = ready.to_compile()
            eager = tapped | plain
            plain, tapped = (_on_host(shipped.compiled(trace, with_taps)) for with_taps in (False, True))
            change = _check_taps(stage, plain, tapped, lambda: _on_host(shipped.compiled(trace, with_taps=False)))
            documents[hdf5.COMPILED] = compiled.describe(shipped, tapped | plain, eager)
    facts = {"device": runner.environment.hardware, "kind": ready.signature, "taps_change_output": change}
    facts |= {"backend": runner.settings.port.backend}
    attributes: dict[str, Any] = {"stage": stage, **facts, **({"graph": graph} if graph else {})}
    moved = _other_choices(plain, tapped)
    if moved is not None:
        seq = runner.tokens.ids.shape[1]
        plain, attributes["other_choices"] = tapped, moved[:, :seq].flatten().nonzero().flatten().tolist()
    _write(runner, output, tapped | plain, attributes, documents)
    return {**facts, "compilations": _compilations() - compilations}


def _in_patch(places: Mapping[str, Place], patch: Patch, model: nn.Module) -> Mapping[str, Place]:
    """The places of taps, with the function `patch` in place of what it was given: only the patch may be wrong."""
    code = getattr(inspect.unwrap(patch), "__code__", None)
    if code is None:
        return places
    from transformers import PreTrainedModel  # which a port of its own does without

    given = Path(inspect.getfile(PreTrainedModel)).parent, Path(inspect.getfile(type(model)))

    def is_given(place: Place) -> bool:
        return any(Path(place.file).absolute().is_relative_to(path) for path in given)

    return {name: Place.of_code(code) if is_given(place) else place for name, place in places.items()}


def _check_taps(stage: str, plain: Taps, tapped: Taps, run_again: Callable[[], Taps]) -> float:
    """The relative L2 by which taps change the output.

    Raises:
        StageError: if it exceeds the precision of bf16, but for tokens with near-ties.
    """
    change = compiled.relative_change(tapped[OUT], plain[OUT])
    if change is not None and (change <= BF16 or _other_choices(plain, tapped) is not None):
        return change
    alone = process_group.world_size() == 1  # ranks must run again together or not at all
    again = compiled.relative_change(run_again()[OUT], plain[OUT]) if alone else 0.0
    if again != 0:
        raise StageError(
            f"{stage}: two runs on the same input differ ({_by_what(again)}), so the port is not deterministic. "
            "Remove what is random, such as dropout, or seed it in forward."
        )
    raise StageError(
        f"{stage}: taps change the stage's output ({_by_what(change)}). Make forward compute the same without taps."
    )


def _other_choices(plain: Taps, tapped: Taps) -> torch.Tensor | None:
    """Marks the tokens, bool [batch, seq], at which the stage seems to choose otherwise with taps.

    Returns None if no token does, or if these tokens do not account for the whole change. Two graphs round differently, so
    a router may break a near-tie the other way. The comparison then takes the output of the run with taps, which goes with
    the choices that it hands over, and refuses tokens at which the golden shows no near-tie.
    """
    with_taps, without = tapped[OUT], plain[OUT]
    if with_taps.shape != without.shape or with_taps.ndim < 3 or not any(map(is_choice, tapped)):
        return None
    mine, its = with_taps.double().flatten(2), without.double().flatten(2)
    moved = (mine - its).norm(dim=2) > OTHER_EXPERTS * its.norm(dim=2)
    count = int(moved.sum())
    rest = compiled.relative_change(mine[~moved], its[~moved])
    explains = rest is not None and rest <= BF16 and count <= max(2, 0.02 * moved.numel())
    return moved if count and explains else None


def _by_what(change: float | None) -> str:
    return "its shape, or where it is NaN or Inf" if change is None else f"relative L2 {change:.2g}"


def _trace(runner: Runner, output: Path) -> compiled.Trace | None:
    """How to compile the port's stages, if at all. Each output has its own folder for the Neuron compiler's files."""
    if process_group.world_size() > 1:
        return None  # see trace_stage
    if runner.settings.port.compile == compiled.NEURON:
        folder = COMPILER_FILES / output.parent.name / output.stem
        return compiled.trace_neuron(runner.settings.port.compiler_flags, folder)
    return compiled.trace_xla if runner.settings.port.compile == compiled.XLA else None


def chain_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: StageInput | None, output: Path
) -> dict[str, Any]:
    """Runs a stage as it is shipped, without taps, and writes `port/out`, the only tap that a chain compares.

    Returns facts for the record, as `make_stage` does.

    Raises:
        StageError: if the port fails on this stage.
    """
    compilations = _compilations()
    ready = prepare_stage(StageRun.on_device(runner, stage, description, stage_input))
    with torch.no_grad():
        if trace := _trace(runner, output):
            plain = _on_host(ready.to_compile().compiled(trace, with_taps=False))
        else:
            plain = _on_host(ready.forward(with_taps=False))
    facts = {"device": runner.environment.hardware, "kind": ready.signature}
    outputs = {name: hdf5.to_array(hdf5.storable(tensor)) for name, tensor in plain.items()}
    previous = stage_input.file if stage_input else None
    documents = {hdf5.SOURCES: handed.sources(previous, output, "port", outputs)}
    _write(runner, output, plain, {"stage": stage, **facts}, documents)
    return {**facts, "compilations": _compilations() - compilations}


def trace_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: StageInput | None
) -> tuple[dict[str, Any], str]:
    """Traces a stage on one of several ranks, and returns what `compiled.graph_of` returns.

    It does not run the graph: XLA's client for the CPU does not know the other processes.

    Raises:
        StageError: if the port fails on this stage.
    """
    ready = prepare_stage(StageRun.on_device(runner, stage, description, stage_input))
    with torch.no_grad():
        ready.forward(with_taps=False)  # some ports create a buffer at their first call; computes nothing else
        return compiled.graph_of(ready.to_compile())


def teacher_force_stage(
    runner: Runner,
    stage: str,
    description: Mapping[str, Any],
    stage_input: StageInput | None,
    golden: Mapping[str, hdf5.Tensor],
    output: Path,
) -> None:
    """Runs a stage of the port teacher-forced, with the golden's taps in place of its own, and writes `port/TAP`.

    Each tap is then computed from right ones, so every mistake shows at its own tap and nowhere else.

    Raises:
        StageError: if the port fails on this stage.
    """
    job = StageRun.on_device(runner, stage, description, stage_input)
    ready = prepare_stage(job)
    with torch.no_grad():
        if process_group.world_size() > 1:
            golden = _parts(golden, _on_host(ready.forward(with_taps=True)), runner)
        forced = {name: hdf5.to_torch(tensor).to(job.x.device) for name, tensor in golden.items() if name != OUT}
        found = _on_host(ready.forward(with_taps=True, forced=forced))
    _write(runner, output, found, {"stage": stage})


def _parts(golden: Mapping[str, hdf5.Tensor], found: Taps, runner: Runner) -> dict[str, hdf5.Tensor]:
    """This rank's parts of the golden's taps, judged by the shapes of the port's own taps."""
    rank, axes = torch.distributed.get_rank(), runner.settings.parallel.of_stage
    own = {name: shards.part_key(hdf5.to_array(hdf5.storable(tensor))) for name, tensor in found.items()}
    of_ranks = process_group.of_all_ranks(own)
    names = set(golden).intersection(*of_ranks)
    said, seq = runner.placements, runner.tokens.valid.shape[1]
    return {
        name: shards.part(name, golden[name], [one[name] for one in of_ranks], rank, axes, seq, said) for name in names
    }


def _write(
    runner: Runner,
    output: Path,
    found: Taps,
    attributes: Mapping[str, Any],
    documents: Mapping[str, Any] | None = None,
) -> None:
    if os.getpid() != runner.process:
        os._exit(0)  # a copy of the process that the port's code forked: the first one writes
    kept = _without_padding(found, runner)
    padded = {}
    if kept is not found:
        padded = {"positions": found[OUT].shape[1]}
        if not kept[OUT][:, 0].any() and found[OUT][:, -1].any():
            raise StageError(
                f"{attributes['stage']}: out has {found[OUT].shape[1]} positions for {kept[OUT].shape[1]} tokens, and is "
                f"zero at the first: the prompts lie behind the padding. {PAD_ON_THE_RIGHT}"
            )
    taps = {name: hdf5.to_array(hdf5.storable(tensor)) for name, tensor in kept.items()}
    ordered = {name: taps[name] for name in in_order(taps)}
    if runner.placements:
        documents = {**(documents or {}), hdf5.PLACEMENTS: runner.placements}
    attributes = {**attributes, **padded}
    hdf5.write(output, {"port": ordered}, valid=runner.tokens.valid, attributes=attributes, documents=documents)


def run_chain(
    runner: Runner,
    descriptions: Mapping[str, Mapping[str, Any]],
    stage_input: StageInput | None,
    stages: Sequence[str],
) -> hdf5.Tensor:
    """Runs stages on each other's outputs as one graph without taps, as a whole model is compiled.

    `stage_input` is that of the first stage, with all that is handed over to any of them. Returns the output of the last
    stage.

    Raises:
        StageError: if the port fails on a stage.
    """
    job = StageRun.on_device(runner, stages[0], descriptions[stages[0]], stage_input)
    with torch.no_grad():
        output, given = job.x, dict(job.handed)
        last_layer = stages[0]
        for stage in stages:
            last_layer = stage if layer_of(stage) is not None else last_layer
            job = replace(job, stage=stage, description=descriptions[stage], handed=handed.for_stage(given, last_layer))
            outputs = _whole(prepare_stage(job).forward(with_taps=False), runner)
            outputs = dict(_without_padding(outputs, runner))
            output = outputs.pop(OUT)
            given = handed.after(given, handed.of_outputs(outputs))
            job = replace(job, x=in_dtype(output, runner))  # as a stage reads it from a file
        return hdf5.to_array(hdf5.storable(_on_host({OUT: output})[OUT]))


def _whole(outputs: Taps, runner: Runner) -> Taps:
    """A stage's outputs for the next one, which is given all tokens: put together if ranks have parts of them."""
    axes = runner.settings.parallel.of_stage
    if process_group.world_size() == 1 or (axes["cp"] == 1 and not runner.placements):
        return outputs
    device = outputs[OUT].device
    own = {name: hdf5.to_array(hdf5.storable(tensor)) for name, tensor in _on_host(outputs).items()}
    of_ranks = process_group.of_all_ranks(own)

    def whole(name: str) -> torch.Tensor:
        parts = [one[name] for one in of_ranks]
        return hdf5.to_torch(shards.whole(name, parts, axes, runner.tokens.valid, runner.placements)).to(device)

    return {name: whole(name) for name in outputs}


def _without_padding(found: Taps, runner: Runner) -> Taps:
    """A stage's outputs without positions beyond the prompts, which a port computes that is compiled for longer ones."""
    batch, seq = runner.tokens.ids.shape
    out = found[OUT]
    if out.ndim < 3 or out.shape[0] != batch or out.shape[1] <= seq:
        return found
    padded = out.shape[:2]
    return {name: one[:, :seq] if is_output(name) and one.shape[:2] == padded else one for name, one in found.items()}


def _on_host(taps: Taps) -> Taps:
    """Cuts the graph at these tensors, runs it and copies them to the host."""
    if any(tensor.device.type == "xla" for tensor in taps.values()):
        import torch_xla

        torch_xla.sync()
    return {name: tensor.cpu() for name, tensor in taps.items()}


def _compilations() -> int:
    """Graphs that XLA has compiled in this process, by its own metrics."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0

"""The port: one stage of the implementation under test, on an XLA device, as its user would ship it.

A port is one Python file or dotted module with

    build(stage: Stage) -> torch.nn.Module
        The stage as a module; on the meta device is fine. Its forward takes `(x, positions, valid)`: `x` is the previous
        stage's output [batch, seq, hidden] in `stage.dtype` (token ids int64 [batch, seq] for `embed`), `positions` int64
        [seq] and `valid` bool [batch, seq] (False for padding), and returns the stage's output.
    convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] or an iterator of its items
        The stage's tensors as the module's state dict. `weights` are those on disk, by their names there, each read when it
        is asked for. Of items that are yielded one by one, each is on the device before the next one is made.
    TAPS: dict[str, str]    (optional)
        Canonical tap by dotted name of the submodule whose output it is. What is no module's output is handed over inside
        forward with `layerproof.taps.tap`.

Weights are inputs of the traced graph, so all stages of one kind share one compilation.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol, cast

import torch
from torch import nn

from layerproof import checkpoint, compiled, distributed, provenance, shards, tensors
from layerproof.errors import StageError
from layerproof.files import digest_of
from layerproof.fingerprint import unrecorded
from layerproof.stages import EMBED, layer_of
from layerproof.taps import OUT, check_canonical, collecting, in_order, tap
from layerproof.tokens import Tokens

Taps = dict[str, torch.Tensor]

COMPILER_FILES = Path(".layerproof/neuron").absolute()  # before a port changes the directory
"""Where what Neuron's compiler writes of each stage is kept: its log, and the graph that it was given."""


class Call(Protocol):
    """Runs a prepared stage: without taps, with them, or with them and `forced` ones going on in their place."""

    def __call__(
        self, inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None
    ) -> Taps: ...


@dataclass(frozen=True)
class Stage:
    """What a port is asked to build: `config` is the checkpoint's config.json, `options` the user's `port.options`, `shape`
    batch and sequence of what it will be given, and `checkpoint` the folder with all of it.
    """

    name: str
    layer: int | None
    config: Mapping[str, Any]
    dtype: torch.dtype
    options: Mapping[str, Any]
    shape: tuple[int, int]
    checkpoint: Path


class Port(Protocol):
    """A port: a user's module, or what stands for one."""

    def build(self, stage: Stage) -> nn.Module: ...

    def convert(
        self, stage: Stage, weights: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]: ...


@dataclass(frozen=True)
class Runner:
    """What the stages of one process share: the device, so that equal graphs are compiled once, and the port's code."""

    directory: Path
    tokens: Tokens
    settings: Mapping[str, Any]
    environment: distributed.Environment
    port: Port | None

    @classmethod
    def start(cls, directory: Path, tokens: Tokens, settings: Mapping[str, Any]) -> Runner:
        """Initialises the device, then imports the port, if that was not done, and has torch as it was after that.

        `settings` are the config's `port` with `trust_remote_code`.

        Raises:
            StageError: if the port cannot be imported.
        """
        with unrecorded():
            importlib.import_module("torch_xla")  # which takes long to record
        is_nxdi = settings["backend"] == "nxdi"
        on_cpu = distributed.is_on_host(settings["device"]) or (is_nxdi and settings["nxdi"]["cpu_mode"])
        if is_nxdi:
            os.environ["NXD_CPU_MODE"] = str(int(on_cpu))  # before anything of it is imported
        environment = distributed.initialise("cpu" if on_cpu else "xla", settings["device"])
        module, default_dtype = (None, torch.float32)
        if settings["backend"] != "transformers":
            module, default_dtype = _loaded(settings["module"])
        torch.set_default_dtype(default_dtype)
        return cls(directory, tokens, settings, environment, module and _port(settings, module))


def _port(settings: Mapping[str, Any], module: ModuleType) -> Port:
    """The port that a module is, or of which it holds the model."""
    if settings["backend"] == "nxdi":
        from layerproof import nxdi

        return nxdi.load(module, settings["nxdi"])
    check_module(settings["module"], module)
    return cast("Port", module)


def load_module(name: str) -> ModuleType:
    """Imports a module by the path of its Python file or by its dotted name.

    Raises:
        StageError: if it cannot be imported; names the file and, if it has one, the line.
    """
    try:
        if name.endswith(".py"):
            path = Path(name).resolve()
            # A name of its own: a port called torch.py must not stand for torch.
            spec = importlib.util.spec_from_file_location(f"layerproof_port_{path.stem}", path)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            sys.path.insert(0, str(path.parent))
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(name)
    except SyntaxError as error:
        raise StageError(f"{error.filename}: line {error.lineno}: {error.msg}. Correct port.module.") from error
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name != name else None
        remedy = f"Install {missing}, or name its folder in PYTHONPATH." if missing else "Correct port.module."
        raise StageError(f"{name}: cannot be imported ({type(error).__name__}: {error}). {remedy}") from error
    return module


def check_module(name: str, module: ModuleType) -> None:
    """Whether a module is a port.

    Raises:
        StageError: if it lacks `build` or `convert`, or its TAPS are not what docs/ports.md says.
    """
    for function in ("build", "convert"):
        if not callable(getattr(module, function, None)):
            raise StageError(f"{name}: has no function {function}. See docs/ports.md for what a port defines.")
    taps = getattr(module, "TAPS", {})
    if not isinstance(taps, Mapping) or not all(isinstance(text, str) for text in (*taps, *taps.values())):
        raise StageError(f'{name}: TAPS must map canonical taps to submodules: {{"attn.q": "attention.q_proj"}}.')
    check_canonical(taps, f"{name}: TAPS")


def _loaded(name: str) -> tuple[ModuleType, torch.dtype]:
    """A port, imported by the first stage of a process that needs it as it is, and the default dtype that this left."""
    path = Path(name)
    return _load_version(name, path.stat().st_mtime_ns if name.endswith(".py") and path.exists() else None)


@functools.cache
def _load_version(name: str, mtime_ns: int | None) -> tuple[ModuleType, torch.dtype]:
    torch.set_default_dtype(torch.float32)
    return load_module(name), torch.get_default_dtype()


def make_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: tensors.Tensor | None, output: Path
) -> dict[str, Any]:
    """Runs a stage of the port twice, without and with taps, and writes `port/TAP`, and how its weights were converted.

    `port/out` is the output of the run without taps, as a user ships it. The two must agree: bit for bit, or at least as
    well as bf16 can tell (relative L2 below 2^-8), or the taps do not show what the stage computes.

    They are two graphs, the first just as it is shipped. As one, compiled once, XLA's CPU compiler shares what both make of
    the weights alone, such as fp32 copies of all experts, and keeps it: a layer at full size takes twice its memory.

    With `port.compile` what is written is what the stage gives as a compiled graph, and how that differs from the stage run
    as it is.

    Returns facts for the record: the device, the kind of stage, how many graphs were compiled.

    Raises:
        StageError: if the port fails on this stage, or taps change its output.
    """
    compilations = _compilations()
    ready = _prepare(_Job.on_device(runner, stage, description, stage_input))
    documents = {tensors.CONVERSION: ready.conversion}
    with torch.no_grad():
        plain, tapped = (_on_host(ready.forward(with_taps)) for with_taps in (False, True))
        change = _check_taps(stage, plain, tapped, lambda: _on_host(ready.forward(with_taps=False)))
        if trace := _trace(runner, output):
            shipped = ready.to_compile()
            eager = tapped | plain
            plain, tapped = (_on_host(shipped.compiled(trace, with_taps)) for with_taps in (False, True))
            change = _check_taps(stage, plain, tapped, lambda: _on_host(shipped.compiled(trace, with_taps=False)))
            documents[tensors.COMPILED] = compiled.describe(shipped, tapped | plain, eager)
    facts = {"device": runner.environment.hardware, "kind": ready.kind, "taps_change_output": change}
    _write(runner, output, tapped | plain, {"stage": stage, **facts}, documents)
    return {**facts, "compilations": _compilations() - compilations}


def _check_taps(stage: str, plain: Taps, tapped: Taps, run_again: Callable[[], Taps]) -> float:
    """The relative L2 by which taps change the output.

    Raises:
        StageError: if that is more than bf16 can tell.
    """
    change = compiled.relative_change(tapped[OUT], plain[OUT])
    if change is not None and change <= 2**-8:
        return change
    alone = distributed.world_size() == 1  # ranks run again all or none
    again = compiled.relative_change(run_again()[OUT], plain[OUT]) if alone else 0.0
    if again != 0:
        raise StageError(
            f"{stage}: two runs on the same input differ ({_by_what(again)}); the port is not deterministic. "
            "Take out what is random, such as dropout, or give it a seed in forward."
        )
    raise StageError(f"{stage}: taps change the stage's output ({_by_what(change)}); they cannot be trusted.")


def _by_what(change: float | None) -> str:
    return "its shape, or where it is NaN or Inf" if change is None else f"relative L2 {change:.2g}"


def _trace(runner: Runner, output: Path) -> compiled.Trace | None:
    """How the port's stages are compiled, if they are. What Neuron's compiler writes is kept apart for each output."""
    if distributed.world_size() > 1:
        return None  # see trace_stage
    if runner.settings["compile"] == compiled.NEURON:
        folder = COMPILER_FILES / output.parent.name / output.stem
        return compiled.trace_neuron(runner.settings["compiler_flags"], folder)
    return compiled.trace_xla if runner.settings["compile"] == compiled.XLA else None


def chain_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: tensors.Tensor | None, output: Path
) -> dict[str, Any]:
    """Runs a stage as it is shipped, without taps, and writes `port/out`, which is all of a chain that is compared.

    Returns facts for the record, as `make_stage` does.

    Raises:
        StageError: if the port fails on this stage.
    """
    compilations = _compilations()
    ready = _prepare(_Job.on_device(runner, stage, description, stage_input))
    with torch.no_grad():
        if trace := _trace(runner, output):
            plain = _on_host(ready.to_compile().compiled(trace, with_taps=False))
        else:
            plain = _on_host(ready.forward(with_taps=False))
    facts = {"device": runner.environment.hardware, "kind": ready.kind}
    _write(runner, output, plain, {"stage": stage, **facts})
    return {**facts, "compilations": _compilations() - compilations}


def trace_stage(
    runner: Runner, stage: str, description: Mapping[str, Any], stage_input: tensors.Tensor | None
) -> tuple[dict[str, Any], str]:
    """Traces a stage on one of several ranks, as `compiled.graph_of` tells. Its graph is not run: XLA's client for the CPU
    knows no other process.

    Raises:
        StageError: if the port fails on this stage.
    """
    ready = _prepare(_Job.on_device(runner, stage, description, stage_input))
    with torch.no_grad():
        ready.forward(with_taps=False)  # some make a buffer at their first call; of it nothing is computed
        return compiled.graph_of(ready.to_compile())


def force_stage(
    runner: Runner,
    stage: str,
    description: Mapping[str, Any],
    stage_input: tensors.Tensor | None,
    golden: Mapping[str, tensors.Tensor],
    output: Path,
) -> None:
    """Runs a stage of the port with the golden's tap in place of each of its own, and writes `port/TAP`.

    Each tap is then made from right ones, so that every mistake shows at its own tap and nowhere else.

    Raises:
        StageError: if the port fails on this stage.
    """
    job = _Job.on_device(runner, stage, description, stage_input)
    ready = _prepare(job)
    with torch.no_grad():
        if distributed.world_size() > 1:
            golden = _parts(golden, _on_host(ready.forward(with_taps=True)))
        forced = {name: tensors.to_torch(tensor).to(job.x.device) for name, tensor in golden.items() if name != OUT}
        found = _on_host(ready.forward(with_taps=True, forced=forced))
    _write(runner, output, found, {"stage": stage})


def _parts(golden: Mapping[str, tensors.Tensor], found: Taps) -> dict[str, tensors.Tensor]:
    """What this rank holds of the golden's taps, by the shapes of its own."""
    rank = torch.distributed.get_rank()
    own = {name: shards.held(tensors.to_array(tensors.storable(tensor))) for name, tensor in found.items()}
    of_ranks = distributed.of_all_ranks(own)
    names = set(golden).intersection(*of_ranks)
    return {name: shards.part(name, golden[name], [one[name] for one in of_ranks], rank) for name in names}


def _write(
    runner: Runner,
    output: Path,
    found: Taps,
    attributes: Mapping[str, Any],
    documents: Mapping[str, Any] | None = None,
) -> None:
    taps = {name: tensors.to_array(tensors.storable(found[name])) for name in in_order(found)}
    tensors.write(output, {"port": taps}, valid=runner.tokens.valid, attributes=attributes, documents=documents)


def run_chain(
    runner: Runner,
    descriptions: Mapping[str, Mapping[str, Any]],
    stage_input: tensors.Tensor | None,
    stages: Sequence[str],
) -> tensors.Tensor:
    """Runs stages one on the output of the other as one graph without taps, as a whole model is compiled, and returns the
    output of the last.

    Raises:
        StageError: if the port fails on a stage.
    """
    job = _Job.on_device(runner, stages[0], descriptions[stages[0]], stage_input)
    with torch.no_grad():
        output = job.x
        for stage in stages:
            job = replace(job, stage=stage, description=descriptions[stage])
            output = _prepare(job).forward(with_taps=False)[OUT]
            job = replace(job, x=output.to(job.dtype))  # as a stage gets it from a file
        return tensors.to_array(tensors.storable(_on_host({OUT: output})[OUT]))


@dataclass(frozen=True)
class _Job:
    """One stage to run: `x` is its input in the port's dtype, token ids for `embed`; the tensors are on the device."""

    runner: Runner
    stage: str
    description: Mapping[str, Any]
    dtype: torch.dtype
    ids: torch.Tensor
    valid: torch.Tensor
    x: torch.Tensor

    @classmethod
    def on_device(
        cls, runner: Runner, stage: str, description: Mapping[str, Any], stage_input: tensors.Tensor | None
    ) -> _Job:
        device = runner.environment.device
        dtype = getattr(torch, runner.settings["dtype"])
        ids = torch.from_numpy(runner.tokens.ids).to(device)
        valid = torch.from_numpy(runner.tokens.valid).to(device)
        x = ids if stage_input is None else tensors.to_torch(stage_input).to(device).to(dtype)
        return cls(runner, stage, description, dtype, ids, valid, x)


@dataclass(frozen=True)
class _Ready:
    """A stage that is ready to run: `call` runs it on inputs of its own, with or without taps, with the tensors of `module`.
    `others` makes inputs of the same shapes, to trace it on. Its kind, and how its weights were converted.

    `conversion` is JSON: `reads`, how often each tensor on disk was read; and by parameter of the stage its `dtype`,
    `shape`, the names on disk that it is made `of`, whether it is `transposed`, whether it is `initial`, as `build` left it,
    and whether it is `constant`, made by `convert` of nothing on disk.
    """

    module: nn.Module
    inputs: Sequence[torch.Tensor]
    others: Callable[[], Sequence[torch.Tensor]]
    call: Call
    kind: str
    conversion: Mapping[str, Any]

    def forward(self, with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        return self.call(self.inputs, with_taps, forced)

    def to_compile(self) -> compiled.Stage:
        return compiled.Stage(self.module, self.inputs, self.others(), self.call)


def _prepare(job: _Job) -> _Ready:
    torch.manual_seed(0)  # what a port draws, such as weights that it does not load, is the same whatever ran before
    if job.x.device.type == "xla":
        import torch_xla

        torch_xla.manual_seed(0)
    return (_prepare_port if job.runner.port else _prepare_transformers)(job)


def _prepare_port(job: _Job) -> _Ready:
    port, directory = job.runner.port, job.runner.directory
    assert port is not None
    config, shape = checkpoint.read_config(directory), (job.ids.shape[0], job.ids.shape[1])
    stage = Stage(job.stage, layer_of(job.stage), config, job.dtype, job.runner.settings["options"], shape, directory)
    module = port.build(stage)
    if not isinstance(module, nn.Module):
        raise StageError(f"{job.stage}: build() returns {type(module).__name__}, not a torch.nn.Module.")
    module.eval()
    tracing = provenance.Tracing()
    on_disk = checkpoint.StageWeights(checkpoint.tensors_of_stage(directory, job.description))
    weights = provenance.Watched(on_disk, tracing)
    built = dict(module.named_parameters()) | dict(module.named_buffers())
    state, parameters = {}, {}
    versions: dict[int, int] = {}
    with tracing:
        for name, tensor in _items(job.stage, port.convert(stage, weights)):
            parameters[name] = _described(tensor, tracing, built.get(name))
            state[name] = _on_device(tensor, job.x.device, job.runner.environment.hardware, versions)
    try:
        module.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise StageError(f"{job.stage}: convert() and build() disagree: {' '.join(str(error).split())}") from error
    left = [key for key, tensor in (*module.named_parameters(), *module.named_buffers()) if tensor.is_meta]
    if left:
        raise StageError(
            f"{job.stage}: {', '.join(left)} has no value after loading. Make it in build() or in convert()."
        )
    module.to(job.x.device)  # what is not in its state dict
    positions = torch.arange(job.ids.shape[1]).to(job.ids.device)

    def call(inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        with collecting(forced) as taps, _module_taps(module, getattr(port, "TAPS", {}) if with_taps else {}):
            output = module(*inputs)
        if not isinstance(output, torch.Tensor):
            raise StageError(f"{job.stage}: the port returns {type(output).__name__}, not one tensor.")
        return (taps if with_taps else {}) | {OUT: output}

    conversion = {"reads": weights.reads, "parameters": parameters}

    def others() -> Sequence[torch.Tensor]:
        return job.x.flip(1), positions, torch.ones_like(job.valid)

    return _Ready(module, (job.x, positions, job.valid), others, call, _kind(module, job.x), conversion)


def _described(tensor: torch.Tensor, tracing: provenance.Tracing, built: torch.Tensor | None) -> dict[str, Any]:
    sources = tracing.sources(tensor)
    alike = built is not None and (built.device, built.dtype) == (tensor.device, tensor.dtype)
    is_initial = not sources and alike and torch.equal(cast("torch.Tensor", built).detach(), tensor)
    how = {"transposed": tracing.is_transposed(tensor), "initial": is_initial, "constant": tracing.is_constant(tensor)}
    return _entry(tensor, sources) | how


def _entry(tensor: torch.Tensor, sources: Iterable[str]) -> dict[str, Any]:
    held = {"dtype": tensors.dtype_name(tensor), "shape": list(tensor.shape)}
    return held | {"of": sorted(sources), "transposed": False, "initial": False, "constant": False}


def _prepare_transformers(job: _Job) -> _Ready:
    """The unmodified transformers stage. Only its experts run in a form of fixed shape, which compilers need."""
    with unrecorded():
        from layerproof import loading
        from layerproof.experts import STATIC_EXPERTS, register
        from layerproof.transformers_stage import run_stage, stage_module

    register()
    directory, trust = job.runner.directory, job.runner.settings["trust_remote_code"]
    model = loading.meta_stage(directory, job.stage, trust, job.dtype, experts_implementation=STATIC_EXPERTS)
    loading.load_stage(model, job.stage, directory, job.description, torch.device("cpu"))
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(job.ids.device))

    def call(inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        x, ids, valid = inputs
        return run_stage(model, job.stage, None if job.stage == EMBED else x, ids, valid, with_taps, forced)

    of: dict[str, list[str]] = {}
    for name, entry in job.description["tensors"].items():
        of.setdefault(entry["parameter"], []).append(name)
    parameters = {name: _entry(model.get_parameter_or_buffer(name), sources) for name, sources in of.items()}
    reads = dict.fromkeys(job.description["tensors"], 1)
    kind = _kind(stage_module(model, job.stage), job.x)

    def others() -> Sequence[torch.Tensor]:
        return job.x.flip(1), job.ids.flip(1), job.valid  # transformers leaves out the mask where there is no padding

    inputs = job.x, job.ids, job.valid
    return _Ready(model, inputs, others, call, kind, {"reads": reads, "parameters": parameters})


def _items(stage: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors that `convert` returned or yields.

    Raises:
        StageError: if it gives something else.
    """
    wrong = StageError(
        f"{stage}: convert() must return the module's state dict, a dict of tensors by name, or yield its items."
    )
    items = state.items() if isinstance(state, Mapping) else state
    if not isinstance(items, Iterable):
        raise wrong
    for item in items:
        if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[1], torch.Tensor):
            raise wrong
        yield item


def _on_device(
    tensor: torch.Tensor, device: torch.device, hardware: str, versions: MutableMapping[int, int]
) -> torch.Tensor:
    """The tensor on the XLA device; where that is the CPU it stays where it is, since a copy would take the memory twice.
    `versions` holds torch's count of writes into such memory, by address.

    Raises:
        StageError: if it is in memory that an earlier one stays in, and was written into since.
    """
    from torch_xla.utils import dlpack

    aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0  # XLA's own buffers begin so
    is_float = tensor.is_floating_point() and tensor.itemsize > 1  # DLPack has no float8
    if not (hardware == "CPU" and tensor.device.type == "cpu" and is_float and tensor.numel() and aligned):
        return tensor.to(device)
    version = 0 if tensor.is_inference() else tensor._version
    if versions.setdefault(tensor.data_ptr(), version) != version:
        raise StageError("convert() yields memory again that it wrote over. Yield each tensor in memory of its own.")
    return dlpack.from_dlpack(tensor.detach())


@contextlib.contextmanager
def _module_taps(module: nn.Module, taps: Mapping[str, str]) -> Iterator[None]:
    """Taps the outputs of submodules by the port's table; names that this stage does not have are other kinds' names."""
    modules = dict(module.named_modules())
    handles = [modules[path].register_forward_hook(_hook(name)) for name, path in taps.items() if path in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
    def hand_over(module: nn.Module, args: Any, output: Any) -> Any:
        return tap(name, output)

    return hand_over


def _on_host(taps: Taps) -> Taps:
    """Cuts the graph at these tensors, runs it and copies them to the host."""
    if any(tensor.device.type == "xla" for tensor in taps.values()):
        import torch_xla

        torch_xla.sync()
    return {name: tensor.cpu() for name, tensor in taps.items()}


def _kind(module: nn.Module, x: torch.Tensor) -> str:
    """Names the kind of a stage: equal structure, shapes and dtypes mean an equal graph, whatever the weights."""
    structure = [[name, type(part).__qualname__] for name, part in module.named_modules()]
    shapes = [[name, str(part.dtype), list(part.shape)] for name, part in module.state_dict().items()]
    return digest_of([structure, shapes, str(x.dtype), list(x.shape)])[:12]


def _compilations() -> int:
    """Graphs that XLA has compiled in this process, by its own metrics."""
    from torch_xla.debug import metrics

    data = metrics.metric_data("CompileTime")
    return data[0] if data else 0

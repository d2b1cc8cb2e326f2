"""Prepares a stage of the port: builds its module, loads its weights onto the device, and makes it callable."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from layerproof.distributed import mesh, process_group
from layerproof.errors import StageError
from layerproof.files import digest_of
from layerproof.model import checkpoint
from layerproof.model.handed import StageInput
from layerproof.model.stages import EMBED, layer_of
from layerproof.port import compiled, provenance
from layerproof.port.contract import Call, Patch, Stage, Taps
from layerproof.port.runner import Runner
from layerproof.taps import OUT, collecting, forward_place, note_place, tap
from layerproof.tensors import hdf5

SAMPLED = 1000
"""About how many numbers of a tensor are looked at for a change."""


@dataclass(frozen=True)
class StageRun:
    """One stage to run. `x` is its input in the port's dtype, or token ids for `embed`. Tensors are on the device.

    `handed` is what it gets from earlier stages besides the output of the one before it.
    """

    runner: Runner
    stage: str
    description: Mapping[str, Any]
    dtype: torch.dtype
    ids: torch.Tensor
    valid: torch.Tensor
    x: torch.Tensor
    handed: Mapping[str, torch.Tensor]

    @classmethod
    def on_device(
        cls, runner: Runner, stage: str, description: Mapping[str, Any], stage_input: StageInput | None
    ) -> StageRun:
        device = runner.environment.device
        dtype = getattr(torch, runner.settings.port.dtype)
        ids = torch.from_numpy(runner.tokens.ids).to(device)
        valid = torch.from_numpy(runner.tokens.valid).to(device)
        if stage_input is None:
            return cls(runner, stage, description, dtype, ids, valid, ids, {})
        tensors = {name: hdf5.to_torch(one) for name, one in {OUT: stage_input.out, **stage_input.handed}.items()}
        moved = {name: in_dtype(one, runner).to(device) for name, one in tensors.items()}
        return cls(runner, stage, description, dtype, ids, valid, moved.pop(OUT), moved)


def in_dtype(tensor: torch.Tensor, runner: Runner) -> torch.Tensor:
    """What a stage is given, in the port's dtype; models of transformers themselves may keep their residuals in fp32."""
    dtype = getattr(torch, runner.settings.port.dtype)
    keeps_its_own = (
        not runner.port and dtype.itemsize < tensor.dtype.itemsize and runner.settings.golden.dtype != "float32"
    )
    return tensor.to(dtype) if tensor.is_floating_point() and not keeps_its_own else tensor


@dataclass(frozen=True)
class _Ready:
    """A stage that is ready to run. `call` runs it on inputs, with or without taps, with the tensors of `module`.

    `others` makes inputs of the same shapes for tracing. Stages with the same `signature` share graphs. `conversion`
    says how its weights were converted, as JSON: `reads` counts how often each tensor on disk was read, and
    `parameters` lists for each parameter of the stage its `dtype` and `shape`, the names on disk that it is made `of`,
    and whether it is `transposed`, `initial` (as `build` left it) or `constant` (made by `convert` from nothing on
    disk).
    """

    module: nn.Module
    inputs: Sequence[torch.Tensor]
    others: Callable[[], Sequence[torch.Tensor]]
    call: Call
    signature: str
    conversion: Mapping[str, Any]

    def forward(self, with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        return self.call(self.inputs, with_taps, forced)

    @property
    def given(self) -> list[torch.Tensor]:
        """What makes one stage differ from another of the same code: what was read from disk, and the inputs."""
        loaded = self.conversion["parameters"]
        own = (*self.module.named_parameters(), *self.module.named_buffers())
        return [*(tensor for name, tensor in own if name in loaded and loaded[name]["of"]), *self.inputs]

    def to_compile(self) -> compiled.Stage:
        return compiled.Stage(self.module, self.inputs, self.others(), self.call)


def prepare_stage(job: StageRun) -> _Ready:
    torch.manual_seed(0)  # random values, such as weights that are not loaded, must not depend on what ran before
    if job.x.device.type == "xla":
        import torch_xla

        torch_xla.manual_seed(0)
    ready = (_prepare_port if job.runner.port else _prepare_transformers)(job)
    is_narrow = job.dtype == torch.float16 and job.runner.environment.hardware == "CPU"
    return replace(ready, call=_with_wide_sums(ready.call)) if is_narrow else ready


class _WideSums(TorchFunctionMode):
    """Sums fp16 in fp32, as torch and accelerators do. XLA on the CPU sums it in fp16: squares of a norm may overflow.

    It is a mode of functions: under one of dispatch, XLA loses what is written into parts of a new tensor.
    """

    SUMS = frozenset(
        [
            *("linear", "matmul", "mm", "mv", "bmm", "addmm", "baddbmm", "einsum", "tensordot", "conv1d", "conv2d"),
            *("scaled_dot_product_attention", "grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
            *("sum", "mean", "var", "std", "var_mean", "std_mean", "norm", "vector_norm", "linalg_vector_norm"),
            *("normalize", "layer_norm", "group_norm"),
        ]
    )

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = args, kwargs or {}
        if getattr(func, "__name__", "").split(".")[0] in self.SUMS:
            tensors = [one for one in tree_leaves(given) if isinstance(one, torch.Tensor)]
            if any(one.dtype == torch.float16 and one.device.type == "xla" for one in tensors):
                positional, named = tree_map_only(torch.Tensor, _widened, given)
                wide = func(*positional, **named)
                return wide if named.get("dtype") else tree_map_only(torch.Tensor, torch.Tensor.half, wide)
        return func(*given[0], **given[1])


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.float16 else tensor


def _with_wide_sums(call: Call) -> Call:
    def wide(inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        with _WideSums():
            return call(inputs, with_taps, forced)

    return wide


def _prepare_port(job: StageRun) -> _Ready:
    port, directory = job.runner.port, job.runner.directory
    assert port is not None
    stage = _described_stage(job)
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
            f"{job.stage}: {', '.join(left)} has no value after loading. Create it in build() or convert()."
        )
    module.to(job.x.device)  # tensors outside its state dict
    positions = torch.arange(job.ids.shape[1]).to(job.ids.device)
    own_taps = job.runner.settings.golden.taps

    def call(inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        with (
            collecting(forced, own=own_taps) as taps,
            _module_taps(module, getattr(port, "TAPS", {}) if with_taps else {}),
        ):
            try:
                x, positions, valid, *others = inputs
                given = dict(zip(job.handed, others, strict=True))
                output = module({hdf5.HIDDEN_STATES: x, **given} if given else x, positions, valid)
            except Exception as error:
                if taps:
                    error.add_note(f"The last tap that it handed over is {[*taps][-1]}.")
                raise
        return (taps if with_taps else {}) | _outputs(job.stage, output)

    conversion = {"reads": weights.reads, "parameters": parameters}

    def others() -> Sequence[torch.Tensor]:
        return job.x.flip(1), positions, torch.ones_like(job.valid), *job.handed.values()

    inputs = job.x, positions, job.valid, *job.handed.values()
    return _Ready(module, inputs, others, call, _signature(module, job.x), conversion)


def _outputs(stage: str, output: Any) -> Taps:
    """What a port's forward returns, by tap: one tensor, or its hidden states and what it hands over to later stages.

    Raises:
        StageError: if it returned anything else.
    """
    if isinstance(output, torch.Tensor):
        return {OUT: output}
    if not isinstance(output, Mapping):
        raise StageError(
            f"{stage}: the port returns {type(output).__name__}, neither one tensor nor a dict of tensors by name."
        )
    if hdf5.HIDDEN_STATES not in output:
        raise StageError(f"{stage}: the port returns a dict without {hdf5.HIDDEN_STATES}, the stage's output.")
    wrong = [name for name, tensor in output.items() if not isinstance(tensor, torch.Tensor)]
    if wrong:
        raise StageError(f"{stage}: the port returns a dict whose {wrong[0]} is not a tensor.")
    others = {f"{OUT}/{name}": tensor for name, tensor in output.items() if name != hdf5.HIDDEN_STATES}
    return {**others, OUT: output[hdf5.HIDDEN_STATES]}


def _described(tensor: torch.Tensor, tracing: provenance.Tracing, built: torch.Tensor | None) -> dict[str, Any]:
    sources = tracing.sources(tensor)
    alike = built is not None and (built.device, built.dtype) == (tensor.device, tensor.dtype)
    is_initial = not sources and alike and torch.equal(cast("torch.Tensor", built).detach(), tensor)
    how = {"transposed": tracing.is_transposed(tensor), "initial": is_initial, "constant": tracing.is_constant(tensor)}
    return _entry(tensor, sources) | how


def _entry(tensor: torch.Tensor, sources: Iterable[str]) -> dict[str, Any]:
    held = {"dtype": hdf5.dtype_name(tensor), "shape": list(tensor.shape)}
    return held | {"of": sorted(sources), "transposed": False, "initial": False, "constant": False}


def _prepare_transformers(job: StageRun) -> _Ready:
    """The transformers stage, as the port's `patch` changes it; its experts run with static shapes, which compilers need."""
    from layerproof.golden.transformers_stage import run_stage, stage_module
    from layerproof.model import loading
    from layerproof.model.experts import STATIC_EXPERTS, register

    register()
    directory, trust = job.runner.directory, job.runner.settings.model.trust_remote_code
    model = loading.meta_stage(directory, job.stage, trust, job.dtype, experts_implementation=STATIC_EXPERTS)
    loading.load_stage(model, job.stage, directory, job.description, torch.device("cpu"))
    of: dict[str, list[str]] = {}
    for name, entry in job.description["tensors"].items():
        of.setdefault(entry["parameter"], []).append(name)
    parameters = {name: _entry(model.get_parameter_or_buffer(name), sources) for name, sources in of.items()}
    if job.runner.patch:
        _patch(job, job.runner.patch, model)
    if process_group.world_size() > 1:
        _split_by_plan(model, job.stage)
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(job.ids.device))
    own_taps = job.runner.settings.golden.taps

    def call(inputs: Sequence[torch.Tensor], with_taps: bool, forced: Mapping[str, torch.Tensor] | None = None) -> Taps:
        x, ids, valid, *others = inputs
        fed = None if job.stage == EMBED else x
        given = dict(zip(job.handed, others, strict=True))
        return run_stage(model, job.stage, fed, ids, valid, with_taps, forced, own_taps=own_taps, handed=given)

    reads = dict.fromkeys(job.description["tensors"], 1)
    signature = _signature(stage_module(model, job.stage), job.x)

    def others() -> Sequence[torch.Tensor]:
        # The mask stays, since transformers leaves it out without padding; and so does what may choose among tokens.
        return job.x.flip(1), job.ids.flip(1), job.valid, *job.handed.values()

    inputs = job.x, job.ids, job.valid, *job.handed.values()
    return _Ready(model, inputs, others, call, signature, {"reads": reads, "parameters": parameters})


def _split_by_plan(model: Any, stage: str) -> None:
    """Splits the stage's module over the ranks of tp, by the plan of transformers for the model.

    Raises:
        StageError: if the model has no plan.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from layerproof.golden.transformers_stage import stage_module

    part = {id(module) for module in stage_module(model, stage).modules()}
    names = {name for name, module in model.named_modules() if id(module) in part}
    plan, _, _ = model._resolve_parallel_plans(DistributedConfig(tp_size=process_group.world_size()))
    if not plan:
        raise StageError(f"{stage}: {type(model).__name__} has no tensor-parallel plan. Write parallel.tp: 1.")
    held = {name for name, _ in model.named_parameters() if name.rpartition(".")[0] in names}
    own = {name: style for name, style in plan.items() if name in names | held}
    apply_tensor_parallelism(model, mesh.launched("cpu").device, own)


def _patch(job: StageRun, patch: Patch, model: nn.Module) -> None:
    """Lets a port change the stage's module in a model of transformers.

    Raises:
        StageError: if it returns something, makes a module and changes nothing, or leaves a parameter of the stage without
            a value.
    """
    from layerproof.golden.transformers_stage import stage_module

    part = stage_module(cast("Any", model), job.stage)
    held, samples = _held(model), _samples(model)
    with _modules_made() as made:
        returned: Any = patch(model, part, _described_stage(job))
    if all(returned is not one for one in (None, part, model)):
        raise StageError(
            f"{job.stage}: patch() returns a {type(returned).__name__}, which nothing uses. Change part itself, such as by "
            "part.mlp = ..., and return nothing."
        )
    if made and _equal(operator.is_, held, _held(model)) and _equal(torch.equal, samples, _samples(model)):
        raise StageError(
            f"{job.stage}: patch() makes a {type(made[0]).__name__}, but changes nothing in the model. Put the module into "
            "part, such as by part.mlp = ...; part = ... only names it."
        )
    part = stage_module(cast("Any", model), job.stage)  # which a patch may replace as a whole
    left = [name for name, tensor in (*part.named_parameters(), *part.named_buffers()) if tensor.is_meta]
    if left:
        raise StageError(f"{job.stage}: patch() leaves {left[0]} without a value. Create it on the CPU.")


@contextlib.contextmanager
def _modules_made() -> Iterator[list[nn.Module]]:
    """Collects the modules that are made meanwhile."""
    made: list[nn.Module] = []
    plain = nn.Module.__init__

    def initialise(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        plain(self, *args, **kwargs)

    nn.Module.__init__ = initialise
    try:
        yield made
    finally:
        nn.Module.__init__ = plain


def _equal[T](same: Callable[[T, T], bool], before: Sequence[T], after: Sequence[T]) -> bool:
    return len(before) == len(after) and all(map(same, before, after))


def _held(model: nn.Module) -> list[Any]:
    """What a patch may put elsewhere: all that the modules of a model, their classes, its config and its file hold."""
    modules = list(model.modules())
    classes = dict.fromkeys(one for module in modules for one in type(module).__mro__)
    holders: list[Mapping[str, Any]] = [
        vars(model.config),
        vars(sys.modules[type(model).__module__]),
        *map(vars, classes),
    ]
    for module in modules:
        holders += [vars(module), *(value for value in vars(module).values() if isinstance(value, dict))]
    return [value for holder in holders for value in holder.values()]


def _samples(model: nn.Module) -> list[torch.Tensor]:
    """Some numbers of each tensor of a model, which a patch may have written to in place."""
    tensors = (tensor.detach() for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta)
    return [tensor.flatten()[:: max(1, tensor.numel() // SAMPLED)].clone() for tensor in tensors]


def _described_stage(job: StageRun) -> Stage:
    config, directory = checkpoint.read_config(job.runner.directory), job.runner.directory
    options = copy.deepcopy(job.runner.settings.port.options)  # a port may change what it is given
    shape = (job.ids.shape[0], job.ids.shape[1])
    return Stage(job.stage, layer_of(job.stage), config, job.dtype, options, shape, directory)


def _items(stage: str, state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the names and tensors that `convert` returned or yields.

    Raises:
        StageError: if it returned or yields anything else.
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
    """Moves a tensor to the XLA device. On the CPU it stays where it is: a copy would double the memory.

    `versions` maps the addresses of such memory to torch's count of writes into it.

    Raises:
        StageError: if an earlier tensor still uses this memory, and it was written to since.
    """
    from torch_xla.utils import dlpack

    aligned = tensor.is_contiguous() and tensor.data_ptr() % 64 == 0  # as XLA's own buffers are
    is_float = tensor.is_floating_point() and tensor.itemsize > 1  # DLPack has no float8
    if not (hardware == "CPU" and tensor.device.type == "cpu" and is_float and tensor.numel() and aligned):
        return tensor.to(device)
    version = 0 if tensor.is_inference() else tensor._version
    if versions.setdefault(tensor.data_ptr(), version) != version:
        raise StageError(
            "convert() reused the buffer of a tensor it had already yielded. Allocate a new tensor for each item."
        )
    return dlpack.from_dlpack(tensor.detach())


@contextlib.contextmanager
def _module_taps(module: nn.Module, taps: Mapping[str, str]) -> Iterator[None]:
    """Taps the outputs of submodules in the port's table. Names that this stage does not have belong to other kinds."""
    modules = dict(module.named_modules())
    handles = [modules[path].register_forward_hook(_hook(name)) for name, path in taps.items() if path in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str) -> Callable[[nn.Module, Any, Any], Any]:
    def hand_over(module: nn.Module, args: Any, output: Any) -> Any:
        handed = tap(name, output)
        note_place(name, forward_place(module))  # of a module of the port's own; of torch's, who calls it
        return handed

    return hand_over


def _signature(module: nn.Module, x: torch.Tensor) -> str:
    """A digest of what shapes the graph of a stage: structure, shapes and dtypes, whatever the weights."""
    structure = [[name, type(part).__qualname__] for name, part in module.named_modules()]
    shapes = [[name, str(part.dtype), list(part.shape)] for name, part in module.state_dict().items()]
    return digest_of([structure, shapes, str(x.dtype), list(x.shape)])[:12]

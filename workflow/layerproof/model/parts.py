"""Where a transformers model is cut into stages: its layers, its head, and what runs before, between and after them.

A stage ends where the next one begins. The output of `embed` and of a layer is what the next layer is called with, that
of the last layer is what it returns, and that of `norm` is what the head is called with. Which parameters outside the
layers belong to which stage is measured on a twin of the model without weights: the stage that uses one, owns it.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args, get_origin, get_type_hints

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import PreTrainedModel, initialization

from layerproof.errors import UserError, first_line
from layerproof.model.checkpoint import num_layers
from layerproof.model.experts import ONE_EXPERT, register
from layerproof.model.stages import EMBED, LM_HEAD, NORM, all_stages, layer_of, layer_stage

log = logging.getLogger(__name__)

PROBE = (11, 19)
"""Batch size and length of the token ids in the run that finds the parts; other dims rarely have these sizes."""

Dims = tuple[int, ...]
"""The places of the dims batch and seq, or of the one dim that has all tokens."""


@dataclass(frozen=True)
class Write:
    """An operation by which a model's first forward changes a weight in place, such as a division by 2."""

    function: Callable
    args: tuple
    kwargs: Mapping[str, Any]

    def apply(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.function(weight, *self.args, **self.kwargs)


@dataclass(frozen=True)
class Parts:
    """The stages of a transformers causal language model.

    `embed`, `layers`, `norm` and `lm_head` are dotted module names; `norm` is None if no norm runs after the last
    layer. `outside` maps a stage to the parameters and persistent buffers outside the layers that it uses. `tied` maps
    the name of a tied parameter to the one that it shares its weights with. `returns` says what each layer returns: None
    for a tensor, otherwise for each element of a tuple after the first whether it is a tensor. `hidden` are the dims of
    the hidden states that layers pass on. `inputs` maps a stage to the other arguments that earlier stages compute, each
    with its dims. `writes` maps a parameter inside a layer to what the model's first forward does to it, as RWKV's does.
    """

    embed: str
    layers: str
    norm: str | None
    lm_head: str
    outside: Mapping[str, tuple[str, ...]]
    tied: Mapping[str, str]
    returns: Sequence[tuple[bool, ...] | None]
    hidden: Dims
    inputs: Mapping[str, Mapping[str, Dims]]
    writes: Mapping[str, Sequence[Write]]

    def path_of(self, stage: str) -> str:
        """Returns the name of a stage's module.

        Raises:
            KeyError: for `norm`, if the model has no norm after its last layer.
        """
        if (layer := layer_of(stage)) is not None:
            return f"{self.layers}.{layer}"
        path = {EMBED: self.embed, NORM: self.norm, LM_HEAD: self.lm_head}[stage]
        if path is None:
            raise KeyError(stage)
        return path

    def stages_of(self, parameter: str) -> list[str]:
        """Returns the stages that use a parameter or buffer of this name; those of a tied one are all that share it."""
        names = {parameter, *(name for name, source in self.tied.items() if source == self.source_of(parameter))}
        inside = [name.removeprefix(self.layers + ".") for name in names if name.startswith(self.layers + ".")]
        layers = [layer_stage(int(name.split(".")[0])) for name in inside]
        return list(dict.fromkeys([*layers, *(stage for stage, of in self.outside.items() if names.intersection(of))]))

    def source_of(self, parameter: str) -> str:
        """Returns the name under which a parameter is loaded: its own, or that of the one it shares its weights with."""
        return self.tied.get(parameter, parameter)


def parts_of(model: PreTrainedModel) -> Parts:
    """Finds the stages of a model; the result is kept with the model and its copies.

    Raises:
        UserError: if the model does not consist of layers that run one after the other, and a head.
    """
    if not hasattr(model, "layerproof_parts"):
        cast("Any", model).layerproof_parts = _find(model)
    return cast("Any", model).layerproof_parts


def has_no_stages(model: nn.Module, why: str) -> UserError:
    """The error for a model that cannot be cut into stages."""
    return UserError(f"config.yaml: model.checkpoint: {type(model).__name__} cannot be run one layer at a time: {why}.")


def layers_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Finds the list of decoder layers by its length, num_hidden_layers of the config, and returns it with its name.

    Raises:
        UserError: if the model has no list of that length.
    """
    number = num_layers(model.config.to_dict())
    names = {module: name for name, module in model.named_modules()}
    for part in (model.get_decoder(), model):
        lists = [module for module in (part or model).modules() if isinstance(module, nn.ModuleList)]
        found = [module for module in lists if len(module) == number]
        if found:
            outermost = min(found, key=lambda module: names[module].count("."))
            return names[outermost], outermost
    raise has_no_stages(model, f"it has no list of {number} layers")


class CannotKnow(Exception):
    """An operation needs the value of a tensor that depends on weights which are not loaded."""


class Unknowns(TorchDispatchMode):
    """Lets a model run without most of its weights: what depends on a tensor on the meta device is on it, too.

    What depends on token ids alone, such as masks and positions, stays on `device`, also where the model makes it on the
    device of its hidden states. `learn` gives an unknown tensor its value for all that follows. `used` collects the
    tensors in `watched`, names by id, that operations use; `writes` what is done to those in `inside`.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.watched: dict[int, str] = {}
        self.used: set[str] = set()
        self.inside: dict[int, str] = {}
        self.writes: dict[str, list[Write]] = {}
        self._values: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._numbers = _Numbers(device)
        self._is_on = False

    def start(self) -> None:
        """Turns the mode on; it must then be the innermost one until `stop`."""
        if not self._is_on:
            self._is_on = True
            self.__enter__()

    def stop(self) -> None:
        """Turns the mode off, if it is on."""
        if self._is_on:
            self._is_on = False
            self.__exit__(None, None, None)

    def __enter__(self) -> Unknowns:
        self._numbers.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._numbers.__exit__(*raised)

    def learn(self, unknown: torch.Tensor, value: torch.Tensor) -> None:
        """Lets later operations on this very tensor use the value."""
        functional: Any = torch
        if functional._is_functional_tensor(unknown):  # torch-xla wraps what it makes; operations get what is inside
            unknown = functional._from_functional_tensor(unknown)
        self._values[id(unknown)] = unknown, value  # the tensor too, so that no other gets its id

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        flat, spec = tree_flatten((args, kwargs or {}))
        for place, value in enumerate(flat):
            if isinstance(value, torch.Tensor):
                if id(value) in self.watched:
                    self.used.add(self.watched[id(value)])
                flat[place] = self._values.get(id(value), (value, value))[1]
        is_unknown = any(isinstance(value, torch.Tensor) and value.is_meta for value in flat)
        if is_unknown:
            _check_not_written(func, flat[0] if flat else None)
            if args and id(args[0]) in self.inside and _writes_first(func):
                self._note_write(func, args[1:], kwargs or {}, self.inside[id(args[0])])
            flat = [_unknown(value) if isinstance(value, torch.Tensor) else value for value in flat]
        arguments, named = cast("tuple[tuple, dict[str, Any]]", tree_unflatten(flat, spec))
        device = named.get("device")
        if device is not None and (is_unknown or torch.device(device).type == "meta"):
            named["device"] = torch.device("meta") if is_unknown else self.device
        try:
            return func(*arguments, **named)
        except (NotImplementedError, RuntimeError) as error:
            if is_unknown and DATA_DEPENDENT.intersection(func.tags):
                raise CannotKnow(f"{func} needs values that depend on weights of other stages") from error
            raise

    def _note_write(self, func: Any, others: tuple, kwargs: Mapping[str, Any], name: str) -> None:
        if any(isinstance(value, torch.Tensor) for value in tree_flatten((others, kwargs))[0]):
            raise CannotKnow(f"{func} writes a tensor into {name} from outside its layer")
        self.writes.setdefault(name, []).append(Write(func, others, kwargs))


class _Numbers(TorchFunctionMode):
    """Makes tensors of Python's numbers on `device`: a dispatch mode sees them when their values are lost."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        named = dict(kwargs or {})
        has_device = func in (torch.tensor, torch.as_tensor) and named.get("device") is not None
        if has_device and torch.device(named["device"]).type == "meta" and not isinstance(args[0], torch.Tensor):
            named["device"] = self.device
        return func(*args, **named)


DATA_DEPENDENT = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""torch's tags of operations that cannot run without the values of their tensors."""


def _check_not_written(func: Any, first: Any) -> None:
    """Checks that an operation does not write unknown values into a tensor that is known.

    Raises:
        CannotKnow: if it does.
    """
    if _writes_first(func) and isinstance(first, torch.Tensor) and not first.is_meta:
        raise CannotKnow(f"{func} writes values that depend on weights of other stages into a tensor that does not")


def _writes_first(func: Any) -> bool:
    """Whether an operation changes its first argument in place."""
    info = func._schema.arguments[0].alias_info if func._schema.arguments else None
    return info is not None and info.is_write


def _unknown(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_meta else torch.empty_like(tensor, device="meta")


@contextlib.contextmanager
def replaced_forward(module: nn.Module, forward: Callable) -> Iterator[None]:
    """Replaces a module's forward inside the block."""
    before = module.__dict__.get("forward")  # accelerate puts its own forward here if it moves what the module needs
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before


@contextlib.contextmanager
def hooked(handle: torch.utils.hooks.RemovableHandle) -> Iterator[None]:
    """Removes a hook when the block ends."""
    try:
        yield
    finally:
        handle.remove()


@dataclass
class Call:
    """How a layer is called: the arguments by name, as its forward names them."""

    bound: inspect.BoundArguments
    main: str

    @classmethod
    def of(cls, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> Call:
        signature = _with_names(inspect.signature(inspect.unwrap(type(module).forward)), len(args))
        bound = signature.bind(module, *args, **kwargs)
        return cls(bound, list(bound.signature.parameters)[1])

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments without the module itself, those of `**kwargs` among the others."""
        values = dict(list(self.bound.arguments.items())[1:])
        for parameter in self.bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                values |= values.pop(parameter.name, {})
        return values

    @property
    def hidden(self) -> torch.Tensor:
        return self.arguments[self.main]

    def has_mappings(self) -> bool:
        """Whether an argument is a mapping, which a layer may write into for later ones."""
        return any(isinstance(value, MutableMapping) for value in self.arguments.values())

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the other arguments, also those inside tuples, lists and dicts: `position_embeddings.0`."""
        found: dict[str, torch.Tensor] = {}
        for name, value in self.arguments.items():
            if name != self.main:
                found |= dict(leaves(name, value))
        return found

    def put_in(self, values: Mapping[str, torch.Tensor]) -> None:
        """Replaces arguments, or what is inside them, by the names that `tensors` gives them."""
        for name, tensor in values.items():
            argument, *path = name.split(".")
            owner = self.bound.arguments if argument in self.bound.arguments else self._more()
            owner[argument] = _with_leaf(owner.get(argument), path, tensor)

    def _more(self) -> dict[str, Any]:
        kinds = self.bound.signature.parameters.values()
        return self.bound.arguments.setdefault(next(one.name for one in kinds if one.kind is one.VAR_KEYWORD), {})


def _with_names(signature: inspect.Signature, given: int) -> inspect.Signature:
    """The signature of a wrapper, `forward(self, *args, **kwargs)`, with a name for each of the arguments `given`."""
    own, *others = signature.parameters.values()
    if not others or others[0].kind is not inspect.Parameter.VAR_POSITIONAL:
        return signature
    names = ["hidden_states", *(f"argument_{index}" for index in range(1, given))]
    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    return signature.replace(parameters=[own, *named, *others[1:]])


def _with_leaf(value: Any, path: Sequence[str], tensor: torch.Tensor) -> Any:
    """A nested value with a tensor at this path; mappings and lists, which others may hold, stay the same objects."""
    if not path:
        return tensor
    key, *rest = path
    if isinstance(value, Mapping):
        cast("Any", value)[key] = _with_leaf(value.get(key), rest, tensor)
        return value
    values = list(value or ())
    values += [None] * (int(key) + 1 - len(values))
    values[int(key)] = _with_leaf(values[int(key)], rest, tensor)
    if isinstance(value, list):
        value[:] = values
        return value
    return tuple(values)


def to_tap(tensor: torch.Tensor, dims: Dims, shape: Sequence[int]) -> torch.Tensor:
    """Moves the dims of batch and seq, of sizes `shape`, to the front."""
    if len(dims) == 1:
        return tensor.movedim(dims[0], 0).unflatten(0, tuple(shape))
    return tensor.movedim(dims, (0, 1))


def from_tap(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
    """Undoes `to_tap`."""
    if len(dims) == 1:
        return tensor.flatten(0, 1).movedim(0, dims[0])
    return tensor.movedim((0, 1), dims)


def leaves(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors inside nested tuples, lists and dicts, with dotted names."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from leaves(f"{name}.{key}", one)
    elif isinstance(value, (tuple, list)):
        for number, one in enumerate(value):
            yield from leaves(f"{name}.{number}", one)


def _find(model: PreTrainedModel) -> Parts:
    twin = _twin(model)
    layers_name, layers = layers_of(twin)
    head = twin.get_output_embeddings()
    names = {module: name for name, module in twin.named_modules()}
    if head is None:
        raise has_no_stages(model, "it has no head that turns hidden states into logits")
    tensors = [*twin.named_parameters(remove_duplicate=False), *_persistent_buffers(twin)]
    first: dict[int, str] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), name)
    tied = {name: first[id(tensor)] for name, tensor in tensors if first[id(tensor)] != name}
    stages = all_stages(len(layers))
    probe = _Probe(model, layers, used={stage: set() for stage in stages})
    for name, tensor in tensors:
        of = probe.unknowns.inside if name.startswith(layers_name + ".") else probe.unknowns.watched
        of[id(tensor)] = name
    inside = set(layers.modules())
    ids = torch.zeros(PROBE, dtype=torch.long)
    with contextlib.ExitStack() as stack, torch.no_grad():
        for index, layer in enumerate(layers):
            stack.enter_context(replaced_forward(layer, probe.passing(index, layer.forward)))
        for module in twin.modules():
            if module not in inside and not any(True for _ in module.children()):
                stack.enter_context(hooked(module.register_forward_hook(probe.note_norm)))
        stack.enter_context(hooked(head.register_forward_pre_hook(probe.before_head)))
        stack.callback(probe.unknowns.stop)
        probe.begin(EMBED)
        try:
            twin(input_ids=ids, attention_mask=torch.ones(PROBE, dtype=torch.long), use_cache=False)
        except UserError:
            raise
        except Exception as error:
            raise has_no_stages(model, f"{type(error).__name__}: {first_line(error)}") from error
    if len(probe.returns) != len(layers):
        raise has_no_stages(model, f"only {len(probe.returns)} of its {len(layers)} layers run")
    _check_reach(model, twin, probe.returns)
    if probe.unknowns.writes and next(model.parameters()).is_meta:
        _run_around(model, probe.returns)  # it does not change its weights again
    return Parts(
        embed=names[twin.get_input_embeddings()],
        layers=layers_name,
        norm=names[probe.last_norm] if probe.last_norm else None,
        lm_head=names[head],
        outside={stage: tuple(sorted({tied.get(name, name) for name in of})) for stage, of in probe.used.items() if of},
        tied=tied,
        returns=tuple(probe.returns),
        hidden=probe.hidden,
        inputs={stage: of for stage, of in probe.inputs.items() if of},
        writes=probe.unknowns.writes,
    )


def _check_reach(model: PreTrainedModel, twin: PreTrainedModel, returns: Sequence[tuple[bool, ...] | None]) -> None:
    """Checks that a twin, which ran once, runs with layers that have no modules, as a stage has them but for its own.

    Raises:
        UserError: if it reaches into its layers from outside them.
    """
    empty = {id(of): {} for layer in layers_of(twin)[1] for of in (layer._modules, layer._parameters, layer._buffers)}
    try:
        _run_around(copy.deepcopy(twin, empty), returns)
    except Exception as error:
        why = f"it reaches into its layers from outside them ({type(error).__name__}: {first_line(error)})"
        raise has_no_stages(model, why) from error


def _run_around(model: PreTrainedModel, returns: Sequence[tuple[bool, ...] | None]) -> None:
    """Runs what a model does outside its layers, which only pass on their hidden states."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        for layer, returned in zip(layers_of(model)[1], returns, strict=True):

            def passing(*args: Any, layer: nn.Module = layer, returned: Any = returned, **kwargs: Any) -> Any:
                return as_returned(returned, Call.of(layer, args, kwargs).hidden)

            stack.enter_context(replaced_forward(layer, passing))
        stack.enter_context(Unknowns(torch.device("cpu")))
        model(input_ids=torch.zeros(PROBE, dtype=torch.long), use_cache=False)


@dataclass
class _Probe:
    """What one run of a model without weights shows of its parts."""

    model: PreTrainedModel
    layers: nn.ModuleList
    used: dict[str, set[str]]
    hidden: Dims = (0, 1)
    inputs: dict[str, dict[str, Dims]] = field(default_factory=dict)
    returns: list[tuple[bool, ...] | None] = field(default_factory=list)
    last_norm: nn.Module | None = None
    unknowns: Unknowns = field(default_factory=lambda: Unknowns(torch.device("cpu")))
    _known: dict[type, tuple[torch.Tensor | None, ...] | None] = field(default_factory=dict)

    def begin(self, stage: str) -> None:
        """Counts the parameters that are used from now on as those of this stage."""
        self.unknowns.used = self.used[stage]
        self.unknowns.start()

    def passing(self, index: int, forward: Callable) -> Callable:
        """The forward of a layer that only passes on its hidden states."""
        layer = self.layers[index]

        def call(*args: Any, **kwargs: Any) -> Any:
            if len(self.returns) != index:
                raise has_no_stages(self.model, "its layers do not run once each, one after the other")
            self.unknowns.stop()
            said = Call.of(layer, args, kwargs)
            unknown = {name: tensor for name, tensor in said.tensors().items() if tensor.is_meta}
            if type(layer) not in self._known or unknown or said.has_mappings():
                self._known[type(layer)], read = self._run(layer, forward, args, kwargs, unknown)
                unknown = {name: tensor for name, tensor in unknown.items() if name in read}
            self.hidden = self._dims("its hidden states", said.hidden)
            self.inputs[layer_stage(index)] = {name: self._dims(name, tensor) for name, tensor in unknown.items()}
            others = self._known[type(layer)]
            self.returns.append(None if others is None else tuple(other is not None for other in others))
            self.begin(layer_stage(index) if index + 1 < len(self.layers) else NORM)
            return said.hidden if others is None else (said.hidden, *others)

        return call

    def _dims(self, name: str, tensor: torch.Tensor) -> Dims:
        sizes = tuple(tensor.shape)
        if sizes.count(PROBE[0]) == sizes.count(PROBE[1]) == 1:
            return sizes.index(PROBE[0]), sizes.index(PROBE[1])
        if sizes.count(math.prod(PROBE)) == 1:
            return (sizes.index(math.prod(PROBE)),)
        raise has_no_stages(self.model, f"a layer gets {name} without dims for batch and seq")

    def _run(
        self, layer: nn.Module, forward: Callable, args: tuple, kwargs: Mapping[str, Any], unknown: Mapping[str, Any]
    ) -> tuple[tuple[torch.Tensor | None, ...] | None, set[str]]:
        """What a layer returns after the hidden states, None for a tensor alone; and which `unknown` tensors it reads.

        A layer that cannot run without weights returns what its annotation says, and may read all of them.
        """
        mode = Unknowns(torch.device("cpu"))
        mode.watched = {id(tensor): name for name, tensor in unknown.items()}
        try:
            with mode:
                output = forward(*args, **kwargs)
        except Exception as error:
            log.info("%s: cannot run without weights (%s)", type(layer).__name__, first_line(error))
            hint = get_type_hints(inspect.unwrap(type(layer).forward)).get("return")
            others = tuple(_nothing() for _ in get_args(hint)[1:]) if get_origin(hint) is tuple else None
            return others, set(unknown)
        if not isinstance(output, (tuple, list)):
            return None, mode.used
        return tuple(one if isinstance(one, torch.Tensor) else None for one in output[1:]), mode.used

    def note_norm(self, module: nn.Module, args: Any, output: Any) -> None:
        if len(self.returns) == len(self.layers) and "norm" in type(module).__name__.lower():
            self.last_norm = module

    def before_head(self, module: nn.Module, args: Any) -> None:
        self.begin(LM_HEAD)


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same model on the meta device, except for the buffers that it computes itself.

    Its experts run with static shapes, since nothing on the meta device has values.
    """
    register()
    config = copy.deepcopy(model.config)  # transformers notes the implementations in it
    implementations = {"attn_implementation": "eager", "experts_implementation": ONE_EXPERT}
    with torch.device("meta"):
        twin = type(model)._from_config(config, **implementations).eval()
    with torch.no_grad(), initialization.guard_torch_init_functions():
        make_computed_buffers(twin, torch.device("cpu"))
    return twin


def as_returned(returns: tuple[bool, ...] | None, hidden: torch.Tensor) -> Any:
    """What a layer returns that passes on its hidden states; all other tensors that it returns are unknown."""
    if returns is None:
        return hidden
    return hidden, *(_nothing() if is_tensor else None for is_tensor in returns)


def _nothing() -> torch.Tensor:
    """A tensor of which nothing is known; `Unknowns` must not be on."""
    return torch.empty((), device="meta")


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}  # type: ignore[operator]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in computed:
            yield name, buffer


def make_computed_buffers(model: PreTrainedModel, device: torch.device) -> None:
    """Computes the buffers that no checkpoint contains, with the model's `_init_weights` as in `from_pretrained`.

    A module may leave its buffer to one around it, which needs all layers (Falcon H1's `mup_vector`).

    Raises:
        UserError: if transformers leaves a buffer as it is.
    """
    buffers = [name for name, _ in model.named_non_persistent_buffers()]
    left = _compute(model, buffers, device, lambda owner: [owner])
    if not left:
        return
    with torch.device("meta"):
        whole = type(model)._from_config(copy.deepcopy(model.config), dtype=model.dtype)
    not_computed = _compute(whole, left, device, _and_around)
    if not_computed:
        raise UserError(f"{type(model).__name__}: transformers does not compute the buffer {not_computed[0]} again.")
    for name in left:
        path, _, leaf = name.rpartition(".")
        model.get_submodule(path).register_buffer(leaf, whole.get_buffer(name), persistent=False)


def _compute(
    model: PreTrainedModel, buffers: Sequence[str], device: torch.device, by: Callable[[str], list[str]]
) -> list[str]:
    """Computes buffers by initialising the modules that `by` finds for their owners; returns those still not computed."""
    modules: dict[str, None] = {}
    for name in buffers:
        path, _, leaf = name.rpartition(".")
        owner = model.get_submodule(path)
        missing = torch.empty_like(owner.get_buffer(leaf), device=device)
        owner.register_buffer(leaf, missing.fill_(_missing(missing.dtype)), persistent=False)
        modules |= dict.fromkeys(by(path))
    for path in modules:
        module = model.get_submodule(path)
        for parameter in module.parameters():
            cast("Any", parameter)._is_hf_initialized = True  # loaded or meant to stay on meta: not to draw at random
        _innermost_model(model, path)._init_weights(module)
    return [name for name in buffers if _is_missing(model.get_buffer(name))]


def _and_around(path: str) -> list[str]:
    """A module and those that contain it, the innermost first."""
    names = path.split(".") if path else []
    return [".".join(names[:length]) for length in range(len(names), -1, -1)]


def _missing(dtype: torch.dtype) -> float | int | bool:
    """A value that no model computes; a bool has none."""
    if dtype == torch.bool:
        return False
    return float("nan") if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).max


def _is_missing(buffer: torch.Tensor) -> bool:
    if buffer.dtype == torch.bool:
        return False
    return bool(
        (
            buffer.isnan() if buffer.is_floating_point() or buffer.is_complex() else buffer == _missing(buffer.dtype)
        ).all()
    )


def _innermost_model(model: PreTrainedModel, path: str) -> PreTrainedModel:
    """The part of a model that transformers initialises a submodule with."""
    inside = map(model.get_submodule, _and_around(path))
    return next(module for module in inside if isinstance(module, PreTrainedModel))

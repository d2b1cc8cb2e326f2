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
from transformers import PreTrainedModel, initialization

from layerproof.errors import UserError, first_line
from layerproof.model.buffers import make_computed_buffers
from layerproof.model.checkpoint import num_layers
from layerproof.model.experts import ONE_EXPERT, register
from layerproof.model.stages import EMBED, LM_HEAD, NORM, all_stages, layer_of, layer_stage
from layerproof.model.unknowns import Unknowns, Write, unknown_tensor

log = logging.getLogger(__name__)

PROBE = (11, 19)
"""Batch size and length of the token ids in the run that finds the parts; other dims rarely have these sizes."""

Dims = tuple[int, ...]
"""The places of the dims batch and seq, or of the one dim that has all tokens."""


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
            others = tuple(unknown_tensor() for _ in get_args(hint)[1:]) if get_origin(hint) is tuple else None
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
    return hidden, *(unknown_tensor() if is_tensor else None for is_tensor in returns)


def _persistent_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    computed = {name for name, _ in model.named_non_persistent_buffers()}  # type: ignore[operator]
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name not in computed:
            yield name, buffer

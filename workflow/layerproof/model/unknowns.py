"""Runs a model without most of its weights: what depends on a missing one is unknown, and all else is computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten


@dataclass(frozen=True)
class Write:
    """An operation by which a model's first forward changes a weight in place, such as a division by 2."""

    function: Callable
    args: tuple
    kwargs: Mapping[str, Any]

    def apply(self, weight: torch.Tensor) -> None:
        with torch.no_grad():
            self.function(weight, *self.args, **self.kwargs)


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
        arguments = [self._known(one) for one in args]
        named = {name: self._known(one) for name, one in (kwargs or {}).items()}
        is_unknown = any(map(_is_unknown, (*arguments, *named.values())))
        if is_unknown:
            _check_not_written(func, arguments[0] if arguments else None)
            if args and id(args[0]) in self.inside and _writes_first(func):
                self._note_write(func, args[1:], kwargs or {}, self.inside[id(args[0])])
            arguments = [_unknown(one) for one in arguments]
            named = {name: _unknown(one) for name, one in named.items()}
        device = named.get("device")
        if device is not None and (is_unknown or torch.device(device).type == "meta"):
            named["device"] = torch.device("meta") if is_unknown else self.device
        try:
            return func(*arguments, **named)
        except (NotImplementedError, RuntimeError) as error:
            if is_unknown and DATA_DEPENDENT.intersection(func.tags):
                raise CannotKnow(f"{func} needs values that depend on weights of other stages") from error
            raise

    def _known(self, value: Any) -> Any:
        """An argument of an operation with what was learnt of it; notes the watched tensors. Faster than torch's trees."""
        if isinstance(value, torch.Tensor):
            if id(value) in self.watched:
                self.used.add(self.watched[id(value)])
            return self._values.get(id(value), (value, value))[1]
        return [self._known(one) for one in value] if isinstance(value, (list, tuple)) else value

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
        named = kwargs or {}
        has_device = func in (torch.tensor, torch.as_tensor) and named.get("device") is not None
        if has_device and torch.device(named["device"]).type == "meta" and not isinstance(args[0], torch.Tensor):
            named = named | {"device": self.device}
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


def _is_unknown(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_unknown, value))
    return isinstance(value, torch.Tensor) and value.is_meta


def _unknown(value: Any) -> Any:
    if isinstance(value, list):
        return [_unknown(one) for one in value]
    is_known = isinstance(value, torch.Tensor) and not value.is_meta
    return torch.empty_like(value, device="meta") if is_known else value


def unknown_tensor() -> torch.Tensor:
    """A tensor of which nothing is known; `Unknowns` must not be on."""
    return torch.empty((), device="meta")

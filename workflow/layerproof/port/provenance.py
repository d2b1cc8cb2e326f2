"""Tracks where the tensors of a port's `convert` come from: which ones on disk went into each, transposed or not.

Tracking follows torch's own functions while they run. A tensor that goes through anything else, such as numpy, has no
known origin.
"""

from __future__ import annotations

import difflib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from layerproof.errors import StageError

ENTERING = ("tensor", "as_tensor", "asarray", "from_numpy", "frombuffer", "from_dlpack", "from_file", "load")
"""Functions of torch that read numbers from elsewhere."""
LEAVING = ("numpy", "__array__", "__dlpack__", "data_ptr")
"""Functions of torch through which other code may write into a tensor."""
NEAREST = 3
"""How many names on disk a message suggests."""


class Tracing(TorchFunctionMode):
    """Follows tensors of `Watched` weights through torch's functions inside its `with` block.

    Sources belong to a storage, since its views and parameters share the same numbers. Whether a tensor is transposed,
    and whether it is constant (made by torch from nothing that was read), belongs to the tensor.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[weakref.ref[torch.UntypedStorage], set[str]]] = {}
        self._transposed = WeakTensorKeyDictionary()
        self._constant = WeakTensorKeyDictionary()

    def sources(self, tensor: torch.Tensor) -> set[str]:
        """Names on disk of what went into a tensor on the CPU; empty if nothing did or the track was lost."""
        if tensor.device.type != "cpu":
            return set()
        storage = tensor.untyped_storage()
        reference, found = self._sources.get(storage._cdata, (None, set()))
        return found if reference is not None and reference() is storage else set()

    def is_transposed(self, tensor: torch.Tensor) -> bool:
        """Whether the last dim on disk became another dim of this tensor."""
        return bool(self._transposed.get(tensor, False))

    def is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is known to contain nothing that was read, such as ones and ranges."""
        return not self.sources(tensor) and tensor in self._constant

    def add(self, tensor: torch.Tensor, sources: Iterable[str], transposed: bool = False) -> None:
        """Adds to the sources of a tensor."""
        if tensor.device.type != "cpu":
            return
        storage = tensor.untyped_storage()
        # Not torch's own weak reference: it keeps a small object for each tensor that is gone, and between those
        # objects the C library finds no room for the next tensor of that size.
        self._sources[storage._cdata] = weakref.ref(storage), self.sources(tensor) | set(sources)
        self._transposed[tensor] = transposed

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple[Any, ...] = (), kwargs: dict | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name, given = _name(func), _tensors((args, kwargs))
        if name.endswith("_like") or name.startswith("new_"):
            given = []  # only the shape of the tensor is used
        read = [one for one in given if self.sources(one)]
        if not read:
            if name not in (*ENTERING, *LEAVING) and all(one in self._constant for one in given):
                self._constant.update(dict.fromkeys(_tensors(result), True))
            elif name in LEAVING or _is_in_place(name) or "out" in (kwargs or {}):  # written numbers may have been read
                for tensor in [*given, *(one._base for one in given if one._base is not None)]:
                    self._constant.pop(tensor, None)
            return result
        sources = set().union(*map(self.sources, read))
        transposed = any(map(self.is_transposed, read))
        for made in _tensors(result):
            seen = [self.is_transposed(one) != _moves_last(one, made) for one in read if _is_view(one, made)]
            self.add(made, sources, any(seen) if seen else transposed)
        if _is_in_place(name):
            for written in (args[0], args[0]._base):
                if isinstance(written, torch.Tensor):
                    self.add(written, sources, transposed)
        return result


class NotOnDisk(StageError, KeyError):
    """A port reads a tensor that its stage does not have on disk.

    It is also a KeyError, so that `weights.get(name)` returns None; the message is made only if somebody reads it.
    """

    def __init__(self, name: object, names: Collection[str]) -> None:
        super().__init__(name)
        self._name, self._names = str(name), names

    def __str__(self) -> str:
        near = difflib.get_close_matches(self._name, self._names, NEAREST, cutoff=0.0)
        others = len(self._names) - len(near)
        has = f"has {', '.join(near)}{f' and {others} others' if others else ''}"
        return f'convert() reads "{self._name}", which this stage does not have on disk. It {has}.'


class Watched(Mapping[str, torch.Tensor]):
    """Weights by their names on disk; `reads` counts how often each was accessed."""

    def __init__(self, weights: Mapping[str, torch.Tensor], tracing: Tracing) -> None:
        self._weights, self._tracing = weights, tracing
        self.reads = dict.fromkeys(weights, 0)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.reads:
            raise NotOnDisk(name, self.reads)
        tensor = self._weights[name]
        self.reads[name] += 1
        self._tracing.add(tensor, [name])
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self.reads  # Mapping's own method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.reads)

    def __len__(self) -> int:
        return len(self.reads)


def _name(func: Callable) -> str:
    """The name of a torch function, or for a property such as `.T` that of the property."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _is_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _is_view(tensor: torch.Tensor, made: torch.Tensor) -> bool:
    return made.device.type == "cpu" and tensor.untyped_storage()._cdata == made.untyped_storage()._cdata


def _moves_last(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether the last dim of a tensor is another dim of a view of it.

    Compares strides, so it does not matter how the view was made.
    """
    sizes = [dim for dim, size in enumerate(view.shape) if size > 1]
    if tensor.ndim < 2 or tensor.shape[-1] == 1 or len(sizes) < 2:
        return False
    found = [dim for dim in sizes if view.stride(dim) == tensor.stride(-1)]
    return bool(found) and found[-1] != sizes[-1]

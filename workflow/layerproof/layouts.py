"""Layouts of a port's tap that are not the golden's but hold the same numbers: heads apart, tokens in a row, transposed.

A layout is recognised by shapes alone, so a tap of the golden's shape in another order is never one: that is a mistake.
Positions beyond the prompt, which a port has that is compiled for longer ones, are padding. No other dimension is cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FUSED = ("attn.q", "attn.k", "attn.v")
"""Taps that a port may hand over in one tensor."""


@dataclass(frozen=True)
class Layout:
    """How to read a port's tensor as the golden's, [batch, seq, features...].

    It is viewed in the shape `view`, and its dims are taken in this `order`: then they are batch, positions, and dims
    of features, of which it takes `features` (all of them, if None). `text` names it: "[batch, heads, seq, head_dim]".
    """

    text: str
    view: tuple[int, ...]
    order: tuple[int, ...]
    features: tuple[int, ...] | None = None

    def read(self, tensor: Any, shape: Sequence[int], from_end: bool = False) -> Any:
        """A port's tensor in the golden's `shape`; numpy arrays and torch tensors both have what it takes.

        Of more positions than the golden has, it takes the first ones, or the last ones `from_end`.
        """
        batch, seq = shape[:2]
        flat = self._flat(tensor, batch)
        flat = flat[:, -seq:] if from_end else flat[:, :seq]
        flat = flat if self.features is None else flat[..., list(self.features)]
        return flat.reshape(tuple(shape))

    def write(self, tensor: Any, golden: Any) -> Any:
        """The port's torch tensor with the golden's numbers in it; what the golden does not have stays."""
        import torch

        batch, seq = golden.shape[:2]
        flat = self._flat(tensor, batch)
        features = range(flat.shape[-1]) if self.features is None else self.features
        inside = flat[:, :seq].clone()
        inside[..., list(features)] = golden.reshape(batch, seq, -1)
        sizes = [self.view[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return torch.cat([inside, flat[:, seq:]], 1).reshape(sizes).permute(back).reshape(tensor.shape)

    @property
    def positions(self) -> int:
        """How many positions the port's tensor has."""
        return self.view[self.order[1]]

    def _flat(self, tensor: Any, batch: int) -> Any:
        """The tensor as [batch, positions, features]."""
        viewed = tensor.reshape(self.view)
        ordered = viewed.permute(self.order) if hasattr(viewed, "permute") else viewed.transpose(self.order)
        return ordered.reshape(batch, self.positions, math.prod(self.view) // (batch * self.positions))


def layouts(name: str, shape: Sequence[int], wanted: Mapping[str, Sequence[int]]) -> list[Layout]:
    """The layouts in which a port's tap of this `shape` holds the golden's, whose taps have the shapes `wanted`.

    None for a tap of the golden's shape: it is not re-ordered.
    """
    golden = tuple(wanted[name])
    if tuple(shape) == golden or len(golden) < 3 or len(shape) < 2 or 0 in (*shape, *golden):
        return []
    found = list(_same_numbers(tuple(shape), golden))
    if not found and name in FUSED:
        found = list(_fused(name, tuple(shape), wanted))
    return list({(one.view, one.order, one.features): one for one in found}.values())


def _same_numbers(shape: tuple[int, ...], golden: tuple[int, ...]) -> Iterator[Layout]:
    batch, seq, *features = golden
    size, inner = math.prod(features), "heads, head_dim" if len(features) > 1 else "features"
    first, *others = shape
    if first == batch and len(shape) >= 3 and others[0] >= seq and math.prod(others[1:]) == size:
        told = "heads, head_dim" if len(others) == 3 else "features"
        text = f"[batch, {'seq' if others[0] == seq else f'{others[0]} positions'}, {told}]"
        yield Layout(text, shape, tuple(range(len(shape))))
    is_by_head = len(shape) == 4 and others[0] * others[2] == size and (len(features) == 1 or features[0] == others[0])
    if first == batch and is_by_head and others[1] >= seq:
        yield Layout("[batch, heads, seq, head_dim]", shape, (0, 2, 1, 3))
    if first == batch and len(shape) == 3 and others[1] >= seq and others[0] == size:
        yield Layout(f"[batch, {inner}, seq]", shape, (0, 2, 1))
    if len(shape) >= 3 and others[0] == batch and first >= seq and first != batch and math.prod(others[1:]) == size:
        yield Layout(f"[seq, batch, {inner}]", shape, (1, 0, *range(2, len(shape))))
    if first % batch == 0 and first >= batch * seq and math.prod(others) == size:
        yield Layout(f"[tokens, {inner}]", (batch, first // batch, *others), tuple(range(len(shape) + 1)))


def _fused(name: str, shape: tuple[int, ...], wanted: Mapping[str, Sequence[int]]) -> Iterator[Layout]:
    """q, k and v in one tensor: one behind the other, or for each key head its query heads, its key and its value."""
    if not all(one in wanted for one in FUSED):
        return
    batch, seq = wanted[name][:2]
    sizes = [math.prod(wanted[one][2:]) for one in FUSED]
    whole = (batch, seq, sum(sizes))
    if shape != whole and not list(_same_numbers(shape, whole)):
        return
    plain = Layout("", shape, tuple(range(len(shape)))) if shape == whole else next(_same_numbers(shape, whole))
    number = FUSED.index(name)
    start = sum(sizes[:number])
    yield Layout("[batch, seq, q + k + v]", plain.view, plain.order, tuple(range(start, start + sizes[number])))
    head_dim = wanted["attn.q_rot"][-1] if "attn.q_rot" in wanted else 0
    if not head_dim or sizes[1] != sizes[2] or any(size % head_dim for size in sizes) or sizes[0] % sizes[1]:
        return
    heads, group = sizes[1] // head_dim, sizes[0] // sizes[1]
    length = (group + 2) * head_dim
    starts, width = {0: (0, group), 1: (group, 1), 2: (group + 1, 1)}[number]
    inside = [head * length + starts * head_dim + place for head in range(heads) for place in range(width * head_dim)]
    yield Layout("[batch, seq, key heads, (q, k, v)]", plain.view, plain.order, tuple(inside))

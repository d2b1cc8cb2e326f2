"""Measures which taps of a golden stage feed each other, so that the golden's files can say it of any model.

Which operation uses whose result is followed through one run on a few tokens: every tap's tensor is a mark, and a later
tap is fed by the marks that it was computed from without another mark between them. Another run for each choice, with
another one at the first token, shows how far it reaches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from layerproof.golden.transformers_stage import run_stage
from layerproof.measure.routing import CHOICE, selection_of
from layerproof.taps import OUT, Edit, Fed, is_choice, is_optional

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 8
"""Tokens of the longest prompt that the run takes: what feeds what does not depend on them."""
TO_THE_END = 1 << 30
"""The reach of a choice that changes all tokens behind its own, as far as was measured."""
CHANGED = 1e-4
"""Relative change of a token in fp32 that is none of rounding: experts that get other tokens sum in another order."""


def measure(
    model: PreTrainedModel,
    stage: str,
    stage_input: torch.Tensor | None,
    token_ids: torch.Tensor,
    valid: torch.Tensor,
    names: Collection[str],
    own_taps: Mapping[str, str],
    handed: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[Fed]:
    """The taps `names` of a stage, in their order, with the taps that feed each directly.

    The model is loaded with the stage's weights; the other arguments are those of `run_stage`.
    """
    # What is handed over may choose among all tokens.
    row = int(valid.sum(1).argmax())
    few = (slice(row, row + 1), slice(0, None if handed else TOKENS))
    given = {name: tensor[few] for name, tensor in handed.items()}
    inputs = model, stage, None if stage_input is None else stage_input[few], token_ids[few], valid[few]
    flow = _Flow({selection_of(name): name for name in names if is_choice(name)})
    edits = {name: flow.mark(name) for name in names}
    with flow:
        run_stage(*inputs, edits=edits, own_taps=own_taps, handed=given)
    reach = dict.fromkeys(names, 0)
    choices = list(filter(is_choice, names))
    taps = run_stage(*inputs, own_taps=own_taps, handed=given) if choices else {}
    for choice in choices:
        other = run_stage(*inputs, forced={choice: _another(taps, choice)}, own_taps=own_taps, handed=given)
        reach |= {name: max(reach[name], _reach(taps[name], other.get(name))) for name in names}
    fed_by = {name: set(flow.fed_by.get(name, ())) for name in names}
    for name in choices:
        fed_by[name] |= {selection_of(name)} - {name}  # some selections are copies, which show what is masked
    return [
        Fed(name, tuple(one for one in names if one in fed_by[name]), is_optional(name, own_taps), reach[name])
        for name in names
    ]


def _another(taps: Mapping[str, torch.Tensor], choice: str) -> torch.Tensor:
    """A choice that is another one at the first token: the places behind, or the other side of a threshold."""
    other = taps[choice].clone()
    if other.is_floating_point():
        other[:, 0] = torch.where(other[:, 0] > 0, -1.0, 1.0).to(other.dtype)
    else:
        sized = (selection_of(choice), *(("router.weights", "router.logits") if choice == CHOICE else ()))
        places = next((taps[name].shape[-1] for name in sized if name in taps), int(other.max()) + 1)
        other[:, 0] = (other[:, 0] + 1) % places
    return other


def _reach(tap: torch.Tensor, other: torch.Tensor | None) -> int:
    """The last token, counted from 0, at which a tap is another one; TO_THE_END if none behind it is left."""
    if other is None or other.shape != tap.shape or not tap.is_floating_point() or tap.ndim < 2 or tap.shape[1] < 2:
        return 0
    before, after = (one.nan_to_num().double().reshape(*one.shape[:2], -1) for one in (tap, other))
    changed = ((after - before).norm(dim=2) > CHANGED * before.norm(dim=2)).any(0).nonzero()
    last = int(changed.max()) if changed.numel() else 0
    return TO_THE_END if last == tap.shape[1] - 1 else last


class _Flow(TorchDispatchMode):
    """Notes for each storage the marks that its values were computed from. Views share the storage and its marks.

    `choices` has the choice that is made of each selection: what else is computed from its top-k has its mark, too.
    """

    def __init__(self, choices: Mapping[str, str] = MappingProxyType({})) -> None:
        super().__init__()
        self.choices = choices
        self.fed_by: dict[str, frozenset[str]] = {}
        self._marks: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []

    def mark(self, name: str) -> Edit:
        """An edit of the tap that notes what feeds it, and goes on with a copy that has this mark alone."""

        def edit(tensor: torch.Tensor, seen: Mapping[str, torch.Tensor]) -> torch.Tensor:
            # Variants of a stage may hand a tap over again that the golden hands over once.
            self.fed_by[name] = self.fed_by.get(name, frozenset()) | self._marks_of([tensor]) - {name}
            if name == OUT:
                return tensor
            marked = tensor.clone()
            self._add(marked, frozenset([name]), replace=True)
            return marked

        return edit

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        marks = self._marks_of(_tensors((args, kwargs)))
        if func is torch.ops.aten.topk.default:
            marks |= {self.choices[name] for name in marks & set(self.choices)}
        if marks:
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in _tensors((result, written)):
                self._add(tensor, marks)
        return result

    def _marks_of(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._marks.get(_storage(tensor), ()) for tensor in tensors))

    def _add(self, tensor: torch.Tensor, marks: frozenset[str], replace: bool = False) -> None:
        key = _storage(tensor)
        self._marks[key] = marks if replace else marks | self._marks.get(key, frozenset())
        self._kept.append(tensor)  # so that no other storage gets its number


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from _tensors(one)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))

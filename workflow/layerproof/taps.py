"""Taps: named tensors inside a stage, by their canonical names.

A port hands a tensor over with `q = tap("attn.q_rot", q)`, which costs nothing unless a run collects taps, and goes on with
what it returns: the same tensor, or in a *forced* run the golden's (teacher forcing), so that an error ends at the tap that
made it. On a lazy device the collected tensors become extra outputs of the graph.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from layerproof.errors import StageError

if TYPE_CHECKING:
    import torch

OUT = "out"

SHAPES = {
    "input_norm": "[batch, seq, hidden]",
    "attn.q": "[batch, seq, heads * head_dim]",
    "attn.k": "[batch, seq, kv_heads * head_dim]",
    "attn.v": "[batch, seq, kv_heads * head_dim]",
    "attn.q_norm": "[batch, seq, heads * head_dim], or [batch, seq, heads, head_dim] where the norm is per head",
    "attn.k_norm": "[batch, seq, kv_heads * head_dim], or [batch, seq, kv_heads, head_dim] where the norm is per head",
    "attn.q_rot": "[batch, seq, heads, head_dim]",
    "attn.k_rot": "[batch, seq, kv_heads, head_dim]",
    "attn.context": "[batch, seq, heads * head_dim]",
    "attn.out": "[batch, seq, hidden]",
    "post_attn_norm": "[batch, seq, hidden]",
    "pre_mlp_norm": "[batch, seq, hidden], where a model has a norm of its own before the MLP",
    "router.logits": "[batch, seq, experts]",
    "router.scores": "[batch, seq, experts], after the sigmoid or softmax, without the correction bias",
    "router.selection": "[batch, seq, experts], what the top-k is taken of: the scores with the correction bias",
    "router.choice": "[batch, seq, top_k], integer, ascending",
    "router.weights": "[batch, seq, experts], zero where an expert is not chosen",
    "mlp.gate": "[batch, seq, intermediate]",
    "mlp.up": "[batch, seq, intermediate]",
    "mlp.out": "[batch, seq, hidden]",
    "post_mlp_norm": "[batch, seq, hidden], where a model has a norm of its own after the MLP",
    OUT: "[batch, seq, hidden]; of lm_head [batch, seq, vocabulary]",
}
"""Canonical taps and their layout, in the order that data flows through a layer."""

FEEDS = {
    "input_norm": (),
    "attn.q": ("input_norm",),
    "attn.k": ("input_norm",),
    "attn.v": ("input_norm",),
    "attn.q_norm": ("attn.q",),
    "attn.k_norm": ("attn.k",),
    "attn.q_rot": ("attn.q_norm",),
    "attn.k_rot": ("attn.k_norm",),
    "attn.context": ("attn.q_rot", "attn.k_rot", "attn.v"),
    "attn.out": ("attn.context",),
    "post_attn_norm": ("attn.out",),
    "pre_mlp_norm": ("post_attn_norm", "attn.out"),
    "router.logits": ("pre_mlp_norm", "post_attn_norm"),
    "router.scores": ("router.logits",),
    "router.selection": ("router.scores",),
    "router.choice": ("router.selection",),
    "router.weights": ("router.choice", "router.scores"),
    "mlp.gate": ("pre_mlp_norm", "post_attn_norm"),
    "mlp.up": ("pre_mlp_norm", "post_attn_norm"),
    "mlp.out": ("mlp.gate", "mlp.up", "router.weights", "pre_mlp_norm", "post_attn_norm"),
    "post_mlp_norm": ("mlp.out",),
    OUT: ("post_mlp_norm", "mlp.out", "post_attn_norm", "attn.out"),
}
"""What feeds each tap directly, in a layer that has them all."""


SPLIT_BY_RANKS = (
    *("attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm", "attn.q_rot", "attn.k_rot", "attn.context"),
    *("mlp.gate", "mlp.up"),
)
"""Taps that tensor parallelism splits, along the axis behind batch and seq. Of the others every rank has the whole."""


def unseen_before(tap: str, seen: Collection[str]) -> set[str]:
    """The taps where a mistake may have been made that shows at `tap` first: itself, and what feeds it unseen."""
    found = {tap}
    for name in FEEDS[tap]:
        if name not in seen:
            found |= unseen_before(name, seen)
    return found


Seen = Mapping[str, "torch.Tensor"]
Show = Callable[["torch.Tensor"], "torch.Tensor"]
"""Makes of a tensor one of the same numbers in another layout."""
Edit = Callable[["torch.Tensor", Seen], "torch.Tensor"]
"""Makes another tensor of a tap's, given also the taps before it."""


class TapsDone(Exception):
    """Ends a stage's forward once it has the taps that are asked for."""


@dataclass(frozen=True)
class _Run:
    """What a run does with its taps: a tap is edited, collected, and where it is forced, replaced for what follows."""

    forced: Mapping[str, torch.Tensor]
    edits: Mapping[str, Edit]
    until: str
    collected: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: Container[str] = ()

    def hand_over(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self.left_out:
            return tensor
        if name in self.edits:
            tensor = self.edits[name](tensor, {**self.collected, **self.forced})
        self.collected[name] = tensor
        if name == self.until != OUT:
            raise TapsDone
        golden = self.forced.get(name)
        if golden is None or golden.shape != tensor.shape:
            return tensor
        return golden.to(tensor.device, tensor.dtype)


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Hands `tensor` over under a canonical name if the run collects taps. Returns what to go on with.

    That is `tensor` itself, or in a forced run the golden's tensor of this name and shape, in the dtype of `tensor`.

    Raises:
        StageError: if the name is not canonical or it stands for no tensor.
    """
    if name not in SHAPES:
        raise StageError(f'tap "{name}": is not a canonical name. The names are {", ".join(SHAPES)}.')
    if not hasattr(tensor, "dtype"):
        raise StageError(
            f'tap "{name}": is a {type(tensor).__name__}, not a tensor. Write tap("{name}", tensor) inside forward.'
        )
    run = _run.get()
    return tensor if run is None else run.hand_over(name, tensor)


def tap_as(name: str, tensor: torch.Tensor, show: Show, back: Show) -> torch.Tensor:
    """Taps a tensor that is in another layout, or wider: `show` makes the tap's of it, and `back` is the way back.

    One that is not replaced is returned itself: a compiler sees no difference.
    """
    shown = show(tensor)
    after = tap(name, shown)
    return tensor if after is shown else back(after)


def check_canonical(names: Iterable[str], where: str) -> None:
    """Whether these are names of taps.

    Raises:
        StageError: at the first that is not; says where it stands.
    """
    for name in names:
        if name not in SHAPES:
            raise StageError(f'{where}: "{name}" is not a canonical tap. The names are {", ".join(SHAPES)}.')


@contextlib.contextmanager
def collecting(
    forced: Mapping[str, torch.Tensor] | None = None, edits: Mapping[str, Edit] | None = None, until: str = OUT
) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the taps of what runs inside the block: with `edits` made, and before `forced` values take their place.

    Another tap than `out` as `until` ends the run with TapsDone once it is collected.
    """
    run = _Run(forced or {}, edits or {}, until)
    token = _run.set(run)
    try:
        yield run.collected
    finally:
        _run.reset(token)


@contextlib.contextmanager
def leaving_out(names: Container[str]) -> Iterator[None]:
    """What runs inside the block does not hand these taps over."""
    run = _run.get()
    token = _run.set(run and replace(run, left_out=names))
    try:
        yield
    finally:
        _run.reset(token)


def in_order(names: Iterable[str]) -> list[str]:
    """Tap names in the order that data flows."""
    order = list(SHAPES)
    return sorted(names, key=order.index)


def dense_weights(choice: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Routing weights [..., top_k] laid out by expert, [..., experts], so that the order of the choice does not matter."""
    import torch

    dense = torch.zeros(*choice.shape[:-1], num_experts, dtype=weights.dtype, device=weights.device)
    return dense.scatter(-1, choice.long(), weights)

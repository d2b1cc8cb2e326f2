"""Taps: named tensors inside a stage, by their canonical names or by names of the user's own (golden.taps).

A port hands a tensor over with `q = tap("attn.q_rot", q)`, which costs nothing unless a run collects taps. The port
goes on with the returned tensor. It is the same tensor, or in a teacher-forced run the golden's tap, so that an error
does not spread beyond the tap that introduced it. On a lazy device the collected tensors become extra outputs of the
graph.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

from layerproof.errors import StageError
from layerproof.layouts import layouts

if TYPE_CHECKING:
    import torch

OUT = "out"
PAD_ON_THE_RIGHT = "Pad on the right, so that the first position is the first token."


def is_output(name: str) -> bool:
    """Whether a tap is an output of its stage: `out`, or `out/NAME` of what later stages get besides it."""
    return name == OUT or name.startswith(f"{OUT}/")


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
"""Canonical taps and their layouts, in the order of data flow through a layer.

What a model really has, in which order and fed by what, is measured (`golden.feeds`) and lies in the golden's files.
"""

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
"""The taps that feed each canonical tap directly, in a layer that has all of them."""

SPLIT_BY_RANKS = (
    *("attn.q", "attn.k", "attn.v", "attn.q_norm", "attn.k_norm", "attn.q_rot", "attn.k_rot", "attn.context"),
    *("mlp.gate", "mlp.up"),
)
"""Canonical taps that tensor parallelism splits, along the dim after batch and seq. Every rank has the others in full.

Ranks need not say it of a tap of one's own: parts that differ are put together (`port.shards`).
"""


@dataclass(frozen=True)
class Fed:
    """A tap of a stage, and the taps that feed it directly.

    A tap that has no canonical name, but that of a module, is `optional`: a port need not hand it over. `reach` is how many
    tokens behind a token its choice still changes the tap, as after a convolution of what experts made.
    """

    name: str
    fed_by: tuple[str, ...]
    optional: bool = False
    reach: int = 0


def choices_before(tap: str, measured: Sequence[Fed]) -> list[str]:
    """Returns the choices that a tap depends on, in order: taps named `choice` or `margin`, which noise may decide."""
    fed_by = {one.name: one.fed_by for one in measured}
    found: set[str] = set()
    waiting = list(fed_by.get(tap, ()))
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += fed_by.get(name, ())
    return [one.name for one in measured if one.name in found and is_choice(one.name)]


def is_optional(name: str, own: Collection[str]) -> bool:
    """Whether a port need not hand over a tap: it is neither canonical, nor in golden.taps, nor an output."""
    return not (name in SHAPES or name in own or is_output(name))


def canonical_after(tap: str, measured: Sequence[Fed]) -> set[str]:
    """Returns the canonical taps that a tap without a canonical name feeds, directly or through others like it."""
    found: set[str] = set()
    waiting = [] if tap in SHAPES else [tap]
    while waiting:
        name = waiting.pop()
        for one in measured:
            if name in one.fed_by and one.name not in found:
                found.add(one.name)
                waiting += [] if one.name in SHAPES else [one.name]
    return found.intersection(SHAPES)


def is_choice(name: str) -> bool:
    """Whether a tap is a choice: the places that a top-k found (`router.choice`), or the margins of a comparison."""
    return re.search(r"\bchoice(\.\d+)?$|\bmargin(\.\d+)?$", name) is not None


def unseen_before(tap: str, seen: Collection[str], measured: Iterable[Fed] = ()) -> set[str]:
    """Returns the taps where a mistake that first shows at `tap` may be: `tap` itself, and unseen taps that feed it.

    A tap is fed by what the golden `measured`, and by what feeds it in a layer that has all canonical taps: a mistake may
    lie at a tap that this model's golden lacks.
    """
    fed_by = {one.name: one.fed_by for one in measured}
    found: set[str] = set()
    waiting = [tap]
    while waiting:
        name = waiting.pop()
        found.add(name)
        feeders = {*fed_by.get(name, ()), *FEEDS.get(name, ())}
        waiting += [one for one in feeders if one not in seen and one not in found]
    return found


Seen = Mapping[str, "torch.Tensor"]
Show = Callable[["torch.Tensor"], "torch.Tensor"]
"""Converts a tensor to another layout with the same numbers."""
Edit = Callable[["torch.Tensor", Seen], "torch.Tensor"]
"""Returns another tensor for a tap, given its tensor and the earlier taps."""


class TapsDone(Exception):
    """Ends a stage's forward once the requested taps are collected."""


@dataclass(frozen=True)
class _Run:
    """The treatment of taps in a run: edit a tap, collect it and, if forced, replace it for the rest of the stage."""

    forced: Mapping[str, torch.Tensor]
    edits: Mapping[str, Edit]
    until: str
    own: Collection[str] | None
    collected: dict[str, torch.Tensor] = field(default_factory=dict)
    left_out: Container[str] = ()
    _times: Counter[str] = field(default_factory=Counter)

    def hand_over(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self.own is not None:
            check_known([name], "tap", self.own)
        if not hasattr(tensor, "dtype"):
            raise StageError(
                f'tap: "{name}" is a {type(tensor).__name__}, not a tensor. Write tap("{name}", tensor) inside forward.'
            )
        usual, name = name, self._numbered(name)
        if name in self.left_out:
            return tensor
        places = _places.get()
        if places is not None and (place := _calling_place()):
            places[name] = place
        if edit := self.edits.get(name, self.edits.get(usual)):
            tensor = edit(tensor, {**self.collected, **self.forced})
        self.collected[name] = tensor.clone()  # what follows may write into the tensor, as Llama 4's `out.add_` does
        if name == self.until != OUT:
            raise TapsDone
        golden = self.forced.get(name)
        if golden is None:
            return tensor
        golden = golden.to(tensor.device, tensor.dtype)
        if golden.shape == tensor.shape:
            return golden
        known = layouts(name, tensor.shape, {one: of.shape for one, of in self.forced.items()})
        return known[0].write(tensor, golden) if len(known) == 1 else tensor

    def _numbered(self, name: str) -> str:
        """Counts how often a tap is handed over; from the second time on, the count is part of its name (`NAME.2`)."""
        self._times[name] += 1
        return name if self._times[name] == 1 else f"{name}.{self._times[name]}"


_run: ContextVar[_Run | None] = ContextVar("run", default=None)


@dataclass(frozen=True)
class Place:
    """The function that hands a tap over, by its file and qualified name. It has no line: a comment would move it."""

    file: str
    function: str

    @classmethod
    def of_code(cls, code: CodeType) -> Place:
        path = Path(code.co_filename)
        inside = path.is_relative_to(Path.cwd())
        return cls(str(path.relative_to(Path.cwd()) if inside else path), code.co_qualname)

    def as_json(self) -> dict[str, str]:
        return asdict(self)


_places: ContextVar[dict[str, Place] | None] = ContextVar("places", default=None)


@contextlib.contextmanager
def locating() -> Iterator[dict[str, Place]]:
    """Notes for every tap that a run inside the block collects where it is handed over."""
    found: dict[str, Place] = {}
    token = _places.set(found)
    try:
        yield found
    finally:
        _places.reset(token)


def forward_place(module: torch.nn.Module) -> Place | None:
    """Where the forward of a module is defined; None for a module of torch itself."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return None if code is None or _is_foreign(code.co_filename) else Place.of_code(code)


def note_place(name: str, place: Place | None) -> None:
    """Notes where a tap comes from inside `locating`, where that is known better than by who hands it over."""
    places = _places.get()
    if places is not None and place is not None:
        places[name] = place


def _calling_place() -> Place | None:
    """The innermost function on the stack that is neither Layerproof's nor torch's own: that of a port or a model."""
    frame = inspect.currentframe()
    while frame and _is_foreign(frame.f_code.co_filename):
        frame = frame.f_back
    return Place.of_code(frame.f_code) if frame else None


def _is_foreign(file: str) -> bool:
    """Whether a file is Layerproof's or torch's own, or none at all: torch compiles some functions from text."""
    packages = (Path(__file__).parent, Path(sys.modules["torch"].__file__ or "").parent)
    return not Path(file).is_file() or any(Path(file).is_relative_to(package) for package in packages)


def tap(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Hands `tensor` over under a tap's name if the run collects taps; returns the tensor to go on with.

    What is handed over again in the same run is another tap, `NAME.2`, `NAME.3` and so on.

    The result is `tensor` itself, or in a teacher-forced run the golden's tap of this name and shape, in the dtype of
    `tensor`.

    Raises:
        StageError: in a run that collects taps, if no tap has this name or `tensor` is not a tensor.
    """
    run = _run.get()
    return tensor if run is None else run.hand_over(name, tensor)


def tap_as(name: str, tensor: torch.Tensor, show: Show, back: Show) -> torch.Tensor:
    """Taps a tensor that is wider or has another layout: `show` converts it to the tap's layout, `back` from it.

    A tensor that is not replaced is returned as it is, so the compiler sees no difference.
    """
    shown = show(tensor)
    after = tap(name, shown)
    return tensor if after is shown else back(after)


def check_known(names: Iterable[str], where: str, own: Collection[str] = ()) -> None:
    """Checks that `names` are canonical taps, `own` ones, which are the keys of the setting golden.taps, or may be modules'.

    A golden names the taps of a layer's other modules after the modules (`self_attn.q_a_proj`), so only what a letter
    more or less makes of a tap is wrong. The report lists names that the golden does not have.

    Raises:
        StageError: for the first name that nearly is another; the message says where it is and suggests that one.
    """
    known = (*SHAPES, *own)
    for name in names:
        usual = re.sub(r"\.\d+$", "", name)  # of a tap that a layer hands over again, as attn.q.2
        if name in known or usual in known or is_output(name):
            continue
        near = next((one for one in known if _lacks_a_letter(usual, one) or _lacks_a_letter(one, usual)), None)
        if near:
            meant = near + name.removeprefix(usual)
            raise StageError(
                f'{where}: "{name}" is not a tap. Did you mean "{meant}"? The taps are {", ".join(known)}. golden.taps '
                "adds others."
            )


def _lacks_a_letter(name: str, other: str) -> bool:
    """Whether `name` is `other` without one of its letters."""
    return any(name == other[:place] + other[place + 1 :] for place in range(len(other)))


@contextlib.contextmanager
def collecting(
    forced: Mapping[str, torch.Tensor] | None = None,
    edits: Mapping[str, Edit] | None = None,
    until: str = OUT,
    own: Collection[str] | None = (),
) -> Iterator[dict[str, torch.Tensor]]:
    """Collects the taps inside the block, after `edits` and before `forced` values replace them.

    `own` are the names that may occur besides the canonical ones and those of modules; None allows any. If `until` is a
    tap other than `out`, collecting it ends the run with TapsDone.
    """
    run = _Run(forced or {}, edits or {}, until, own)
    token = _run.set(run)
    try:
        yield run.collected
    finally:
        _run.reset(token)


@contextlib.contextmanager
def leaving_out(names: Container[str]) -> Iterator[None]:
    """Stops code inside the block from handing these taps over."""
    run = _run.get()
    token = _run.set(run and replace(run, left_out=names))
    try:
        yield
    finally:
        _run.reset(token)


def in_order(names: Iterable[str]) -> list[str]:
    """Sorts tap names in the order of data flow: the canonical ones, then others by name.

    The golden's files have the order of their own taps; this is for what has no golden at hand.
    """
    order = {name: place for place, name in enumerate(SHAPES)}
    return sorted(names, key=lambda name: (order.get(name, len(order)), name))


def merged(orders: Iterable[Sequence[str]]) -> list[str]:
    """One order of all names in several orders, such as those of a model's stages.

    Canonical names come in their canonical order, and each other name right behind the one that it follows.
    """
    lists = list(orders)
    result = in_order({name for order in lists for name in order if name in SHAPES})
    for order in lists:
        place = 0
        for name in order:
            if name not in result:
                result.insert(place, name)
            place = result.index(name) + 1
    return result


def dense_weights(choice: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Arranges routing weights [..., top_k] by expert, [..., experts], so that the order of choice does not matter.

    The weights of an expert that is chosen twice add up.
    """
    import torch

    dense = torch.zeros(*choice.shape[:-1], num_experts, dtype=weights.dtype, device=weights.device)
    return dense.scatter_add(-1, choice.long(), weights)

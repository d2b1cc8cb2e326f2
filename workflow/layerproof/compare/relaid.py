"""Reads a port's taps in the golden's layout, where theirs is another that holds the same numbers."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from layerproof.layouts import Layout, layouts
from layerproof.model.stages import LM_HEAD
from layerproof.taps import is_output
from layerproof.tensors.tensor import Tensor

LAST_TOKENS = "logits of the last tokens alone"
"""The layout, in verdicts.json, of a port's logits that are those of each prompt's last token."""


PADDED_LEFT = "padded on the left"
"""In place of a layout: the prompts lie behind the padding, so that the tap is not read."""
SAME = 0.1
"""Largest sum of the differences, as a share of the golden's, of numbers that are the golden's, at other positions."""


def as_golden(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The port's taps in the golden's layout, and by tap the layout that the port has where it is another.

    Outputs stay as they are: later stages read them. Where more than one layout fits, the one counts whose numbers are
    nearest to the golden's. A tap that is padded on the left stays as it is, and has PADDED_LEFT as its layout.
    """
    shapes = {name: tensor.shape for name, tensor in wanted.items()}
    taps, texts = dict(found), {}
    for name in (name for name in wanted if name in found and not is_output(name)):
        known = layouts(name, found[name].shape, shapes)
        if known:
            read = [_read(found[name], one, shapes[name]) for one in known]
            best = min(range(len(known)), key=lambda one: _distance(read[one], wanted[name])) if len(known) > 1 else 0
            if _is_padded_left(found[name], known[best], wanted[name]):
                texts[name] = PADDED_LEFT
            else:
                taps[name], texts[name] = read[best], known[best].text
    return taps, texts


def _is_padded_left(tensor: Tensor, layout: Layout, golden: Tensor) -> bool:
    """Whether the golden's numbers of a prompt are at the end of the port's positions, and not at their beginning."""
    shape = golden.shape
    if layout.positions <= shape[1] or {tensor.dtype_class, golden.dtype_class} != {"float"}:
        return False
    numbers, its = tensor.floats(tensor.data[...]), golden.floats(golden.data[...]).reshape(shape[0], -1)
    size = np.abs(its).sum(1)
    first, last = (
        np.abs(layout.read(numbers, shape, from_end).reshape(its.shape) - its).sum(1) for from_end in (False, True)
    )
    return bool(((last <= SAME * size) & (first > SAME * size) & (size > 0)).any())


def at_last_tokens(stage: str, out: Tensor, wanted: Tensor, valid: np.ndarray) -> tuple[Tensor, np.ndarray]:
    """Puts logits of each prompt's last token at their places in the golden's shape; returns them and the tokens that count.

    A port for serving often returns no other logits: [batch, 1, vocabulary] or [batch, vocabulary] for the golden's [batch,
    seq, vocabulary]. Any other output comes back as it is, with all tokens in `valid`, bool [batch, seq].
    """
    batch, seq, *rest = wanted.shape
    if stage != LM_HEAD or out.shape == wanted.shape or tuple(out.shape) not in ((batch, 1, *rest), (batch, *rest)):
        return out, valid
    prompts, last = np.arange(batch), seq - 1 - valid[:, ::-1].argmax(axis=1)
    numbers = np.asarray(out.data[...])
    placed, counted = np.zeros((batch, seq, *rest), numbers.dtype), np.zeros_like(valid)
    placed[prompts, last] = numbers.reshape(batch, *rest)
    counted[prompts, last] = valid[prompts, last]
    return Tensor(placed, out.dtype), counted


def can_be_forced(name: str, found: Tensor, wanted: Mapping[str, Tensor]) -> bool:
    """Whether `tap` puts the golden's tensor in place of the port's: their layouts leave no doubt."""
    shapes = {one: tensor.shape for one, tensor in wanted.items()}
    return found.shape == shapes[name] or len(layouts(name, found.shape, shapes)) == 1


def _read(tensor: Tensor, layout: Layout, shape: tuple[int, ...]) -> Tensor:
    return Tensor(np.ascontiguousarray(layout.read(np.asarray(tensor.data[...]), shape)), tensor.dtype)


def _distance(tensor: Tensor, golden: Tensor) -> float:
    if tensor.dtype_class != "float" or golden.dtype_class != "float":
        return 0.0
    mine, its = (one.floats(one.data[...]) for one in (tensor, golden))
    with np.errstate(invalid="ignore", over="ignore"):
        return float(np.nan_to_num(np.abs(mine - its), nan=0.0, posinf=0.0).sum())

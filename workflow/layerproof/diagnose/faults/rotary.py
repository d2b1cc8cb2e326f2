"""Rotary position embedding (arXiv 2104.09864): its angles, its layout, and where it is applied."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn

from layerproof.diagnose.faults.golden_stage import Faults, GoldenStage, NotApplicable
from layerproof.diagnose.faults.norms import QK_NORMS, norm_of
from layerproof.taps import Seen

ROTATED = ("attn.q_rot", "attn.k_rot")
FAULTS = fault = Faults()


@dataclass(frozen=True)
class Rotation:
    """How to rotate heads [batch, seq, heads, head_dim]: `frequencies` fp32 [rotary_dim / 2] at `positions` [seq]."""

    frequencies: torch.Tensor
    positions: torch.Tensor
    scaling: float
    head_dim: int
    interleaved: bool = False
    from_end: bool = False
    in_bf16: bool = False

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        size = 2 * len(self.frequencies)
        x, end = (x.roll(size, -1), size) if self.from_end else (x, 0)
        angles = self.positions.float()[:, None] * self.frequencies
        if self.in_bf16:
            angles = (self.positions.bfloat16()[:, None] * self.frequencies.bfloat16()).float()
        cos, sin = (self.scaling * part[:, None] for part in (angles.cos(), angles.sin()))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        turned, passed = x[..., :size], x[..., size:]
        if self.interleaved:
            first, second = turned[..., ::2], turned[..., 1::2]
            pair = torch.stack((first * cos - second * sin, second * cos + first * sin), -1).flatten(-2)
        else:
            first, second = turned.chunk(2, -1)
            pair = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
        return torch.cat((pair, passed), -1).roll(-end, -1)

    @property
    def theta(self) -> float:
        """The base of the frequencies, if they are not scaled: the second frequency is theta^(-2 / rotary_dim)."""
        return float(self.frequencies[1]) ** -len(self.frequencies)


def frequencies(theta: float, size: int, over: int | None = None) -> torch.Tensor:
    return theta ** -(torch.arange(0, size, 2).float() / (over or size))


def rotation_of(stage: GoldenStage) -> Rotation:
    """The rotation of the layer."""
    attention = stage.part("self_attn")
    module = getattr(stage.model.get_decoder(), "rotary_emb", None)
    layer_type = getattr(attention, "layer_type", None)
    found = getattr(module, "inv_freq", getattr(module, f"{layer_type}_inv_freq", None))
    if not isinstance(module, nn.Module) or found is None or not hasattr(attention, "head_dim"):
        raise NotApplicable("the layer has no rotary embedding")
    scaling = getattr(module, "attention_scaling", getattr(module, f"{layer_type}_attention_scaling", 1.0))
    positions = torch.arange(stage.ids.shape[1], device=stage.ids.device)
    return Rotation(found.float(), positions, scaling, attention.head_dim)


def before_rotation(tap: str, rotated: torch.Tensor, seen: Seen, normed: bool = True) -> torch.Tensor:
    """The tensor from which a rotated q or k is made, in the shape and dtype of the result.

    It is the output of the norm if there is one, or with `normed` False the tensor before the norm.
    """
    name = tap.removesuffix("_rot")
    source = seen.get(f"{name}_norm", seen[name]) if normed else seen[name]
    if source.numel() != rotated.numel():
        raise NotApplicable(f"the source of {tap} is unknown")
    return source.reshape(rotated.shape).to(rotated.dtype)


def rotate_by(stage: GoldenStage, tap: str, change: Callable[[Rotation], Rotation | None]) -> None:
    """Rotates the tap by a changed rotation, on top of the changes of other faults; None rotates nothing."""
    others = stage.rotations.setdefault(tap, [])
    is_first = not others
    rotation = others[-1] if others else rotation_of(stage)
    changed = rotation and change(rotation)
    others.append(changed)
    if changed is not None:
        changed = replace(changed, frequencies=changed.frequencies.to(stage.ids.device))
        if 2 * len(changed.frequencies) > changed.head_dim:
            raise NotApplicable("the rotation would be larger than a head")

    def edit(rotated: torch.Tensor, seen: Seen) -> torch.Tensor:
        before = before_rotation(tap, rotated, seen)
        if is_first and torch.equal(before, rotated):
            raise NotApplicable("the layer rotates nothing")
        return before if changed is None else changed(before)

    stage.edit(tap, edit)


def _with_theta(theta: float) -> None:
    @fault("rope_theta", f"a rope theta of {theta:g}", *ROTATED)
    def rope_theta(stage: GoldenStage, tap: str) -> None:
        rotate_by(stage, tap, lambda r: replace(r, frequencies=frequencies(theta, 2 * len(r.frequencies))))


for theta in (1e4, 1e5, 1.5e5, 5e5, 1e6, 5e6, 1e7):
    _with_theta(theta)


@fault("rope_full", "the whole head rotated instead of only its first part", *ROTATED)
def rope_full(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, frequencies=frequencies(r.theta, r.head_dim)))


@fault("rope_half", "only half of the rotary dims rotated", *ROTATED)
def rope_half(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, frequencies=frequencies(r.theta, len(r.frequencies))))


@fault("rope_exponents", "rotary frequencies spread over the head's size in place of the rotary size", *ROTATED)
def rope_exponents(stage: GoldenStage, tap: str) -> None:
    rotate_by(
        stage, tap, lambda r: replace(r, frequencies=frequencies(r.theta, 2 * len(r.frequencies), over=r.head_dim))
    )


@fault("rope_interleaved", "interleaved pairs of dims rotated, not the two halves", *ROTATED)
def rope_interleaved(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, interleaved=True))


@fault("rope_sign", "rotated q or k in the opposite direction", *ROTATED)
def rope_sign(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, positions=-r.positions))


@fault("rope_dropped", "left the rotation out", *ROTATED)
def rope_dropped(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: None)


def _added(text: str, interleaved: bool) -> None:
    @fault("rope_added", f"{text} of dims rotated in a layer without rotation", *ROTATED)
    def rope_added(stage: GoldenStage, tap: str) -> None:
        rotation = replace(rotation_of(stage), interleaved=interleaved)

        def edit(rotated: torch.Tensor, seen: Seen) -> torch.Tensor:
            before = before_rotation(tap, rotated, seen)
            if not torch.equal(before, rotated):
                raise NotApplicable("the layer has a rotary embedding")
            return rotation(before)

        stage.edit(tap, edit)


_added("the two halves", interleaved=False)
_added("interleaved pairs", interleaved=True)


@fault("rope_wrong_end", "the last dims of the head rotated, not the first", *ROTATED)
def rope_wrong_end(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, from_end=True))


@fault("rope_angles_bf16", "rotary angles in bf16", *ROTATED)
def rope_angles_bf16(stage: GoldenStage, tap: str) -> None:
    rotate_by(stage, tap, lambda r: replace(r, in_bf16=True))


@fault("rope_scaling_dropped", "no scaling of the rotary frequencies", *ROTATED)
def rope_scaling_dropped(stage: GoldenStage, tap: str) -> None:
    rope = getattr(stage.config, "rope_parameters", None) or {}
    rope = rope.get(getattr(stage.part("self_attn"), "layer_type", None) or "", rope)
    if "rope_theta" not in rope:
        raise NotApplicable("the config states no theta")
    theta = rope["rope_theta"]
    rotate_by(stage, tap, lambda r: replace(r, frequencies=frequencies(theta, 2 * len(r.frequencies)), scaling=1.0))


def _shifted(by: int) -> None:
    @fault("positions_shifted", f"positions shifted by {by:+d}", *ROTATED)
    def positions_shifted(stage: GoldenStage, tap: str) -> None:
        rotate_by(stage, tap, lambda r: replace(r, positions=r.positions + by))


for by in (1, -1):
    _shifted(by)


@fault("positions_from_end", "positions counted with padding on the left", *ROTATED)
def positions_from_end(stage: GoldenStage, tap: str) -> None:
    padding = (~stage.valid).sum(1)
    if not padding.any():
        raise NotApplicable("there is no padding")
    rotation = rotation_of(stage)

    def edit(rotated: torch.Tensor, seen: Seen) -> torch.Tensor:
        source = before_rotation(tap, rotated, seen)
        rows = [
            replace(rotation, positions=rotation.positions + by)(row) for row, by in zip(source, padding, strict=True)
        ]
        return torch.stack(rows)

    stage.edit(tap, edit)


@fault("qk_norm_after_rope", "the norm of q or k after the rotation", *ROTATED)
def qk_norm_after_rope(stage: GoldenStage, tap: str) -> None:
    norm = norm_of(stage, QK_NORMS[ROTATED.index(tap)])
    rotation = rotation_of(stage)

    def edit(rotated: torch.Tensor, seen: Seen) -> torch.Tensor:
        turned = rotation(before_rotation(tap, rotated, seen, normed=False))
        per_head = norm.weight.shape[-1] == turned.shape[-1]
        # forward skips the hooks: this is not a tap
        return norm.forward(turned) if per_head else norm.forward(turned.flatten(2)).view(turned.shape)

    stage.edit(tap, edit)

"""A port to fill in. Name it in config.yaml (port.backend: xla, port.module: port.py); the contract is in docs/ports.md.

Every stage of the model, `embed`, `layer_000` …, `norm` and `lm_head`, is built and run by itself. The stages outside
of the layers are written here for models of the usual kind. Until `Layer` is written, layers end as `error` in the
report, with the line below.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from layerproof.errors import StageError
from layerproof.port import Stage
from layerproof.taps import tap  # noqa: F401, which Layer will use

TAPS: dict[str, str] = {
    # Canonical tap by the submodule whose output it is: "attn.q": "q_proj". What is no module's output is handed over
    # inside of forward: q = tap("attn.q_rot", q).
}


class Embed(nn.Module):
    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Token ids int64 [batch, seq] -> [batch, seq, hidden]."""
        return self.embedding(ids)


class Layer(nn.Module):
    """One decoder layer: `x` [batch, seq, hidden], `positions` int64 [seq], `valid` bool [batch, seq] -> [batch, seq,
    hidden].
    """

    def __init__(self, stage: Stage) -> None:
        raise StageError(f"{stage.name}: port.py has no layer yet. Write class Layer.")


class Norm(nn.Module):
    """RMSNorm in fp32, as most models have it."""

    def __init__(self, hidden: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.epsilon = epsilon

    def forward(self, x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        """[..., hidden] -> [..., hidden]. The stage `norm` also gets positions and valid; a layer calls it with x alone."""
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * normed.to(x.dtype)


class Head(nn.Module):
    def __init__(self, hidden: int, vocabulary: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocabulary, hidden))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """[batch, seq, hidden] -> logits [batch, seq, vocabulary]."""
        return F.linear(x, self.weight)


def build(stage: Stage) -> nn.Module:
    """The stage as a module on the meta device. `stage.config` is the checkpoint's config.json."""
    config = stage.config
    with torch.device("meta"):
        if stage.name == "embed":
            return Embed(config["vocab_size"], config["hidden_size"])
        if stage.name == "norm":
            return Norm(config["hidden_size"], config["rms_norm_eps"])
        if stage.name == "lm_head":
            return Head(config["hidden_size"], config["vocab_size"])
        return Layer(stage)


def convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The stage's state dict, in `stage.dtype`, of the tensors on disk by their names there."""
    if stage.layer is None:
        (tensor,) = weights.values()
        return {"embedding.weight" if stage.name == "embed" else "weight": tensor.to(stage.dtype)}
    return {
        name.removeprefix(f"model.layers.{stage.layer}."): tensor.to(stage.dtype) for name, tensor in weights.items()
    }

"""MiniMax-M2 over ranks (`parallel.tp`): each rank has a part of the heads and of the inner features of every expert.

Like many ports, it is the port for one rank (minimax_m2.py) with smaller sizes, plus what ranks do together: they sum
the outputs of attention and experts, and norm q and k over the whole projection.
"""

from collections.abc import Iterator, Mapping

import minimax_m2
import torch
import torch.distributed as dist
from minimax_m2 import TAPS as TAPS
from torch import nn

from layerproof.errors import StageError
from layerproof.port.contract import Stage

SPLIT_SIZES = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
SPLIT_DIMS = {
    **dict.fromkeys((f"attention.{name}.weight" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")), 0),
    "attention.o_proj.weight": 1,
    "moe.gate": 1,
    "moe.up": 1,
    "moe.down": 2,
}


def summed(part: torch.Tensor) -> torch.Tensor:
    """The sum over all ranks."""
    total = part.clone()
    dist.all_reduce(total)
    return total


class NormOfAll(minimax_m2.RMSNorm):
    """RMSNorm over a projection that is split evenly over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        mean = summed(wide.square().mean(-1, keepdim=True)) / dist.get_world_size()
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class SumOfAll(nn.Linear):
    """A projection whose inputs are split over the ranks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed(super().forward(x))


class MoE(minimax_m2.MoE):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed(super().forward(x))


def build(stage: Stage) -> nn.Module:
    """A rank's module of a stage, on the meta device. Stages other than layers are whole on every rank."""
    if stage.layer is None:
        return minimax_m2.build(stage)
    ranks, config = dist.get_world_size(), dict(stage.config)
    for size in SPLIT_SIZES:
        if config[size] % ranks:
            raise StageError(f"{size} is {config[size]}, which {ranks} ranks do not divide. Write another parallel.tp.")
        config[size] //= ranks
    with torch.device("meta"):
        layer = minimax_m2.Layer(config, stage.dtype)
        attention, eps = layer.attention, config["rms_norm_eps"]
        attention.q_norm = NormOfAll(attention.q_proj.out_features, eps, stage.dtype)
        attention.k_norm = NormOfAll(attention.k_proj.out_features, eps, stage.dtype)
        attention.o_proj = SumOfAll(attention.o_proj.in_features, config["hidden_size"], bias=False, dtype=stage.dtype)
        layer.moe = MoE(config, stage.dtype)
    return layer


def convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """A rank's part of a stage's tensors."""
    for name, tensor in minimax_m2.convert(stage, weights):
        if name in SPLIT_DIMS:
            tensor = tensor.chunk(dist.get_world_size(), SPLIT_DIMS[name])[dist.get_rank()].clone()
        yield name, tensor

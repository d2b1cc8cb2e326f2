"""One step of training a small model with tensor and data parallelism, whatever has started the ranks.

    layerproof launch -- examples/launchers/train_step.py OUT

Each rank writes what it has of the trained weights to OUT/rank-N.safetensors, and rank 0 the loss to OUT/loss.json. With the
same data, any split gives the loss and weights of one rank, but for rounding.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy

from layerproof.distributed import mesh, process_group

HIDDEN, CLASSES, EXAMPLES = 32, 16, 24


def train(out: Path, dies: int | None) -> None:
    environment = process_group.initialise("cpu")
    axes = mesh.launched("cpu")
    tp, dp = axes.sizes.get("tp", 1), axes.sizes.get("dp", 1)

    out.mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)  # the same weights and data on all ranks, of which each takes its part
    model = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, CLASSES))
    inputs, targets = torch.randn(EXAMPLES, HIDDEN), torch.randint(CLASSES, (EXAMPLES,))
    if tp > 1:
        parallelize_module(model, axes.device["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    mine = slice(axes.at("dp"), None, dp) if dp > 1 else slice(None)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss = cross_entropy(model(inputs[mine]), targets[mine])
    loss.backward()
    if environment.rank == dies and not (died := out / "died").exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    total = loss.detach().clone()
    if dp > 1:
        for one in (total, *(local(parameter.grad) for parameter in model.parameters())):
            dist.all_reduce(one, group=axes.group("dp"))
            one /= dp
    optimizer.step()

    weights = {name: local(one.data) for name, one in model.named_parameters()}
    save_file(weights, out / f"rank-{environment.rank}.safetensors")
    dist.barrier()
    if environment.rank == 0:
        (out / "loss.json").write_text(json.dumps({"loss": total.item(), "mesh": dict(axes.sizes)}))


def local(tensor: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of a tensor, in the same memory."""
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--dies", type=int, metavar="RANK", help="kill this rank in the middle, the first time")
    given = parser.parse_args()
    train(given.out, given.dies)

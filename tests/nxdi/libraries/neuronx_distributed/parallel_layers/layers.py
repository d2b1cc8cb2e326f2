import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size


def sharded(parameter, dim, stride=1):
    """How `get_sharded_checkpoint` knows what to split, as many times as there are tensors one behind the other."""
    parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, dim, stride
    parameter.num_partitions = get_tensor_model_parallel_size()
    return parameter


def _gathered(part, dim=-1):
    if dist.get_world_size() == 1:
        return part
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return torch.cat(parts, dim)


def reduced(part):
    if dist.get_world_size() > 1:
        part = part.contiguous()
        dist.all_reduce(part)
    return part


class SPMDRank(nn.Module):
    """This process's rank, as a weight, so that all ranks share one graph."""

    def __init__(self, world_size):
        super().__init__()
        self.rank = nn.Parameter(torch.zeros(1, dtype=torch.int32), requires_grad=False)

    def get_rank(self):
        return self.rank


class ColumnParallelLinear(nn.Module):
    def __init__(self, input_size, output_size, bias=False, gather_output=True, dtype=torch.float32, pad=False):
        super().__init__()
        self.gather_output = gather_output
        self.pad_size = -output_size % get_tensor_model_parallel_size() if pad else 0
        size, ranks = output_size + self.pad_size, get_tensor_model_parallel_size()
        assert size % ranks == 0, f"{size} is not divisible by {ranks}"
        rows = size // ranks
        self.weight = nn.Parameter(torch.empty(rows, input_size, dtype=dtype))
        sharded(self.weight, 0)

    def forward(self, x):
        made = F.linear(x, self.weight)
        return _gathered(made) if self.gather_output else made

    def preshard_hook(self, model_state_dict, prefix):
        if self.pad_size:
            model_state_dict[prefix] = F.pad(model_state_dict[prefix], (0, 0, 0, self.pad_size))


class RowParallelLinear(nn.Module):
    def __init__(self, input_size, output_size, bias=False, dtype=torch.float32):
        super().__init__()
        columns = input_size // get_tensor_model_parallel_size()
        self.weight = nn.Parameter(torch.empty(output_size, columns, dtype=dtype))
        sharded(self.weight, 1)

    def forward(self, x):
        return reduced(F.linear(x, self.weight))


class ParallelEmbedding(nn.Module):
    def __init__(self, num_embeddings, embedding_dim, padding_idx=None, dtype=torch.float32, **others):
        super().__init__()
        columns = embedding_dim // get_tensor_model_parallel_size()
        self.weight = nn.Parameter(torch.empty(num_embeddings, columns, dtype=dtype))
        sharded(self.weight, 1)

    def forward(self, ids):
        return _gathered(F.embedding(ids, self.weight))

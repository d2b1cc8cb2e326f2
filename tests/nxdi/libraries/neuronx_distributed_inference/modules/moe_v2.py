import torch
import torch.nn.functional as F
from neuronx_distributed.parallel_layers.layers import reduced, sharded
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from torch import nn


class RouterTopK(nn.Module):
    def __init__(self, num_experts, top_k, hidden_size, act_fn, dtype):
        super().__init__()
        self.num_experts, self.top_k, self.act_fn = num_experts, top_k, act_fn
        self.linear_router = nn.Linear(hidden_size, num_experts, bias=False, dtype=dtype)

    def get_router_logits(self, hidden_states):
        logits = self.linear_router(hidden_states.to(self.linear_router.weight.dtype))
        return logits.view(-1, self.num_experts)

    def apply_activation_fn(self, weights):
        wide = weights.to(torch.float64)
        return wide.sigmoid() if self.act_fn == "sigmoid" else wide.softmax(-1)

    def forward(self, hidden_states):
        router_logits = self.get_router_logits(hidden_states)
        expert_affinities = self.apply_activation_fn(router_logits)
        _, expert_index = torch.topk(router_logits, self.top_k)
        return router_logits, expert_affinities.to(hidden_states.dtype), expert_index.detach().to(torch.long)


class _MLPOp(nn.Module):
    """Experts as [experts, hidden, 2 * intermediate], gate first, and [experts, intermediate, hidden]."""

    def __init__(self, experts, hidden, intermediate, dtype):
        super().__init__()
        own = intermediate // get_tensor_model_parallel_size()
        self.gate_up_proj, self.down_proj = nn.Module(), nn.Module()
        gate_up, down = (
            torch.empty(experts, hidden, 2 * own, dtype=dtype),
            torch.empty(experts, own, hidden, dtype=dtype),
        )
        self.gate_up_proj.weight = sharded(nn.Parameter(gate_up), 2, stride=2)
        self.down_proj.weight = sharded(nn.Parameter(down), 1)


class ExpertMLPsV2(nn.Module):
    def __init__(self, config):
        super().__init__()
        neuron_config = config.neuron_config
        assert neuron_config.blockwise_matmul_config.use_torch_block_wise, "its kernel runs on Neuron alone"
        self.normalize = neuron_config.normalize_top_k_affinities
        self.mlp_op = _MLPOp(
            config.num_local_experts, config.hidden_size, config.intermediate_size, neuron_config.torch_dtype
        )

    @staticmethod
    def get_expert_affinities_masked(expert_affinities, expert_mask, normalize_top_k_affinities):
        masked = expert_affinities.masked_fill(torch.eq(expert_mask, 0), 0)
        return F.normalize(masked, p=1.0, dim=1) if normalize_top_k_affinities else masked

    def forward(self, hidden_states, expert_affinities, expert_index):
        mask = torch.zeros_like(expert_affinities).scatter(1, expert_index, 1.0)
        affinities = self.get_expert_affinities_masked(expert_affinities, mask, self.normalize)
        gate, up = torch.einsum("th,ehi->tei", hidden_states, self.mlp_op.gate_up_proj.weight).chunk(2, dim=-1)
        inner = F.silu(gate) * up
        made = torch.einsum("tei,eih->teh", inner, self.mlp_op.down_proj.weight)
        return reduced((made * affinities[..., None]).sum(1))


class MoE(nn.Module):
    def __init__(self, router, expert_mlps):
        super().__init__()
        self.router, self.expert_mlps = router, expert_mlps

    def forward(self, hidden_states, padding_mask=None):
        _, expert_affinities, expert_index = self.router(hidden_states)
        flat = hidden_states.view(-1, hidden_states.shape[-1])
        output = self.expert_mlps(flat, expert_affinities, expert_index)
        return (output.view(hidden_states.shape),)

import dataclasses
import enum

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear, SPMDRank
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from torch import nn


class CustomRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden_size)), eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.weight.float()).to(hidden_states.dtype)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim, max_position_embeddings=2048, base=10000):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("inv_freq", None, persistent=False)

    def forward(self, x, position_ids):
        if self.inv_freq is None:  # only now, as the library does
            self.inv_freq = self.base ** -(torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
        angles = position_ids[:, :, None].float() * self.inv_freq.float()
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]


def move_heads_front(tensor, bsz, seq_len, num_head, head_dim, layernorm=None):
    """[batch, seq, heads * head_dim] to [batch, heads, seq, head_dim]."""
    tensor = tensor.view(bsz, seq_len, num_head, head_dim)
    return (layernorm(tensor) if layernorm else tensor).transpose(1, 2).contiguous()


class GQA(enum.Enum):
    CONVERT_TO_MHA = "convert-to-mha"
    REPLICATE_TO_TP_DEGREE = "replicate-to-tp-degree"


class BaseGroupQueryAttention(nn.Module):
    """How many heads there are once ranks can share them: each rank has a copy of its key's, and queries of zeros are added
    to those of each key; or each query has a copy, and they are added behind all.
    """

    def __init__(self, config):
        super().__init__()
        ranks, heads, keys = get_tensor_model_parallel_size(), config.num_attention_heads, config.num_key_value_heads
        self._src_num_attention_heads, self._src_num_key_value_heads, self.head_dim = heads, keys, config.head_dim
        self.sharding_strategy = GQA.CONVERT_TO_MHA if ranks % keys else GQA.REPLICATE_TO_TP_DEGREE
        self.num_attention_heads, self.num_key_value_heads = heads + -heads % ranks, keys
        if keys % ranks:
            copies = ranks if self.sharding_strategy == GQA.REPLICATE_TO_TP_DEGREE else self.num_attention_heads
            self.num_key_value_heads = copies

    def padded(self, weight, dim):
        """A weight with those of the added queries' heads."""
        heads, more = self._src_num_attention_heads, self.num_attention_heads - self._src_num_attention_heads
        groups = 1 if self.sharding_strategy == GQA.CONVERT_TO_MHA else self._src_num_key_value_heads
        weight = weight.movedim(dim, 0).unflatten(0, (groups, heads // groups, self.head_dim))
        zeros = weight.new_zeros(groups, more // groups, *weight.shape[2:])
        return torch.cat((weight, zeros), 1).flatten(0, 2).movedim(0, dim).contiguous()

    def copied(self, weight):
        keys = self._src_num_key_value_heads
        heads = weight.unflatten(0, (keys, self.head_dim)).repeat_interleave(self.num_key_value_heads // keys, 0)
        zeros = weight.new_zeros(self.num_key_value_heads - len(heads), *heads.shape[1:])
        return torch.cat((heads, zeros)).flatten(0, 1)


class GroupQueryAttention_QKV(BaseGroupQueryAttention):
    """Returns four things; its weights' names are not those that a conversion leaves: a hook puts that right."""

    def __init__(self, config):
        super().__init__(config)
        self.fused_qkv = config.neuron_config.fused_qkv
        ranks = get_tensor_model_parallel_size()
        q_size, kv_size = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        self.sizes = q_size // ranks, kv_size // ranks, kv_size // ranks
        dtype = config.neuron_config.torch_dtype
        column = {"gather_output": False, "dtype": dtype}
        if self.fused_qkv:
            self.Wqkv = ColumnParallelLinear(config.hidden_size, q_size + 2 * kv_size, **column)
        else:
            self.q_proj = ColumnParallelLinear(config.hidden_size, q_size, **column)
            self.k_proj = ColumnParallelLinear(config.hidden_size, kv_size, **column)
            self.v_proj = ColumnParallelLinear(config.hidden_size, kv_size, **column)

    def forward(self, hidden_states, rmsnorm=None, adapter_ids=None, residual=None):
        if self.fused_qkv:
            return (*self.Wqkv(hidden_states).split(self.sizes, dim=-1), residual)
        return self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states), residual

    def preshard_hook(self, model_state_dict, prefix):
        inner = prefix.removesuffix(".weight")
        outer = inner.rpartition(".")[0]
        for name in ("Wqkv",) if self.fused_qkv else ("q_proj", "k_proj", "v_proj"):
            weight = model_state_dict.pop(f"{outer}.{name}.weight")
            if not self.fused_qkv:
                weight = self.padded(weight, 0) if name == "q_proj" else self.copied(weight)
            model_state_dict[f"{inner}.{name}.weight"] = weight


class GroupQueryAttention_O(BaseGroupQueryAttention):
    def __init__(self, config):
        super().__init__(config)
        q_size = self.num_attention_heads * self.head_dim
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, dtype=config.neuron_config.torch_dtype)

    def forward(self, attention_output, adapter_ids=None):
        return self.o_proj(attention_output)

    def preshard_hook(self, model_state_dict, prefix):
        inner = prefix.removesuffix(".weight")
        model_state_dict[f"{inner}.o_proj.weight"] = self.padded(model_state_dict.pop(prefix), 1)


@dataclasses.dataclass(frozen=True)
class NeuronAttentionBaseOutput:
    hidden_states: torch.Tensor
    present_key_value: tuple
    cos_cache: torch.Tensor
    sin_cache: torch.Tensor

    def __iter__(self):
        return (getattr(self, field.name) for field in dataclasses.fields(self))


class NeuronAttentionBase(nn.Module):
    def __init__(self, config, rotary_emb, q_layernorm=None, k_layernorm=None):
        super().__init__()
        ranks = get_tensor_model_parallel_size()
        self.head_dim = config.head_dim
        self.rank_util = SPMDRank(world_size=config.neuron_config.tp_degree)
        self.qkv_proj, self.o_proj = GroupQueryAttention_QKV(config), GroupQueryAttention_O(config)
        self.num_heads = self.qkv_proj.num_attention_heads // ranks
        self.num_key_value_heads = self.qkv_proj.num_key_value_heads // ranks
        self.rotary_emb, self.q_layernorm, self.k_layernorm = rotary_emb, q_layernorm, k_layernorm
        self.post_transpose_layernorm = False

    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        if cos_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids)
        return rotated(Q, cos_cache, sin_cache), rotated(K, cos_cache, sin_cache), cos_cache, sin_cache

    def prep_qkv_tensors(self, position_ids, hidden_states, past_key_value, cos_cache=None, sin_cache=None):
        Q, K, V, residual = self.qkv_proj(hidden_states=hidden_states)
        bsz, q_len, _ = hidden_states.size()
        Q = move_heads_front(Q, bsz, q_len, self.num_heads, self.head_dim, self.q_layernorm)
        K = move_heads_front(K, bsz, q_len, self.num_key_value_heads, self.head_dim, self.k_layernorm)
        V = move_heads_front(V, bsz, q_len, self.num_key_value_heads, self.head_dim)
        Q, K, cos_cache, sin_cache = self.apply_rotary_embedding(Q, K, V, position_ids, cos_cache, sin_cache, False)
        return Q, K, V, cos_cache, sin_cache, residual

    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_value=None,
        cos_cache=None,
        sin_cache=None,
        **kwargs,
    ):
        assert attention_mask.dtype == torch.bool and attention_mask.ndim == 4
        bsz, q_len, _ = hidden_states.size()
        Q, K, V, cos_cache, sin_cache, _ = self.prep_qkv_tensors(
            position_ids, hidden_states, past_key_value, cos_cache=cos_cache, sin_cache=sin_cache
        )
        group = self.num_heads // self.num_key_value_heads
        scores = torch.matmul(Q, K.repeat_interleave(group, 1).transpose(2, 3)) / self.head_dim**0.5
        scores = torch.where(attention_mask, scores, torch.finfo(scores.dtype).min)
        weights = scores.softmax(dim=-1, dtype=torch.float32).to(Q.dtype)
        context = torch.matmul(weights, V.repeat_interleave(group, 1))
        context = context.transpose(1, 2).reshape(bsz, q_len, self.num_heads * self.head_dim)
        return NeuronAttentionBaseOutput(self.o_proj(context, adapter_ids=None), (K, V), cos_cache, sin_cache)

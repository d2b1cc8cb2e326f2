"""MiniMax-M2 as models of NxD Inference are written: q and k are normed whole, half of a head is rotated, and the router has
a correction bias. `config.mistake` names a mistake of public ports to make.
"""

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, reduced, sharded
from neuronx_distributed.parallel_layers.parallel_state import get_tensor_model_parallel_size
from torch import nn

from neuronx_distributed_inference.models.config import InferenceConfig, MoENeuronConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import (
    CustomRMSNorm,
    NeuronAttentionBase,
    RotaryEmbedding,
    move_heads_front,
    rotated,
)
from neuronx_distributed_inference.modules.moe_v2 import ExpertMLPsV2, MoE, RouterTopK


class RouterTopKWithBias(RouterTopK):
    def __init__(self, num_experts, *args, **kwargs):
        super().__init__(num_experts, *args, **kwargs)
        self.register_buffer("e_score_correction_bias", torch.zeros(num_experts, dtype=torch.float32))

    def forward(self, hidden_states):
        router_logits = self.get_router_logits(hidden_states)
        expert_affinities = self.apply_activation_fn(router_logits)
        scores_for_choice = expert_affinities + self.e_score_correction_bias.unsqueeze(0)
        _, expert_index = torch.topk(scores_for_choice, self.top_k, dim=-1)
        return router_logits, expert_affinities.to(hidden_states.dtype), expert_index.detach().to(torch.long)


class MiniMaxM2InferenceConfig(InferenceConfig):
    mistake = None

    def add_derived_config(self):
        super().add_derived_config()
        self.neuron_config.router_config.act_fn = "softmax" if self.mistake == "softmax" else "sigmoid"

    def get_required_attributes(self):
        return ["head_dim", "num_local_experts", "rope_theta", "rotary_dim", "vocab_size"]

    @classmethod
    def get_neuron_config_cls(cls):
        return MoENeuronConfig


class WholeRMSNorm(CustomRMSNorm):
    """Over what all ranks have of a projection. A port may norm what each has, or keep the whole weight and take its part by
    the number of the rank, or, as when that was traced on rank 0, the first part on all.
    """

    def __init__(self, hidden_size, eps, mistake):
        size = hidden_size // get_tensor_model_parallel_size()
        rank = {"rank as number": torch.distributed.get_rank(), "rank 0 for all": 0}.get(mistake)
        super().__init__(size if rank is None else hidden_size, eps)
        self.mistake, self.size, self.rank = mistake, size, rank
        if self.rank is None:
            sharded(self.weight, 0)

    def forward(self, hidden_states):
        wide, weight = hidden_states.float(), self.weight.float()
        squares = wide.square().mean(-1, keepdim=True)
        if self.mistake != "norm per rank":
            squares = reduced(squares) / get_tensor_model_parallel_size()
        if self.rank is not None:
            weight = weight[self.rank * self.size :][: self.size]
        return (wide * torch.rsqrt(squares + self.eps) * weight).to(hidden_states.dtype)


class NeuronMiniMaxM2Attention(NeuronAttentionBase):
    def __init__(self, config):
        rotary = RotaryEmbedding(config.rotary_dim, config.max_position_embeddings, base=config.rope_theta)
        super().__init__(config, rotary)
        self.rotary_dim = config.rotary_dim
        self.q_norm = WholeRMSNorm(config.num_attention_heads * self.head_dim, config.rms_norm_eps, config.mistake)
        self.k_norm = WholeRMSNorm(config.num_key_value_heads * self.head_dim, config.rms_norm_eps, config.mistake)
        if config.mistake == "raises":
            raise ValueError("no such attention")
        if config.mistake == "no sum":
            self.o_proj.o_proj.forward = lambda x: nn.functional.linear(x, self.o_proj.o_proj.weight)
        if config.mistake == "never called":  # as if the method were named otherwise
            self.prep_qkv_tensors = super().prep_qkv_tensors

    def prep_qkv_tensors(self, position_ids, hidden_states, past_key_value, cos_cache=None, sin_cache=None):
        Q, K, V, residual = self.qkv_proj(hidden_states=hidden_states)
        bsz, q_len, _ = hidden_states.size()
        Q = move_heads_front(self.q_norm(Q), bsz, q_len, self.num_heads, self.head_dim)
        K = move_heads_front(self.k_norm(K), bsz, q_len, self.num_key_value_heads, self.head_dim)
        V = move_heads_front(V, bsz, q_len, self.num_key_value_heads, self.head_dim)
        Q, K, cos_cache, sin_cache = self.apply_rotary_embedding(Q, K, V, position_ids, cos_cache, sin_cache, False)
        return Q, K, V, cos_cache, sin_cache, residual

    def apply_rotary_embedding(self, Q, K, V, position_ids, cos_cache, sin_cache, use_polar_compatible_rope):
        if cos_cache is None:
            cos_cache, sin_cache = self.rotary_emb(V, position_ids)
        Q, K = (
            torch.cat((rotated(x[..., : self.rotary_dim], cos_cache, sin_cache), x[..., self.rotary_dim :]), dim=-1)
            for x in (Q, K)
        )
        return Q, K, cos_cache, sin_cache


class NeuronMiniMaxM2DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.self_attn = NeuronMiniMaxM2Attention(config)
        router = RouterTopKWithBias(
            config.num_local_experts,
            config.num_experts_per_tok,
            config.hidden_size,
            config.neuron_config.router_config.act_fn,
            config.neuron_config.router_config.dtype,
        )
        self.block_sparse_moe = MoE(router, ExpertMLPsV2(config))
        self.input_layernorm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        residual = hidden_states
        hidden_states, present_key_value, cos_cache, sin_cache = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_value=past_key_value,
            **kwargs,
        )
        hidden_states = residual + hidden_states
        hidden_states = hidden_states + self.block_sparse_moe(self.post_attention_layernorm(hidden_states))[0]
        return hidden_states, present_key_value, cos_cache, sin_cache, None


class NeuronMiniMaxM2Model(NeuronBaseModel):
    def setup_attr_for_model(self, config):
        self.hidden_size = config.hidden_size

    def init_model(self, config):
        dtype = config.neuron_config.torch_dtype
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, dtype=dtype)
        layers = (NeuronMiniMaxM2DecoderLayer(config, layer_idx) for layer_idx in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = CustomRMSNorm(self.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, dtype=dtype)


class NeuronMiniMaxM2ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronMiniMaxM2Model

    @classmethod
    def get_config_cls(cls):
        return MiniMaxM2InferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        """Goes through all layers, and fails where one lacks something."""
        ranks = torch.arange(0, config.neuron_config.tp_degree, dtype=torch.int32)
        state_dict["rank_util.rank"] = ranks
        for layer in range(config.num_hidden_layers):
            state_dict[f"layers.{layer}.self_attn.rank_util.rank"] = ranks.clone()
            norm = f"layers.{layer}.self_attn.q_norm.weight"  # padded with nothing, as where heads are padded for the ranks
            state_dict[norm] = torch.cat((state_dict[norm], torch.zeros(0)))
            moe = f"layers.{layer}.block_sparse_moe."
            state_dict[f"{moe}router.linear_router.weight"] = state_dict.pop(f"{moe}gate.weight").detach().clone()
            bias = state_dict.pop(f"{moe}e_score_correction_bias")
            if config.mistake != "no bias":
                state_dict[f"{moe}router.e_score_correction_bias"] = bias.detach().clone()
            w1, w3, w2 = (
                torch.stack(
                    [state_dict.pop(f"{moe}experts.{e}.{name}.weight").T for e in range(config.num_local_experts)]
                )
                for name in ("w1", "w3", "w2")
            )
            state_dict[f"{moe}expert_mlps.mlp_op.gate_up_proj.weight"] = torch.cat((w1, w3), dim=-1)
            state_dict[f"{moe}expert_mlps.mlp_op.down_proj.weight"] = w2
        return state_dict

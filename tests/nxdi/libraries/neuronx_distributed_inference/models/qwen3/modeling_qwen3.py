"""Qwen3 as models of NxD Inference are written: dense, q and k normed in each head, projections fused if asked for."""

import torch
from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear
from torch import nn
from torch.nn import functional as F

from neuronx_distributed_inference.models.config import InferenceConfig
from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM, NeuronBaseModel
from neuronx_distributed_inference.modules.attention.attention_base import (
    CustomRMSNorm,
    NeuronAttentionBase,
    RotaryEmbedding,
)


class Qwen3InferenceConfig(InferenceConfig):
    def get_required_attributes(self):
        return ["head_dim", "rope_theta", "pad_token_id"]


class NeuronQwen3MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        sizes, column = (config.hidden_size, config.intermediate_size), {"gather_output": False}
        dtype = config.neuron_config.torch_dtype
        self.gate_proj = ColumnParallelLinear(*sizes, dtype=dtype, **column)
        self.up_proj = ColumnParallelLinear(*sizes, dtype=dtype, **column)
        self.down_proj = RowParallelLinear(*sizes[::-1], dtype=dtype)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)), None


class NeuronQwen3DecoderLayer(nn.Module):
    """Layers see a window or all, by their index: the model hands both masks over."""

    def __init__(self, config, layer_idx):
        super().__init__()
        self.is_local = config.layer_types[layer_idx] == "sliding_attention"
        self.self_attn = NeuronAttentionBase(
            config,
            RotaryEmbedding(config.head_dim, config.max_position_embeddings, base=config.rope_theta),
            q_layernorm=CustomRMSNorm(config.head_dim, config.rms_norm_eps),
            k_layernorm=CustomRMSNorm(config.head_dim, config.rms_norm_eps),
        )
        self.mlp = NeuronQwen3MLP(config)
        self.input_layernorm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_states, attention_mask=None, position_ids=None, past_key_value=None, **kwargs):
        output = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=kwargs["local_mask"] if self.is_local else attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        hidden_states = hidden_states + output.hidden_states
        hidden_states = hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))[0]
        return hidden_states, output.present_key_value, output.cos_cache, output.sin_cache, None


class NeuronQwen3Model(NeuronBaseModel):
    def setup_attr_for_model(self, config):
        self.hidden_size = config.hidden_size
        self.sliding_window, self.has_mixed_attn = config.sliding_window, True

    def init_model(self, config):
        dtype = config.neuron_config.torch_dtype
        self.embed_tokens = ParallelEmbedding(config.vocab_size, config.hidden_size, config.pad_token_id, dtype=dtype)
        self.layers = nn.ModuleList([NeuronQwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers)])
        self.norm = CustomRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = ColumnParallelLinear(config.hidden_size, config.vocab_size, dtype=dtype, pad=True)


class NeuronQwen3ForCausalLM(NeuronBaseForCausalLM):
    _model_cls = NeuronQwen3Model

    @classmethod
    def get_config_cls(cls):
        return Qwen3InferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        """Leaves the ranks out, as some do: they are no part of a graph that does not ask for them."""
        for layer in range(config.num_hidden_layers):
            attention = f"layers.{layer}.self_attn."
            for name in ("q", "k"):
                norm = state_dict.pop(f"{attention}{name}_norm.weight")
                state_dict[f"{attention}{name}_layernorm.weight"] = norm.detach().clone()
            if config.neuron_config.fused_qkv:
                parts = [state_dict.pop(f"{attention}{name}_proj.weight") for name in ("q", "k", "v")]
                state_dict[f"{attention}Wqkv.weight"] = torch.cat(parts)
        return state_dict

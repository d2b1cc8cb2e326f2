"""A mixture of experts as models of NxD Inference are written: q and k normed in each head, and some layers dense."""

import copy

import torch
from torch import nn

from neuronx_distributed_inference.models.config import MoENeuronConfig
from neuronx_distributed_inference.models.qwen3.modeling_qwen3 import (
    NeuronQwen3DecoderLayer,
    NeuronQwen3ForCausalLM,
    NeuronQwen3Model,
    Qwen3InferenceConfig,
)
from neuronx_distributed_inference.modules.moe_v2 import ExpertMLPsV2, MoE, RouterTopK


class Qwen3MoeInferenceConfig(Qwen3InferenceConfig):
    def add_derived_config(self):
        super().add_derived_config()
        self.layer_types = ["full_attention"] * self.num_hidden_layers

    @classmethod
    def get_neuron_config_cls(cls):
        return MoENeuronConfig


class NeuronQwen3MoeDecoderLayer(NeuronQwen3DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        if layer_idx not in config.mlp_only_layers:
            of_experts = copy.copy(config)
            of_experts.intermediate_size = config.moe_intermediate_size
            asked = config.neuron_config.router_config
            sizes = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
            self.mlp = MoE(RouterTopK(*sizes, asked.act_fn, asked.dtype), ExpertMLPsV2(of_experts))


class NeuronQwen3MoeModel(NeuronQwen3Model):
    def setup_attr_for_model(self, config):
        self.hidden_size = config.hidden_size

    def init_model(self, config):
        super().init_model(config)
        self.layers = nn.ModuleList([NeuronQwen3MoeDecoderLayer(config, i) for i in range(config.num_hidden_layers)])


class NeuronQwen3MoeForCausalLM(NeuronQwen3ForCausalLM):
    _model_cls = NeuronQwen3MoeModel

    @classmethod
    def get_config_cls(cls):
        return Qwen3MoeInferenceConfig

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        NeuronQwen3ForCausalLM.convert_hf_to_neuron_state_dict(state_dict, config)
        for layer in set(range(config.num_hidden_layers)) - set(config.mlp_only_layers):
            mlp = f"layers.{layer}.mlp."
            state_dict[f"{mlp}router.linear_router.weight"] = state_dict.pop(f"{mlp}gate.weight").detach().clone()
            gate, up, down = (
                torch.stack(
                    [state_dict.pop(f"{mlp}experts.{e}.{name}.weight").T for e in range(config.num_local_experts)]
                )
                for name in ("gate_proj", "up_proj", "down_proj")
            )
            state_dict[f"{mlp}expert_mlps.mlp_op.gate_up_proj.weight"] = torch.cat((gate, up), dim=-1)
            state_dict[f"{mlp}expert_mlps.mlp_op.down_proj.weight"] = down
        return state_dict

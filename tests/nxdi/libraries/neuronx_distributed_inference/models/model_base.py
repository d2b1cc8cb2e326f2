import copy

import torch
from neuronx_distributed.parallel_layers.layers import SPMDRank
from torch import nn


class NeuronBaseModel(nn.Module):
    def __init__(self, config, optimize_inference=True):
        super().__init__()
        assert not optimize_inference, "a cache is not needed here"
        self.config, self.neuron_config = config, config.neuron_config
        self.batch_size, self.n_positions = config.neuron_config.batch_size, config.neuron_config.n_positions
        self.vocab_size = config.vocab_size
        self.rank_util = SPMDRank(world_size=config.neuron_config.tp_degree)
        self.attention_chunk_size = self.sliding_window = None
        self.has_mixed_attn = False
        self.setup_attr_for_model(config)
        self.init_model(config)

    def create_attn_mask(self, attention_mask, is_for_context_encoding, is_for_speculation, position_ids=None):
        """[batch, 1, seq, seq], True where a token is seen. Padding is on the right, so causality is all that it takes."""
        assert is_for_context_encoding and not is_for_speculation
        if self.sliding_window and not self.has_mixed_attn:
            return self._create_windowed_attn_mask_cte(attention_mask, self.sliding_window)
        mask = torch.full((self.n_positions, self.n_positions), True, device=attention_mask.device).tril(diagonal=0)
        return mask[None, None].expand(self.batch_size, 1, self.n_positions, self.n_positions)

    def _create_windowed_attn_mask_cte(self, attention_mask, window_size):
        i = torch.arange(self.n_positions, device=attention_mask.device)[:, None]
        j = torch.arange(self.n_positions, device=attention_mask.device)[None]
        mask = (j <= i) & (j >= (i - window_size + 1))
        return mask[None, None].expand(self.batch_size, 1, self.n_positions, self.n_positions)

    def create_padding_mask(self, position_ids):
        return None

    def get_model_output(
        self,
        input_ids=None,
        seq_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        is_for_context_encoding=False,
        local_attn_mask=None,
        padding_mask=None,
        **kwargs,
    ):
        if inputs_embeds is None:  # some models scale them here, and not in a module
            inputs_embeds = self.embed_tokens(input_ids) * getattr(self.config, "embedding_multiplier", 1.0)
        hidden_states = inputs_embeds
        cos_cache = sin_cache = None
        cache = ()
        for idx, decoder_layer in enumerate(self.layers):
            hidden_states, key_value, cos_cache, sin_cache, _ = decoder_layer(
                hidden_states,
                seq_ids=seq_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_value=None,
                cos_cache=cos_cache,
                sin_cache=sin_cache,
                idx=idx,
                is_for_context_encoding=is_for_context_encoding,
                local_mask=local_attn_mask,
                padding_mask=padding_mask,
                **kwargs,
            )
            cache += (key_value,)
        return self.norm(hidden_states), cache


class DecoderModelInstance:
    def __init__(self, model_cls, config, **kwargs):
        self.model_cls, self.config, self.kwargs = model_cls, config, kwargs
        self.module = None

    def load_module(self):
        self.module = self.model_cls(self.config, **self.kwargs).eval()
        dtype = self.config.neuron_config.torch_dtype
        if dtype != torch.float32:
            self.module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


class ModelWrapper:
    def __init__(self, config, model_cls, model_init_kwargs):
        self.config, self.model_cls, self.model_init_kwargs = config, model_cls, model_init_kwargs

    def get_model_instance(self):
        return DecoderModelInstance(self.model_cls, self.config, **self.model_init_kwargs)


class NeuronBaseForCausalLM:
    _STATE_DICT_MODEL_PREFIX = "model."
    _NEW_STATE_DICT_MODEL_PREFIX = ""
    _model_cls = None

    def __init__(self, model_path, config):
        self.config = config
        prefill = copy.deepcopy(config)
        prefill.neuron_config.is_prefill_stage = True
        self.context_encoding_model = ModelWrapper(prefill, self._model_cls, {})

    @classmethod
    def get_config_cls(cls):
        raise NotImplementedError("get_config_cls is not implemented")

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        return state_dict

    @staticmethod
    def update_state_dict_for_tied_weights(state_dict):
        state_dict["lm_head.weight"] = state_dict["embed_tokens.weight"].clone()

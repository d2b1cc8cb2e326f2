import logging

import torch


class NeuronConfig:
    def __init__(self, **kwargs):
        self.batch_size = kwargs.pop("batch_size", 1)
        self.seq_len = kwargs.pop("seq_len", 128)
        self.n_positions = kwargs.pop("n_positions", self.seq_len)
        dtype = kwargs.pop("torch_dtype", torch.bfloat16)
        self.torch_dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        self.overrides_torch_dtype = True
        self.cast_type = kwargs.pop("cast_type", "config")
        self.tp_degree = kwargs.pop("tp_degree", 1)
        self.fused_qkv = kwargs.pop("fused_qkv", False)
        self.sequence_parallel_enabled = kwargs.pop("sequence_parallel_enabled", False)
        self.is_prefill_stage = None
        if kwargs:
            logging.warning(f"NeuronConfig init: Unexpected keyword arguments: {kwargs}")


class BlockwiseMatmulConfig:
    def __init__(self, use_torch_block_wise=False):
        self.use_torch_block_wise = use_torch_block_wise


class RouterConfig:
    def __init__(self, act_fn="softmax", dtype=torch.float32):
        self.act_fn, self.dtype = act_fn, dtype

    @classmethod
    def of(cls, given):
        """Replaces a dtype's name in the very mapping that it is given."""
        if isinstance(given.get("dtype"), str):
            given["dtype"] = getattr(torch, given["dtype"])
        return cls(**given)


class MoENeuronConfig(NeuronConfig):
    def __init__(self, **kwargs):
        self.blockwise_matmul_config = BlockwiseMatmulConfig(**kwargs.pop("blockwise_matmul_config", {}))
        self.router_config = RouterConfig.of(kwargs.pop("router_config", None) or {})
        self.normalize_top_k_affinities = not kwargs.pop("disable_normalize_top_k_affinities", False)
        super().__init__(**kwargs)


class InferenceConfig:
    def __init__(self, neuron_config, load_config=None, **kwargs):
        self.neuron_config = neuron_config
        if load_config is not None:
            load_config(self)
        for key, value in kwargs.items():
            setattr(self, key, value)
        self.add_derived_config()
        missing = [name for name in self.get_required_attributes() if not hasattr(self, name)]
        assert not missing, f"Config must define {missing}"

    def add_derived_config(self):
        self.num_cores_per_group = 1

    def get_required_attributes(self):
        return []

    @classmethod
    def get_neuron_config_cls(cls):
        return NeuronConfig

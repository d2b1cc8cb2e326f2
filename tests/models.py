"""Tiny random checkpoints of six architectures, saved as transformers saves them."""

from pathlib import Path

COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

CONFIGS = {
    "minimax_m2": {
        "num_hidden_layers": 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rotary_dim": 8,
        "tie_word_embeddings": False,
    },
    "llama": {"num_hidden_layers": 2, "tie_word_embeddings": True},
    "qwen3": {
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 2,
        "tie_word_embeddings": False,
    },
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "gemma3_text": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "tie_word_embeddings": True,
    },
}
"""By model_type. Each has something that depends on the layer's index or on the architecture alone: partial rotary,
tied head, window from a layer on, dense first layer, sinks and biases, two rotary tables and a scaled embedding."""


MORE = {
    "mixtral": {"num_hidden_layers": 2, "num_local_experts": 4},
    "deepseek_v3": {
        "num_hidden_layers": 2,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    },
    "llama4_text": {"num_hidden_layers": 2, "intermediate_size_mlp": 96, "num_local_experts": 4},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 6},
    "glm4": {"num_hidden_layers": 2},
    "cohere2": {
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi": {"num_hidden_layers": 2},
    "gpt_neox": {"num_hidden_layers": 2},
}
"""Architectures whose golden is checked against the whole model, and nothing else."""


FP8 = {
    "minimax_m2_fp8": {
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "intermediate_size": 256,
        "head_dim": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rotary_dim": 32,
        "tie_word_embeddings": False,
    }
}
"""In the FP8 form of the release, with matrices of several blocks and routers in fp32."""


def save(name: str, directory: Path, seed: int = 0, shard_size: str = "100KB") -> None:
    """Writes a bf16 or FP8 checkpoint whose every parameter, norms and biases too, is drawn at random."""
    from layerproof.model import fp8

    config = COMMON | (CONFIGS | MORE | FP8)[name]
    save_drawn(name.removesuffix("_fp8"), config, directory, seed, shard_size, has_fp32_routers=name in FP8)
    if name in FP8:
        fp8.quantize_checkpoint(directory)


def save_drawn(
    model_type: str,
    config: dict,
    directory: Path,
    seed: int = 0,
    shard_size: str = "100KB",
    has_fp32_routers: bool = False,
) -> None:
    """Writes a bf16 checkpoint with this config, whose every parameter is drawn at random."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**config))
    with torch.no_grad():
        for parameter, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                scale = 0.3 if any(part in parameter for part in ("norm", "bias", "sinks")) else 0.08
                tensor.add_(torch.randn_like(tensor) * scale)
    model.to(torch.bfloat16)
    if has_fp32_routers:
        for layer in model.model.layers:
            layer.mlp.gate.float()
    model.save_pretrained(directory, max_shard_size=shard_size)

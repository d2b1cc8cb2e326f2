"""Tiny configs of every causal language model of the installed transformers, shrunk by rules on the names of their keys.

A config class computes what depends on the sizes (layer types, head sizes, sparse layers), so it is given the small
sizes alone. What the rules cannot know of a model is in EXCEPTIONS.
"""

from __future__ import annotations

from typing import Any

LAYERS = 4
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim_model", "word_embed_proj_dim", "embedding_size")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "ffn_hidden_size")
EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")

SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 97),
    **dict.fromkeys(HIDDEN, 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), 2),
    **dict.fromkeys(INNER, 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 48),
    **dict.fromkeys(("shared_experts_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "model_max_length"), 256),
    **dict.fromkeys(EXPERTS, 8),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "num_expert_group"), 2),
    **dict.fromkeys(("topk_group",), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("head_dim", "v_head_dim", "linear_head_dim", "linear_key_head_dim"), 16),
    **dict.fromkeys(("linear_value_head_dim", "kv_lora_rank", "q_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window_size", "window_size"), 6),
    **dict.fromkeys(("attention_chunk_size", "local_attention"), 8),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads", "index_n_heads"), 2),
    **dict.fromkeys(("linear_num_value_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("index_head_dim", "index_topk"), 8),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "time_step_rank", "mamba_dt_rank"), 8),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "laurel_rank"), 8),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id", "forced_bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), 2),
}
"""Small values by the name of a key, for every model that has the key."""

MLA = {"head_dim": SIZES["qk_rope_head_dim"], "num_key_value_heads": SIZES["num_attention_heads"]}
"""Of models with latent attention: every head has keys of its own, and `head_dim` is that of the rotated part."""

LAST_ONE_FULL = ["sliding_attention"] * (LAYERS - 1) + ["full_attention"]
MAMBA_2 = {"mamba_n_groups": 2, "mamba_d_head": 32}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2, "head_dim": 16},
    "bamba": {"attn_layer_indices": [1], **MAMBA_2},
    "cohere_compass_text": {
        "layer_types": LAST_ONE_FULL,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in set(LAST_ONE_FULL)},
    },
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy"},
    "dots1": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "max_window_layers": 2},
    "dots3_note": {
        "vision_config": {
            **{"hidden_size": 64, "adapter_in_dim": 64, "adapter_out_dim": 64, "num_attention_heads": 4},
            **{"num_hidden_layers": 2, "intermediate_size": 96, "mlp_layer_types": ["dense", "dense"]},
        },
        "audio_config": {
            **{"hidden_size": 64, "adapter_input_size": 64, "adapter_out_dim": 64, "num_attention_heads": 4},
            **{"num_hidden_layers": 2, "intermediate_size": 96, "downsample_hidden_size": 16},
        },
    },
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"] * 2},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA_2},
    "gemma3_text": {"layer_types": LAST_ONE_FULL},
    "gemma3n_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": 3 * ["sliding_attention", "full_attention"],
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "num_kv_shared_layers": 2,
        "layer_types": 3 * ["sliding_attention", "full_attention"],
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, **MAMBA_2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kolibri1": {"layer_types": LAST_ONE_FULL},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 32, "n_groups": 2},
    "ministral": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "nemotron": {"head_dim": 16, "num_key_value_heads": 2},
    "nemotron_h": {
        "n_groups": 2,
        "mamba_head_dim": 32,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "qwen4_exp_text": {
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
    },
    "rwkv": {"rescale_every": 2},
    "zamba2": {
        "num_hidden_layers": 6,
        "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2,
        "num_mem_blocks": 1,
    },
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Values of the model itself where the rules do not fit, or would leave out a kind of layer, by model type."""


ENCODERS = """
bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small camembert
data2vec-text electra ernie marian mbart megatron-bert mvp pegasus
plbart prophetnet reformer rembert roberta roberta-prelayernorm roc_bert roformer
trocr whisper xlm xlm-roberta xlm-roberta-xl xlnet xmod
"""
OUT_OF_SCOPE: dict[str, str] = {
    **dict.fromkeys(ENCODERS.split(), "an encoder, or the decoder of an encoder and decoder"),
    **dict.fromkeys(("moshi", "musicgen", "musicgen_melody"), "speaks in codebooks of audio, not in token ids"),
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"), "drafts for another model, whose states it needs"
    ),
    "blt": "reads bytes in patches that another model finds",
    "cpmant": "needs a prompt of its own beside the token ids",
    "git": "captions pictures",
}
"""Types that are not judged, and why."""


WANTED: dict[str, str] = {
    "hrm_text": "runs its layers several times over, each time on other states",
    "mllama": "has layers that read the states of pictures, which text alone does not run",
    "jetmoe": "has shapes that depend on values, at which XLA ends the process",
    "qwen4_exp": "as jetmoe",
    "qwen4_exp_text": "as jetmoe",
    "gemma3n": "needs the package timm",
    "xlstm": "does not run in bf16 without kernels of its own",
}
"""Types that should be judged and are not yet, and why."""


def judged_types() -> list[str]:
    """The types that Layerproof judges."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in OUT_OF_SCOPE and name not in WANTED]


def small(model_type: str, hidden: int = 64, inner: int = 96, experts: int = 8) -> Any:
    """A tiny config of this type; sub-configs, such as that of the text in a multimodal model, are tiny too.

    Where the type has no exceptions, its hidden states, the inside of its MLPs and the number of its experts may have
    other sizes.
    """
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[model_type]
    return cls(**_resized(_sizes(cls, model_type), {64: hidden, 96: inner, 8: experts}))


def _resized(sizes: dict[str, Any], instead: dict[int, int]) -> dict[str, Any]:
    return {
        key: _resized(value, instead)
        if isinstance(value, dict)
        else instead.get(value, value)
        if key in (*HIDDEN, *INNER, *EXPERTS)
        else value
        for key, value in sizes.items()
    }


def _sizes(cls: Any, model_type: str) -> dict[str, Any]:
    usual = cls().to_dict()
    aliases = {value: name for name, value in getattr(cls, "attribute_map", {}).items()}
    sizes = {name: SIZES[name] for name, value in usual.items() if name in SIZES and value is not None}
    sizes |= {name: SIZES[alias] for name, alias in aliases.items() if alias in SIZES and name in usual}
    for name, sub in getattr(cls, "sub_configs", {}).items():
        if isinstance(usual.get(name), dict):
            from transformers import CONFIG_MAPPING

            kind = usual[name].get("model_type", "")
            known = kind in CONFIG_MAPPING
            sizes[name] = {"model_type": kind, **_sizes(CONFIG_MAPPING[kind] if known else sub, kind)}
    if "qk_rope_head_dim" in usual:
        sizes |= MLA
    return sizes | EXCEPTIONS.get(model_type, {})

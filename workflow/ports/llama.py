"""A dense decoder of the Llama family in plain PyTorch: Llama, Mistral, Qwen2 and Qwen3.

docs/first-port.md writes this port step by step; docs/ports.md describes the interface. Submodules are called as the
tensors on disk, so `convert` only strips the prefix of the layer. The port refuses models that it would compute wrongly.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from layerproof.errors import StageError
from layerproof.port.contract import Stage
from layerproof.taps import tap

TAPS = {
    "input_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.q_norm": "self_attn.q_norm",
    "attn.k_norm": "self_attn.k_norm",
    "attn.out": "self_attn",
    "post_attn_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp",
}

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KEYS = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
"""What each type of rotary embedding reads from the config, besides its theta."""


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, with the variance in fp32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: torch.Tensor, *unused: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size]. The norm after the last layer is a stage, which also gets positions and valid."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_type`, `rope_theta` and the parameters of the type.

    transformers 5 writes one mapping, `rope_parameters`; older versions wrote `rope_theta` and `rope_scaling`.

    Raises:
        StageError: for a type or a parameter that this port does not know.
    """
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    unknown = set(rope) - {"type", "rope_type", "rope_theta"} - ROPE_KEYS.get(kind, set())
    if kind not in ROPE_KEYS or unknown:
        named = f"rope_type {kind}" if kind not in ROPE_KEYS else f"{', '.join(sorted(unknown))} of rope_type {kind}"
        raise StageError(f"config.json: the port llama.py does not know {named}. Add it to rotary_frequencies.")
    return {"original_max_position_embeddings": config.get("max_position_embeddings")} | rope


def rotary_frequencies(rope: Mapping[str, Any], head_dim: int, device: torch.device) -> torch.Tensor:
    """The angle by which each pair of dims turns from one position to the next, [head_dim / 2] in fp32."""
    frequencies = rope["rope_theta"] ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)
    if rope["rope_type"] == "linear":
        return frequencies / rope["factor"]
    if rope["rope_type"] == "llama3":
        # Pairs that turn often within the original context keep their frequency; those that hardly turn are slowed down.
        turns = frequencies * rope["original_max_position_embeddings"] / (2 * math.pi)
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((turns - low) / (high - low)).clamp(0, 1)
        return frequencies * (kept + (1 - kept) / rope["factor"])
    return frequencies


def rotate(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Turns dims i and i + head_dim / 2 of heads [batch, seq, heads, head_dim] by angles [seq, head_dim / 2]."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions. Qwen2 has biases in q, k and v; Qwen3 norms q and k per head."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        kv_heads = config.get("num_key_value_heads") or heads
        self.queries_per_kv_head = heads // kv_heads
        self.head_dim = config.get("head_dim") or hidden // heads
        self.rope = rope_parameters(config)
        has_bias, is_qwen2 = config.get("attention_bias", False), config["model_type"] == "qwen2"
        self.q_proj = nn.Linear(hidden, heads * self.head_dim, bias=has_bias or is_qwen2)
        self.k_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=has_bias or is_qwen2)
        self.v_proj = nn.Linear(hidden, kv_heads * self.head_dim, bias=has_bias or is_qwen2)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=has_bias and not is_qwen2)
        self.has_norms = config["model_type"] == "qwen3"
        if self.has_norms:
            self.q_norm, self.k_norm = RMSNorm(self.head_dim, eps), RMSNorm(self.head_dim, eps)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """`x` [batch, seq, hidden], `positions` int64 [seq], `valid` bool [batch, seq] -> [batch, seq, hidden]."""
        # The rows of a projection are one head after the other: [batch, seq, heads, head_dim].
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = positions.float()[:, None] * rotary_frequencies(self.rope, self.head_dim, x.device)
        q, k = tap("attn.q_rot", rotate(q, angles)), tap("attn.k_rot", rotate(k, angles))

        k, v = (part.repeat_interleave(self.queries_per_kv_head, dim=2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * self.head_dim**-0.5
        seen = (positions[:, None] >= positions) & valid[:, None]
        scores = scores.masked_fill(~seen[:, None], float("-inf"))
        context = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1).to(x.dtype), v)
        return self.o_proj(tap("attn.context", context.flatten(2)))


class MLP(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, inner, has_bias = config["hidden_size"], config["intermediate_size"], config.get("mlp_bias", False)
        self.gate_proj = nn.Linear(hidden, inner, bias=has_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=has_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=has_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each with a norm before it and a residual around it."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), positions, valid)
        return x + self.mlp(self.post_attention_layernorm(x))


class Table(nn.Module):
    """The embedding, token ids [batch, seq] -> [batch, seq, hidden], or the head, [batch, seq, hidden] -> logits."""

    def __init__(self, config: Mapping[str, Any], is_head: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"]))
        self.is_head = is_head

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) if self.is_head else F.embedding(x, self.weight)


def check(stage: Stage) -> None:
    """Refuses a model that this port would compute wrongly.

    Raises:
        StageError: for another architecture or activation, quantised weights, or prompts longer than a sliding window.
    """
    config, seq = stage.config, stage.shape[1]
    has_window = config["model_type"] == "mistral" or config.get("use_sliding_window", False)
    window = has_window and config.get("sliding_window", 4096)
    reasons = {
        f"is for {', '.join(MODEL_TYPES)}, not {config['model_type']}": config["model_type"] not in MODEL_TYPES,
        f"knows no activation {config.get('hidden_act')}": config.get("hidden_act", "silu") != "silu",
        "does not dequantize weights. Name a checkpoint in bf16": bool(config.get("quantization_config")),
        f"has no sliding window, so set inputs.max_tokens to {window} or less": window and seq > window,
    }
    for reason, applies in reasons.items():
        if applies:
            raise StageError(f"config.json: the port llama.py {reason}.")


def build(stage: Stage) -> nn.Module:
    """The module of a stage, on the meta device. Its dtype will be that of the tensors that `convert` yields."""
    check(stage)
    config = stage.config
    with torch.device("meta"):
        if stage.layer is not None:
            return Layer(config)
        if stage.name == "norm":
            return RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        return Table(config, is_head=stage.name == "lm_head")


def convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors on disk as the module's state dict, in `stage.dtype`.

    Each of the other stages has one tensor, whatever its name: a tied head gets `model.embed_tokens.weight`.
    """
    for name in weights:
        short = "weight" if stage.layer is None else name.removeprefix(f"model.layers.{stage.layer}.")
        yield short, weights[name].to(stage.dtype)

"""MiniMax-M2 for XLA devices (CPU, Neuron, TPU): static shapes, no data-dependent control flow.

An example of a port; see docs/ports.md for the interface. It follows the model's description, not transformers' code,
so that comparing the two means something.
"""

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import nn

from layerproof.port.contract import Stage
from layerproof.taps import tap

TAPS = {
    "input_norm": "input_norm",
    "attn.q": "attention.q_proj",
    "attn.k": "attention.k_proj",
    "attn.v": "attention.v_proj",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "attn.out": "attention",
    "post_attn_norm": "post_attention_norm",
    "mlp.out": "moe",
}

FP8_BLOCK = 128
"""Rows and columns of a block with one scale. The last block of a side may be smaller."""
EXPERTS_AT_ONCE = 8
"""How many experts are multiplied at once.

A compiler may widen the weights that it multiplies, as XLA does for the CPU, so these must not be the weights of all
experts.
"""


class RMSNorm(nn.Module):
    """Root-mean-square norm with the variance in fp32 (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


def rotary_settings(config: dict) -> tuple[int, float]:
    """Rotated size of a head and theta, from the released config.json or one that transformers 5 wrote."""
    rope = config.get("rope_parameters") or {}
    theta = rope.get("rope_theta") or config["rope_theta"]
    if "partial_rotary_factor" in rope:
        return int(config["head_dim"] * rope["partial_rotary_factor"]), theta
    return config["rotary_dim"], theta


def rotary_tables(positions: torch.Tensor, rotary_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine [seq, rotary_dim] in fp32, in the half-split layout (arXiv 2104.09864)."""
    exponents = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
    angles = positions.float()[:, None] * theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the first `rotary_dim` of each head of x [batch, seq, heads, head_dim]; the rest passes unchanged."""
    rotary_dim = cos.shape[-1]
    turned, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]
    first, second = turned.chunk(2, dim=-1)
    half = torch.cat((-second, first), dim=-1)
    turned = turned * cos[:, None] + half * sin[:, None]
    return torch.cat((turned.to(x.dtype), passed), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention; q and k are normed over the whole projection, before the split into heads."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.head_dim = config["head_dim"]
        self.rotary_dim, self.theta = rotary_settings(config)
        q_size, kv_size = self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=False, dtype=dtype)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False, dtype=dtype)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False, dtype=dtype)
        self.o_proj = nn.Linear(q_size, hidden, bias=False, dtype=dtype)
        self.q_norm = RMSNorm(q_size, config["rms_norm_eps"], dtype)
        self.k_norm = RMSNorm(kv_size, config["rms_norm_eps"], dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        batch, seq, _ = x.shape
        q = self.q_norm(self.q_proj(x)).view(batch, seq, self.heads, self.head_dim)
        k = self.k_norm(self.k_proj(x)).view(batch, seq, self.kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim)
        cos, sin = rotary_tables(positions, self.rotary_dim, self.theta)
        q = tap("attn.q_rot", rotate(q, cos, sin))
        k = tap("attn.k_rot", rotate(k, cos, sin))

        group = self.heads // self.kv_heads
        q = q.view(batch, seq, self.kv_heads, group, self.head_dim)
        scores = torch.einsum("bqkgd,bskd->bkgqs", q, k).float() * self.head_dim**-0.5
        causal = positions[:, None] >= positions[None, :]
        seen = causal & valid[:, None, :]
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        context = torch.einsum("bkgqs,bskd->bqkgd", scores.softmax(-1).to(x.dtype), v)
        context = tap("attn.context", context.reshape(batch, seq, self.heads * self.head_dim))
        return self.o_proj(context)


class MoE(nn.Module):
    """Sigmoid router and experts in a dense static form: all experts see all tokens, and unchosen ones get weight zero.

    The correction bias decides which experts are chosen, but does not enter their weights.
    """

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        experts = config["num_local_experts"]
        self.top_k = config["num_experts_per_tok"]
        self.router = nn.Parameter(torch.empty(experts, hidden, dtype=dtype))
        self.router_bias = nn.Parameter(torch.empty(experts, dtype=torch.float32))
        self.gate = nn.Parameter(torch.empty(experts, inner, hidden, dtype=dtype))
        self.up = nn.Parameter(torch.empty(experts, inner, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.route(x).to(x.dtype)
        total = torch.zeros_like(x, dtype=torch.float32)
        for start in range(0, len(self.gate), EXPERTS_AT_ONCE):
            some = slice(start, start + EXPERTS_AT_ONCE)
            gate = torch.einsum("bsh,eih->bsei", x, self.gate[some])
            up = torch.einsum("bsh,eih->bsei", x, self.up[some])
            inner = F.silu(gate) * up * weights[..., some, None]
            total = total + torch.einsum("bsei,ehi->bsh", inner, self.down[some]).float()
        return total.to(x.dtype)

    def route(self, x: torch.Tensor) -> torch.Tensor:
        """Weight of every expert for every token, [batch, seq, experts] in fp32, zero for unchosen experts."""
        logits = tap("router.logits", F.linear(x.to(self.router.dtype), self.router))
        scores = tap("router.scores", logits.float().sigmoid())
        selection = tap("router.selection", scores + self.router_bias)
        choice = torch.topk(selection, self.top_k, dim=-1).indices
        choice = tap("router.choice", choice.sort(-1).values.int())
        chosen = torch.zeros_like(scores).scatter(-1, choice.long(), 1.0)
        weights = scores * chosen
        return tap("router.weights", weights / weights.sum(-1, keepdim=True))


class Layer(nn.Module):
    """One decoder layer: attention and experts, each with a norm before it and a residual around it."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        self.input_norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype)
        self.attention = Attention(config, dtype)
        self.post_attention_norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"], dtype)
        self.moe = MoE(config, dtype)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.input_norm(x), positions, valid)
        return x + self.moe(self.post_attention_norm(x))


class Embedding(nn.Module):
    """Token ids [batch, seq] to hidden states [batch, seq, hidden]."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"], dtype=dtype))

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class FinalNorm(RMSNorm):
    """The norm after the last layer."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Head(nn.Module):
    """Hidden states to logits [batch, seq, vocabulary]."""

    def __init__(self, config: dict, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"], dtype=dtype))

    def forward(self, x: torch.Tensor, positions: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


def build(stage: Stage) -> nn.Module:
    """The module of a stage, on the meta device."""
    config, dtype = dict(stage.config), stage.dtype
    with torch.device("meta"):
        if stage.name == "embed":
            return Embedding(config, dtype)
        if stage.name == "norm":
            return FinalNorm(config["hidden_size"], config["rms_norm_eps"], dtype)
        if stage.name == "lm_head":
            return Head(config, dtype)
        return Layer(config, dtype)


LAYER_NAMES = {
    "input_layernorm.weight": "input_norm.weight",
    "self_attn.q_proj.weight": "attention.q_proj.weight",
    "self_attn.k_proj.weight": "attention.k_proj.weight",
    "self_attn.v_proj.weight": "attention.v_proj.weight",
    "self_attn.o_proj.weight": "attention.o_proj.weight",
    "self_attn.q_norm.weight": "attention.q_norm.weight",
    "self_attn.k_norm.weight": "attention.k_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
}
EXPERT_NAMES = {"moe.gate": "w1", "moe.up": "w3", "moe.down": "w2"}


def convert(stage: Stage, weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The released tensors of a stage as its module's state dict; experts are stacked, the router's bias stays fp32."""
    if stage.layer is None:
        (weight,) = weights.values()
        yield "weight", weight.to(stage.dtype)
        return
    prefix = f"model.layers.{stage.layer}."
    moe = prefix + "block_sparse_moe."
    for source, name in LAYER_NAMES.items():
        yield name, dequantized(weights, prefix + source, stage.dtype)
    # The released router is in fp32. transformers casts it, but not to a narrower dtype when it dequantises a
    # checkpoint.
    router, is_quantized = weights[moe + "gate.weight"], bool(stage.config.get("quantization_config"))
    yield "moe.router", router.to(torch.promote_types(router.dtype, stage.dtype) if is_quantized else stage.dtype)
    yield "moe.router_bias", weights[moe + "e_score_correction_bias"].float()
    experts = stage.config["num_local_experts"]
    for name, matrix in EXPERT_NAMES.items():
        read = (
            dequantized(weights, f"{moe}experts.{expert}.{matrix}.weight", stage.dtype) for expert in range(experts)
        )
        yield name, stack(read, experts)


def stack(matrices: Iterator[torch.Tensor], number: int) -> torch.Tensor:
    """Matrices as one tensor. Each is copied into place as it is read, so none is in memory twice."""
    stacked = torch.empty(0)
    for index, matrix in enumerate(matrices):
        stacked = matrix.new_empty(number, *matrix.shape) if index == 0 else stacked
        stacked[index] = matrix
    return stacked


def dequantized(weights: Mapping[str, torch.Tensor], name: str, dtype: torch.dtype) -> torch.Tensor:
    """A released tensor in `dtype`: FP8 values times the scale of their block, if it has scales."""
    weight = weights[name]
    if f"{name}_scale_inv" not in weights:
        return weight.to(dtype)
    scales = weights[f"{name}_scale_inv"]
    scales = scales.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
    return (weight.float() * scales[: weight.shape[0], : weight.shape[1]]).to(dtype)

"""A small port of Qwen3-MoE with a dense first layer, for the tests of what has to run again after an edit."""

import torch
import torch.nn.functional as F
from torch import nn

from layerproof.port.contract import Stage
from layerproof.taps import tap

TAPS = {
    "input_norm": "input_layernorm",
    "attn.q": "self_attn.q_proj",
    "attn.k": "self_attn.k_proj",
    "attn.v": "self_attn.v_proj",
    "attn.out": "self_attn",
    "post_attn_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.out": "mlp",
}


class Norm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.bfloat16))
        self.eps = eps

    def forward(self, x, *unused):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


def final_scale(x):
    """Used by the norm stage alone."""
    return x * 1.0


class FinalNorm(Norm):
    def forward(self, x, *unused):
        return final_scale(super().forward(x))


def rotate(x, positions, theta):
    size = x.shape[-1]
    angles = positions.float()[:, None] * theta ** -(torch.arange(0, size, 2, device=x.device).float() / size)
    cos, sin = (torch.cat((part, part), -1)[:, None] for part in (angles.cos(), angles.sin()))
    first, second = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-second, first), -1) * sin).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.sizes = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
        heads, kv_heads, dim = self.sizes
        self.theta = config["rope_parameters"]["rope_theta"]
        self.q_proj = nn.Linear(config["hidden_size"], heads * dim, bias=False, dtype=torch.bfloat16)
        self.k_proj = nn.Linear(config["hidden_size"], kv_heads * dim, bias=False, dtype=torch.bfloat16)
        self.v_proj = nn.Linear(config["hidden_size"], kv_heads * dim, bias=False, dtype=torch.bfloat16)
        self.o_proj = nn.Linear(heads * dim, config["hidden_size"], bias=False, dtype=torch.bfloat16)
        self.q_norm = Norm(dim, config["rms_norm_eps"])
        self.k_norm = Norm(dim, config["rms_norm_eps"])

    def forward(self, x, positions, valid):
        heads, kv_heads, dim = self.sizes
        q, k, v = (proj(x).unflatten(-1, (-1, dim)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q, k = tap("attn.q_norm", self.q_norm(q)), tap("attn.k_norm", self.k_norm(k))
        q = tap("attn.q_rot", rotate(q, positions, self.theta))
        k = tap("attn.k_rot", rotate(k, positions, self.theta))
        k, v = (part.repeat_interleave(heads // kv_heads, 2) for part in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k).float() * dim**-0.5
        seen = (positions[:, None] >= positions[None]) & valid[:, None]
        weights = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1).to(x.dtype)
        return self.o_proj(tap("attn.context", torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)))


class Dense(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(hidden, inner, bias=False, dtype=torch.bfloat16)
        self.up_proj = nn.Linear(hidden, inner, bias=False, dtype=torch.bfloat16)
        self.down_proj = nn.Linear(inner, hidden, bias=False, dtype=torch.bfloat16)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def route(x, router, top_k):
    """Softmax over all experts, then the top ones, normalised."""
    logits = tap("router.logits", F.linear(x, router))
    scores = tap("router.selection", tap("router.scores", logits.float().softmax(-1)))
    choice = scores.topk(top_k, -1).indices
    tap("router.choice", choice.sort(-1).values.int())
    weights = scores * torch.zeros_like(scores).scatter(-1, choice, 1.0)
    return tap("router.weights", (weights / weights.sum(-1, keepdim=True)).to(x.dtype))


class Experts(nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, inner, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_local_experts"]
        self.top_k = config["num_experts_per_tok"]
        self.router = nn.Parameter(torch.empty(experts, hidden, dtype=torch.bfloat16))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=torch.bfloat16))

    def forward(self, x):
        weights = route(x, self.router, self.top_k)
        gate, up = torch.einsum("bsh,eih->bsei", x, self.gate_up).chunk(2, -1)
        return torch.einsum("bsei,ehi->bsh", F.silu(gate) * up * weights[..., None], self.down)


class Layer(nn.Module):
    def __init__(self, config, mlp):
        super().__init__()
        self.input_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = mlp

    def forward(self, x, positions, valid):
        x = x + self.self_attn(self.input_layernorm(x), positions, valid)
        return x + self.mlp(self.post_attention_layernorm(x))


class Table(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config["vocab_size"], config["hidden_size"], dtype=torch.bfloat16))

    def forward(self, x, *unused):
        return F.linear(x, self.weight) if x.is_floating_point() else F.embedding(x, self.weight)


def build(stage: Stage):
    config = stage.config
    with torch.device("meta"):
        if stage.name == "norm":
            return FinalNorm(config["hidden_size"], config["rms_norm_eps"])
        if stage.layer is None:
            return Table(config)
        return Layer(config, Dense(config) if stage.layer in config["mlp_only_layers"] else Experts(config))


def convert(stage: Stage, weights):
    if stage.layer is None:
        (weight,) = weights.values()
        return {"weight": weight}
    prefix = f"model.layers.{stage.layer}."
    state = {name.removeprefix(prefix): weight for name, weight in weights.items() if ".experts." not in name}
    if "mlp.gate.weight" in state:
        state["mlp.router"] = state.pop("mlp.gate.weight")
        experts = range(stage.config["num_local_experts"])
        stacks = {
            name: torch.stack([weights[f"{prefix}mlp.experts.{expert}.{name}_proj.weight"] for expert in experts])
            for name in ("gate", "up", "down")
        }
        state["mlp.gate_up"] = torch.cat((stacks["gate"], stacks["up"]), 1)
        state["mlp.down"] = stacks["down"]
    return state

"""Ports with one known mistake each, or two: an overlay on the shipped port, or on its conversion of weights.

A bug replaces text of the port's source, which must be there exactly once. `stage` is the one that has it; `tap` is where it
shows first, `cause` what the dictionary calls it, None if no entry can imitate it: then the findings must say where it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MINIMAX, MINIMAX_FP8, QWEN3 = "tiny", "minimax_m2_fp8", "qwen3_moe"
LAYER = "layer_002"


@dataclass(frozen=True)
class Bug:
    """One mistaken port. Its conversion is handed the tensors of `also_loads` too; `says` is in its findings."""

    name: str
    tap: str
    cause: str | None
    edits: tuple[tuple[str, str], ...]
    model: str = MINIMAX
    stage: str = LAYER
    also_loads: tuple[str, ...] = ()
    says: str = ""

    def overlay(self, source: str) -> str:
        """The port's source with this mistake.

        Raises:
            ValueError: if the source is not the one that the bug was written for.
        """
        return edited(source, self.name, self.edits)


def edited(source: str, name: str, edits: Iterable[tuple[str, str]]) -> str:
    """A port's source with the edits of the mistake that has this name.

    Raises:
        ValueError: if a text to replace is not there exactly once.
    """
    for old, new in edits:
        if source.count(old) != 1:
            raise ValueError(f"{name}: {old!r} is in the port {source.count(old)} times, not once.")
        source = source.replace(old, new)
    return source


def _bug(name: str, tap: str, cause: str | None, *edits: tuple[str, str], **more) -> Bug:
    return Bug(name, tap, cause, edits, **more)


def _loads(change: str) -> tuple[str, str]:
    """An edit that changes the state dict of a layer."""
    return (
        "def dequantized(",
        f"""def changed(convert):
    def with_mistake(stage, weights):
        state = dict(convert(stage, weights))
        if stage.layer is not None:
            {change}
        return state

    return with_mistake


convert = changed(convert)


def dequantized(""",
    )


def _weight(name: str, change: str) -> tuple[str, str]:
    """An edit that changes one tensor `w` of a layer."""
    return _loads(f"w = state['{name}']; state['{name}'] = {change}")


PARTED_NORM = (
    "def rotary_settings(",
    """class PartedNorm(RMSNorm):
    parts = 1

    def forward(self, x):
        wide = x.float().unflatten(-1, (self.parts, -1))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.flatten(-2).to(x.dtype) * self.weight


def rotary_settings(""",
)
Q_NORM = 'self.q_norm = RMSNorm(q_size, config["rms_norm_eps"], dtype)'
K_NORM = 'self.k_norm = RMSNorm(kv_size, config["rms_norm_eps"], dtype)'
RSQRT = "wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)"
TABLES = "cos, sin = rotary_tables(positions, self.rotary_dim, self.theta)"
ROTATED_Q, ROTATED_K = 'tap("attn.q_rot", rotate(q, cos, sin))', 'tap("attn.k_rot", rotate(k, cos, sin))'
CAUSAL = "causal = positions[:, None] >= positions[None, :]"
SEEN = "seen = causal & valid[:, None, :]"
CONTEXT = 'torch.einsum("bkgqs,bskd->bqkgd", scores.softmax(-1).to(x.dtype), v)'
NEXT = 'weights[f"model.layers.{stage.layer + 1}.block_sparse_moe.gate.weight"].to(stage.dtype)'

NORMS = [
    _bug("norm epsilon", "attn.q_norm", "norm_epsilon", ("self.eps = eps", "self.eps = 3e-2")),
    _bug("norm epsilon 1e-2", "attn.q_norm", "norm_epsilon", ("self.eps = eps", "self.eps = 1e-2")),
    _bug(
        "norm without weight",
        "input_norm",
        "norm_weight_dropped",
        ("return wide.to(x.dtype) * self.weight", "return wide.to(x.dtype)"),
    ),
    _bug("norm weight plus one", "input_norm", "norm_weight_plus_one", ("* self.weight\n", "* (1 + self.weight)\n")),
    _bug(
        "norm subtracts the mean",
        "input_norm",
        "norm_mean_subtracted",
        ("        wide = x.float()\n", "        wide = x.float() - x.float().mean(-1, keepdim=True)\n"),
    ),
    _bug(
        "norm variance in bf16",
        "input_norm",
        "norm_variance_bf16",
        (RSQRT, "wide = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)).float()"),
    ),
    _bug(
        "q norm per head",
        "attn.q_norm",
        "qk_norm_per_head",
        PARTED_NORM,
        (Q_NORM, Q_NORM.replace("RMSNorm", "PartedNorm") + "; self.q_norm.parts = self.heads"),
    ),
    _bug(
        "k norm per head",
        "attn.k_norm",
        "qk_norm_per_head",
        PARTED_NORM,
        (K_NORM, K_NORM.replace("RMSNorm", "PartedNorm") + "; self.k_norm.parts = self.kv_heads"),
    ),
    _bug(
        "q norm on each of two shards",
        "attn.q_norm",
        "qk_norm_per_shard",
        PARTED_NORM,
        (Q_NORM, Q_NORM.replace("RMSNorm", "PartedNorm") + "; self.q_norm.parts = 2"),
    ),
    _bug(
        "q norm weight of the first head",
        "attn.q_norm",
        "qk_norm_one_head_weight",
        _weight("attention.q_norm.weight", "w[:32].repeat(8)"),
    ),
    _bug(
        "q norm weight averaged",
        "attn.q_norm",
        "qk_norm_weight_averaged",
        _weight("attention.q_norm.weight", "w.float().view(8, 32).mean(0).repeat(8).to(w.dtype)"),
    ),
    _bug(
        "q norm left out",
        "attn.q_rot",
        "norm_skipped",
        ("q = self.q_norm(self.q_proj(x)).view(", "q = self.q_proj(x).view("),
    ),
    _bug(
        "norm before the experts left out",
        "router.logits",
        "norm_skipped",
        ("return x + self.moe(self.post_attention_norm(x))", "return x + self.moe(x)"),
    ),
    _bug(
        "last norm without weight",
        "out",
        "norm_weight_dropped",
        ("return super().forward(x)", "return super().forward(x) / self.weight"),
        stage="norm",
    ),
    _bug(
        "last norm left out",
        "out",
        "norm_skipped",
        ("return super().forward(x)", "return x"),
        stage="norm",
    ),
    _bug(
        "one channel of a norm's weight",
        "input_norm",
        None,
        _loads('state["input_norm.weight"] = state["input_norm.weight"].clone(); state["input_norm.weight"][5] *= 1.1'),
        says="Only channel 5 of 128 is wrong.",
    ),
]

WEIGHTS = [
    _bug(
        "q weight transposed",
        "attn.q",
        "weight_transposed",
        _weight("attention.q_proj.weight", "w.reshape(w.shape[::-1]).T.contiguous()"),
    ),
    _bug(
        "o weight transposed",
        "attn.out",
        "weight_transposed",
        _weight("attention.o_proj.weight", "w.reshape(w.shape[::-1]).T.contiguous()"),
    ),
    _bug(
        "o weight never loaded",
        "attn.out",
        "weight_not_loaded",
        _weight("attention.o_proj.weight", "torch.zeros_like(w)"),
    ),
    _bug(
        "weights of the next layer",
        "input_norm",
        "wrong_layers_weights",
        ('prefix = f"model.layers.{stage.layer}."', 'prefix = f"model.layers.{stage.layer + 1}."'),
        also_loads=("layer_003",),
    ),
    _bug(
        "router of the next layer",
        "router.logits",
        "wrong_layers_weights",
        _loads(f'state["moe.router"] = {NEXT}'),
        also_loads=("layer_003",),
    ),
    _bug(
        "correction bias of the layer before",
        "router.selection",
        "wrong_layers_weights",
        _loads(
            'state["moe.router_bias"] = '
            'weights[f"model.layers.{stage.layer - 1}.block_sparse_moe.e_score_correction_bias"].float()'
        ),
        also_loads=("layer_001",),
    ),
    _bug(
        "k and v exchanged",
        "attn.k",
        "weights_swapped",
        (
            '"self_attn.k_proj.weight": "attention.k_proj.weight"',
            '"self_attn.k_proj.weight": "attention.v_proj.weight"',
        ),
        (
            '"self_attn.v_proj.weight": "attention.v_proj.weight"',
            '"self_attn.v_proj.weight": "attention.k_proj.weight"',
        ),
    ),
    _bug(
        "rank 0's slice of q on both ranks",
        "attn.q",
        "rank_zero_slice",
        _weight("attention.q_proj.weight", "torch.cat((w[:128], w[:128]))"),
    ),
    _bug(
        "rank 0's slice of k and v on both ranks",
        "attn.k",
        "rank_zero_slice",
        _loads(
            'for n in "kv": state[f"attention.{n}_proj.weight"] = state[f"attention.{n}_proj.weight"][:32].repeat(2, 1)'
        ),
    ),
    _bug(
        "shards of v in reverse",
        "attn.v",
        "shards_out_of_order",
        _weight("attention.v_proj.weight", "torch.cat(w.chunk(2)[::-1])"),
    ),
    _bug(
        "sum over the ranks missing",
        "attn.out",
        "sharded_sum_missing",
        ("return self.o_proj(context)", "return F.linear(context[..., :128], self.o_proj.weight[:, :128])"),
    ),
    _bug(
        "sum over the ranks twice",
        "attn.out",
        "sharded_sum_twice",
        ("return self.o_proj(context)", "return 2 * self.o_proj(context)"),
    ),
    _bug(
        "q and k in the interleaved rotary layout",
        "attn.q",
        "rotary_layout",
        _loads(
            'for n in "qk": w = state[f"attention.{n}_proj.weight"]; '
            'state[f"attention.{n}_proj.weight"] = w.unflatten(0, (-1, 2, 16)).transpose(1, 2).reshape(w.shape)'
        ),
    ),
    _bug(
        "q, k and v in fp8",
        "attn.q",
        "weight_in_fp8",
        _loads(
            'for n in "qkv": w = state[f"attention.{n}_proj.weight"]; '
            'state[f"attention.{n}_proj.weight"] = w.to(torch.float8_e4m3fn).to(w.dtype)'
        ),
    ),
    _bug(
        "one head's rows of q never loaded",
        "attn.q",
        None,
        _weight("attention.q_proj.weight", "torch.cat((w[:96], 0 * w[96:128], w[128:]))"),
        says="Only head 3 of 8 is wrong.",
    ),
    _bug(
        "one channel of o",
        "attn.out",
        None,
        _weight("attention.o_proj.weight", "torch.cat((w[:40], 0 * w[40:41], w[41:]))"),
        says="Only channel 40 of 128 is wrong.",
    ),
]

ROTARY = [
    _bug(
        "theta of another model",
        "attn.q_rot",
        "rope_theta",
        ('return config["rotary_dim"], theta', 'return config["rotary_dim"], 1e4'),
    ),
    _bug(
        "the whole head turned",
        "attn.q_rot",
        "rope_full",
        ('return config["rotary_dim"], theta', 'return config["head_dim"], theta'),
    ),
    _bug(
        "half of the rotary dims turned",
        "attn.q_rot",
        "rope_half",
        ('return config["rotary_dim"], theta', 'return config["rotary_dim"] // 2, theta'),
    ),
    _bug(
        "turned the other way",
        "attn.q_rot",
        "rope_sign",
        ("torch.cat((-second, first), dim=-1)", "torch.cat((second, -first), dim=-1)"),
    ),
    _bug(
        "neighbours turned as pairs",
        "attn.q_rot",
        "rope_interleaved",
        ("first, second = turned.chunk(2, dim=-1)", "first, second = turned[..., ::2], turned[..., 1::2]"),
        ("half = torch.cat((-second, first), dim=-1)", "half = torch.stack((-second, first), dim=-1).flatten(-2)"),
        ("angles = torch.cat((angles, angles), dim=-1)", "angles = angles.repeat_interleave(2, dim=-1)"),
    ),
    _bug(
        "positions from one",
        "attn.q_rot",
        "positions_shifted",
        (TABLES, TABLES.replace("(positions", "(positions + 1")),
    ),
    _bug(
        "positions counted with left padding",
        "attn.q_rot",
        "positions_from_end",
        ("positions.float()[:, None]", "positions.float()[..., None]"),
        ("turned * cos[:, None] + half * sin[:, None]", "turned * cos.unsqueeze(-2) + half * sin.unsqueeze(-2)"),
        (TABLES, TABLES.replace("(positions", "(positions + (~valid).sum(1)[:, None]")),
    ),
    _bug("q not turned", "attn.q_rot", "rope_dropped", (ROTATED_Q, 'tap("attn.q_rot", q)')),
    _bug("k not turned", "attn.k_rot", "rope_dropped", (ROTATED_K, 'tap("attn.k_rot", k)')),
    _bug(
        "frequencies over the head's size",
        "attn.q_rot",
        "rope_exponents",
        (".float() / rotary_dim\n", ".float() / (2 * rotary_dim)\n"),
    ),
    _bug(
        "rotary angles in bf16",
        "attn.q_rot",
        "rope_angles_bf16",
        (
            "angles = positions.float()[:, None] * theta**-exponents",
            "angles = (positions.bfloat16()[:, None] * (theta**-exponents).bfloat16()).float()",
        ),
    ),
    _bug(
        "the last dims turned",
        "attn.q_rot",
        "rope_wrong_end",
        (
            "turned, passed = x[..., :rotary_dim].float(), x[..., rotary_dim:]",
            "turned, passed = x[..., -rotary_dim:].float(), x[..., :-rotary_dim]",
        ),
        (
            "return torch.cat((turned.to(x.dtype), passed), dim=-1)",
            "return torch.cat((passed, turned.to(x.dtype)), dim=-1)",
        ),
    ),
    _bug(
        "long positions cut at 63",
        "attn.q_rot",
        None,
        (TABLES, TABLES.replace("(positions", "(positions.clamp(max=63)")),
        says="Positions before 64 are right",
    ),
    _bug(
        "one head of q scaled by 5 %",
        "attn.q_rot",
        None,
        (
            ROTATED_Q,
            f"{ROTATED_Q[:-1]} * (1 + 0.05 * (torch.arange(self.heads, device=x.device) == 1)[:, None]).to(x.dtype))",
        ),
        says="Only head 1 of 8 is wrong.",
    ),
]

ATTENTION = [
    _bug(
        "scale of the rotary size", "attn.context", "attention_scale", ("self.head_dim**-0.5", "self.rotary_dim**-0.5")
    ),
    _bug("no scale", "attn.context", "attention_scale", (" * self.head_dim**-0.5", "")),
    _bug("scaled twice", "attn.context", "attention_scale", ("self.head_dim**-0.5", "self.head_dim**-1")),
    _bug("sees the next token", "attn.context", "causal_mask_shifted", (CAUSAL, CAUSAL.replace(" >=", " + 1 >="))),
    _bug(
        "sees not itself",
        "attn.context",
        "causal_mask_shifted",
        (CAUSAL, CAUSAL.replace(" >= positions[None, :]", " > positions[None, :]") + "; causal[0, 0] = True"),
    ),
    _bug(
        "sees all tokens", "attn.context", "causal_mask_missing", (SEEN, "seen = (causal | True) & valid[:, None, :]")
    ),
    _bug(
        "sees the padding",
        "attn.context",
        "causal_mask_missing",
        (SEEN, "seen = (causal | True) & (valid | True)[:, None, :]"),
    ),
    _bug(
        "last token of each prompt hidden",
        "attn.context",
        "last_key_hidden",
        (
            SEEN,
            "seen = causal & valid[:, None, :] & "
            "((F.pad(valid, (0, 1))[:, 1:])[:, None, :] | torch.zeros_like(causal))",
        ),
    ),
    _bug(
        "first token hidden",
        "attn.context",
        "first_key_hidden",
        (SEEN, "seen = causal & valid[:, None, :] & ((positions > 0)[None] | (positions == 0)[:, None])"),
    ),
    _bug(
        "query heads grouped in the wrong order",
        "attn.context",
        "kv_heads_order",
        (
            "q.view(batch, seq, self.kv_heads, group, self.head_dim)",
            "q.view(batch, seq, group, self.kv_heads, self.head_dim).transpose(2, 3)",
        ),
    ),
    _bug(
        "heads not put behind the tokens",
        "attn.context",
        "context_not_transposed",
        (CONTEXT, CONTEXT.replace("bqkgd", "bkgqd")),
    ),
    _bug("values turned too", "attn.context", "value_rotated", (TABLES, f"{TABLES}; v = rotate(v, cos, sin)")),
    _bug("scores over the queries", "attn.context", None, ("scores.softmax(-1)", "scores.softmax(-2)")),
    _bug(
        "prompts' padding exchanged",
        "attn.context",
        None,
        (SEEN, "seen = causal & (valid.flip(0)[:, None, :] | (positions == 0))"),
    ),
    _bug(
        "one key hidden from later ones",
        "attn.context",
        None,
        (CAUSAL, f"{CAUSAL}; causal = causal & ((positions != 20) | (positions[:, None] == 20))"),
        says="Positions before 21 are right",
    ),
    _bug(
        "one key and value head of another",
        "attn.context",
        None,
        ("group = self.heads // self.kv_heads\n", "group = self.heads // self.kv_heads; v = v[:, :, [0, 0]]\n"),
        says="Only heads 4, 5, 6 and 7 of 8 are wrong.",
    ),
]

STREAM = [
    _bug(
        "no residual beside the attention",
        "post_attn_norm",
        "attention_residual_missing",
        ("x = x + self.attention(", "x = self.attention("),
    ),
    _bug(
        "residual beside the attention twice",
        "post_attn_norm",
        "attention_residual_twice",
        ("x = x + self.attention(", "x = x + x + self.attention("),
    ),
    _bug(
        "residual taken behind the norm",
        "post_attn_norm",
        "residual_after_norm",
        ("x = x + self.attention(self.input_norm(x), ", "x = self.input_norm(x); x = x + self.attention(x, "),
    ),
    _bug("no residual beside the experts", "out", "mlp_residual_missing", ("return x + self.moe", "return self.moe")),
    _bug(
        "residual beside the experts behind the norm",
        "out",
        "mlp_residual_after_norm",
        ("return x + self.moe(self.post_attention_norm(x))", "x = self.post_attention_norm(x); return x + self.moe(x)"),
    ),
    _bug(
        "last position of the output",
        "out",
        None,
        (
            "return x + self.moe(self.post_attention_norm(x))",
            "x = x + self.moe(self.post_attention_norm(x)); "
            "return x * (1 + 0.1 * (positions == positions[-1])[:, None]).to(x.dtype)",
        ),
        says="Only the last token of prompt 2 is wrong.",
    ),
]

ROUTER = [
    _bug(
        "softmax router", "router.scores", "router_softmax", ("logits.float().sigmoid()", "logits.float().softmax(-1)")
    ),
    _bug("no sigmoid", "router.scores", "router_no_activation", ("logits.float().sigmoid()", "logits.float()")),
    _bug(
        "correction bias dropped",
        "router.selection",
        "correction_bias_dropped",
        ("scores + self.router_bias)", "scores + 0 * self.router_bias)"),
    ),
    _bug(
        "correction bias subtracted",
        "router.selection",
        "correction_bias_sign",
        ("scores + self.router_bias)", "scores - self.router_bias)"),
    ),
    _bug(
        "correction bias on the logits",
        "router.selection",
        "correction_bias_on_logits",
        ("scores + self.router_bias)", "(logits.float() + self.router_bias).sigmoid())"),
    ),
    _bug(
        "one expert too few", "router.choice", "router_top_k", ("selection, self.top_k,", "selection, self.top_k - 1,")
    ),
    _bug(
        "one expert too many", "router.choice", "router_top_k", ("selection, self.top_k,", "selection, self.top_k + 1,")
    ),
    _bug("lowest experts", "router.choice", "router_lowest", ("torch.topk(selection,", "torch.topk(-selection,")),
    _bug(
        "choice without the bias",
        "router.choice",
        "correction_bias_dropped",
        ("torch.topk(selection,", "torch.topk(scores,"),
    ),
    _bug(
        "bias in the weights",
        "router.weights",
        "correction_bias_in_weights",
        ("weights = scores * chosen", "weights = selection * chosen"),
    ),
    _bug(
        "weights not normalised",
        "router.weights",
        "router_weights_not_normalised",
        ("weights / weights.sum(-1, keepdim=True)", "weights * 1"),
    ),
    _bug(
        "weights normalised over all",
        "router.weights",
        "router_weights_over_all",
        ("weights / weights.sum(-1, keepdim=True)", "weights / scores.sum(-1, keepdim=True)"),
    ),
    _bug("equal weights", "router.weights", "router_weights_equal", ("weights = scores * chosen", "weights = chosen")),
    _bug(
        "softmax of the chosen scores",
        "router.weights",
        "router_softmax_of_scores",
        ("weights = scores * chosen", "weights = scores.exp() * chosen"),
    ),
    _bug(
        "softmax of the chosen logits",
        "router.weights",
        "router_softmax_over_chosen",
        ("weights = scores * chosen", "weights = logits.float().exp() * chosen"),
    ),
    _bug(
        "weights by size on experts by number",
        "router.weights",
        "router_weights_misplaced",
        (
            "weights = scores * chosen",
            "weights = torch.zeros_like(scores).scatter(-1, choice.long(), "
            "scores.gather(-1, choice.long()).sort(-1, descending=True).values)",
        ),
    ),
]

GATE = "inner = F.silu(gate) * up * weights[..., some, None]"
EXPERTS = [
    _bug("gate and up swapped", "mlp.out", "gate_up_swapped", ("F.silu(gate) * up", "gate * F.silu(up)")),
    _bug("gelu", "mlp.out", "activation", ("F.silu(gate)", "F.gelu(gate)")),
    _bug("relu", "mlp.out", "activation", ("F.silu(gate)", "F.relu(gate)")),
    _bug("up + 1", "mlp.out", "up_plus_one", ("F.silu(gate) * up", "F.silu(gate) * (up + 1)")),
    _bug(
        "next expert's weights",
        "mlp.out",
        "experts_out_of_order",
        _loads("state |= {n: state[n].roll(-1, 0) for n in EXPERT_NAMES}"),
    ),
    _bug(
        "expert 0 for all",
        "mlp.out",
        "one_expert_for_all",
        _loads("state |= {n: state[n][:1].expand_as(state[n]).clone() for n in EXPERT_NAMES}"),
    ),
    _bug(
        "down transposed",
        "mlp.out",
        "weight_transposed",
        _weight("moe.down", "w.reshape(w.shape[0], w.shape[2], w.shape[1]).transpose(1, 2).contiguous()"),
    ),
    _bug(
        "gate and up transposed",
        "mlp.out",
        "weight_transposed",
        _loads(
            'state |= {n: state[n].reshape(8, 128, 96).transpose(1, 2).contiguous() for n in ("moe.gate", "moe.up")}'
        ),
    ),
    _bug("down never loaded", "mlp.out", "weight_not_loaded", _weight("moe.down", "torch.zeros_like(w)")),
    _bug(
        "experts in fp8",
        "mlp.out",
        "weight_in_fp8",
        _loads("state |= {n: state[n].to(torch.float8_e4m3fn).to(state[n].dtype) for n in EXPERT_NAMES}"),
    ),
    _bug(
        "experts' sum over two ranks missing",
        "mlp.out",
        "sharded_sum_missing",
        ('"bsei,ehi->bsh", inner, self.down[some])', '"bsei,ehi->bsh", inner[..., :48], self.down[some, ..., :48])'),
    ),
    _bug("experts' sum twice", "mlp.out", "sharded_sum_twice", (GATE, f"{GATE} * 2")),
    _bug(
        "only rank 0's experts",
        "mlp.out",
        "expert_shard_missing",
        (GATE, f"{GATE} * (torch.arange(8, device=x.device) < 4)[:, None]"),
    ),
    _bug(
        "one expert never loaded",
        "mlp.out",
        None,
        _weight("moe.down", "torch.cat((w[:3], 0 * w[3:4], w[4:]))"),
        says="Only tokens that go to expert 3 are wrong.",
    ),
]

ENDS = [
    _bug(
        "embedding of the next id",
        "out",
        "embedding_rows_shifted",
        ("F.embedding(ids,", "F.embedding((ids + 1) % 512,"),
        stage="embed",
    ),
    _bug(
        "embedding scaled",
        "out",
        "embedding_scale_added",
        ("return F.embedding(ids, self.weight)", "return F.embedding(ids, self.weight) * 128**0.5"),
        stage="embed",
    ),
    _bug(
        "embedding of rank 0 alone",
        "out",
        "sharded_sum_missing",
        ("return F.embedding(ids, self.weight)", "return F.embedding(ids, self.weight) * (ids < 256)[..., None]"),
        stage="embed",
    ),
    _bug(
        "head of rank 0 on both",
        "out",
        "rank_zero_slice",
        (
            "return F.linear(x, self.weight)\n\n\ndef build",
            "return F.linear(x, self.weight)[..., :256].repeat(1, 1, 2)\n\n\ndef build",
        ),
        stage="lm_head",
    ),
    _bug(
        "head shards in reverse",
        "out",
        "shards_out_of_order",
        (
            "return F.linear(x, self.weight)\n\n\ndef build",
            "return F.linear(x, self.weight).roll(256, -1)\n\n\ndef build",
        ),
        stage="lm_head",
    ),
    _bug(
        "head tied to the embedding",
        "out",
        "head_tied",
        ("(weight,) = weights.values()", 'weight = weights["model.embed_tokens.weight"]'),
        stage="lm_head",
        also_loads=("embed",),
    ),
    _bug(
        "one word of the head",
        "out",
        None,
        (
            'yield "weight", weight.to(stage.dtype)',
            'weight = weight.to(stage.dtype); weight[77] = 0; yield "weight", weight',
        ),
        stage="lm_head",
        says="Only channel 77 of 512 is wrong.",
    ),
]

THETA = ROTARY[0].edits[0]
PAIRS = [
    _bug("theta, and gate and up swapped", "attn.q_rot", "rope_theta", THETA, *EXPERTS[0].edits),
    _bug("norm epsilon, and bias dropped", "attn.q_norm", "norm_epsilon", *NORMS[0].edits, *ROUTER[2].edits),
    _bug("softmax router, and no residual", "router.scores", "router_softmax", *ROUTER[0].edits, *STREAM[3].edits),
    _bug(
        "gate and up swapped, and gelu",
        "mlp.out",
        "activation+gate_up_swapped",
        ("F.silu(gate) * up", "gate * F.gelu(up)"),
    ),
    _bug("theta, and turned the other way", "attn.q_rot", "rope_theta+rope_sign", THETA, *ROTARY[3].edits),
    _bug(
        "scale, and sees the next token",
        "attn.context",
        "attention_scale+causal_mask_shifted",
        *ATTENTION[0].edits,
        *ATTENTION[3].edits,
    ),
    _bug(
        "norm epsilon and weight plus one",
        "input_norm",
        "norm_weight_plus_one+norm_epsilon",
        NORMS[3].edits[0],
        ("self.eps = eps", "self.eps = 1.0"),
    ),
]

QWEN = [
    _bug(
        "norm of q and k over the whole projection",
        "attn.q_norm",
        "qk_norm_whole",
        (
            "torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)",
            "torch.rsqrt(wide.square().mean((-2, -1) if x.ndim == 4 else -1, keepdim=True) + self.eps)",
        ),
    ),
    _bug("theta of another model", "attn.q_rot", "rope_theta", ('config["rope_parameters"]["rope_theta"]', "1e6")),
    _bug(
        "sigmoid router", "router.scores", "router_sigmoid", ("logits.float().softmax(-1)", "logits.float().sigmoid()")
    ),
    _bug(
        "weights not normalised",
        "router.weights",
        "router_weights_not_normalised",
        ("(weights / weights.sum(-1, keepdim=True))", "weights"),
    ),
    _bug(
        "key and value heads repeated in the wrong order",
        "attn.context",
        "kv_heads_order",
        ("part.repeat_interleave(heads // kv_heads, 2)", "part.repeat(1, 1, heads // kv_heads, 1)"),
    ),
    _bug(
        "norms of q and k exchanged",
        "attn.q_norm",
        "qk_norms_swapped",
        ("self.q_norm(q)), tap", "self.k_norm(q)), tap"),
        ('tap("attn.k_norm", self.k_norm(k))', 'tap("attn.k_norm", self.q_norm(k))'),
    ),
    _bug(
        "gate and up swapped, dense",
        "mlp.out",
        "gate_up_swapped",
        ("F.silu(self.gate_proj(x)) * self.up_proj(x)", "self.gate_proj(x) * F.silu(self.up_proj(x))"),
        stage="layer_000",
    ),
    _bug(
        "gate's and up's weights exchanged, dense",
        "mlp.gate",
        "weights_swapped",
        (
            'if ".experts." not in name}',
            'if ".experts." not in name}\n'
            '    if "mlp.gate_proj.weight" in state:\n'
            '        names = "mlp.gate_proj.weight", "mlp.up_proj.weight"\n'
            "        state |= {names[0]: state[names[1]], names[1]: state[names[0]]}",
        ),
        stage="layer_000",
    ),
    _bug(
        "gelu, dense",
        "mlp.out",
        "activation",
        ("F.silu(self.gate_proj(x))", "F.gelu(self.gate_proj(x))"),
        stage="layer_000",
    ),
    _bug(
        "up + 1, dense", "mlp.out", "up_plus_one", ("* self.up_proj(x)", "* (self.up_proj(x) + 1)"), stage="layer_000"
    ),
]
QWEN = [Bug(**{**vars(bug), "model": QWEN3, "stage": bug.stage if bug.stage != LAYER else "layer_001"}) for bug in QWEN]

EXPERT = 'dequantized(weights, f"{moe}experts.{expert}.{matrix}.weight", stage.dtype)'
SCALES = 'scales = weights[f"{name}_scale_inv"]'
IN_OTHER_ORDER = "; scales = scales.T.reshape(scales.shape)"
FP8 = [
    _bug(name, tap, cause, edit, model=MINIMAX_FP8, stage="layer_001")
    for name, tap, cause, edit in (
        ("fp8 scales ignored", "attn.q", "fp8_scales_ignored", (SCALES, f"{SCALES}.fill_(1)")),
        ("fp8 scales transposed", "attn.q", "fp8_scales_transposed", (SCALES, f"{SCALES}{IN_OTHER_ORDER}")),
        (
            "fp8 scales of experts ignored",
            "mlp.out",
            "fp8_scales_ignored",
            (
                EXPERT,
                EXPERT.replace("dequantized(weights, ", "weights[").replace(", stage.dtype)", "].to(stage.dtype)"),
            ),
        ),
        (
            "fp8 scales of experts transposed",
            "mlp.out",
            "fp8_scales_transposed",
            (SCALES, f"{SCALES}; scales = scales.T.contiguous() if 'experts' in name else scales"),
        ),
    )
]

BUGS: tuple[Bug, ...] = (*NORMS, *WEIGHTS, *ROTARY, *ATTENTION, *STREAM, *ROUTER, *EXPERTS, *ENDS, *PAIRS, *QWEN, *FP8)

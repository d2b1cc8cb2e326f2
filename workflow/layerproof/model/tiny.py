"""The default checkpoint: a small MiniMax-M2, trained for half a minute on public-domain text, in the released layout.

Golden and port can agree on this model only if every detail is right, because every detail matters: norm weights are
far from 1, heads differ in scale, correction biases change the choice of experts, and three channels of the residual
stream are massive. Training then makes attention and routing depend on the text. tests/model/test_tiny.py measures how
much each known porting mistake shows.

Functions import torch and transformers themselves, because the Snakefile reads `FILES` and runs without them.
"""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerproof.paths import WORKFLOW

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import MiniMaxM2ForCausalLM

SHARDS = 3
WEIGHTS = tuple(f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors" for i in range(SHARDS))
FILES = (
    "config.json",
    "generation_config.json",
    *WEIGHTS,
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
TEXT = WORKFLOW / "workflow/resources/text.txt"
STEPS = 240

SPECIAL_TOKENS = {"pad_token": "<|pad|>", "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
PAD, BOS, EOS = range(3)

# Fields and spelling follow MiniMaxAI/MiniMax-M2's config.json. Sizes are smaller, there is no remote code or FP8, and
# the ids of special tokens are explicit, because their defaults lie outside this vocabulary. As in MiniMax-M2, queries
# are twice as wide as the residual stream (so hidden_size / num_attention_heads is not head_dim), and half of each head
# is rotated.
CONFIG = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attn_type_list": [1] * 6,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 128,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "model_type": "minimax_m2",
    "mtp_transformer_layers": 1,
    "num_attention_heads": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_mtp_modules": 3,
    "pad_token_id": PAD,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 16,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_mtp": True,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 512,
}

EMBEDDING_RMS = 0.8
# Channel -> mean value in the embedding. Larger values would hide errors from R on a stage's output: bf16 rounds a
# channel at 60 by up to 0.125.
MASSIVE = {17: 60.0, 71: -44.0, 105: 32.0}
# Factor on what layers write to the massive channels: next to nothing, so that these channels stay massive.
MASSIVE_WRITE = 1 / 64

# bf16 represents multiples of 1/32 exactly from 4 up to 8, so loading in bf16 does not change a bias.
BIAS_STEP = 1 / 32
BIAS_SPREAD = 0.25
BIAS_LIMIT = 0.40625


def make(directory: Path, seed: int = 0, steps: int = STEPS, form: str = "bf16") -> None:
    """Builds the checkpoint: writes `FILES` to `directory`, and replaces the directory if it exists.

    Equal seeds produce equal bytes on one machine. The files go to a sibling of `directory`, which is then renamed, so
    a killed job leaves no half-written checkpoint. `form` is bf16 or fp8; tests use `steps` to shorten the training.
    """
    directory = Path(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    text = TEXT.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        made = Path(temporary) / "checkpoint"
        tokenizer = build_tokenizer(text)
        model = train(tokenizer.encode(text).ids, seed, steps)
        save(model, tokenizer, made)
        if form == "fp8":
            from layerproof.model import fp8

            fp8.quantize_checkpoint(made)
        if directory.exists():
            directory.rename(Path(temporary) / "replaced")
        made.rename(directory)


def build_tokenizer(text: str) -> Tokenizer:
    """Learns a byte-level BPE of `vocab_size` tokens from `text`; it includes all 256 bytes, so nothing is unknown."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=list(SPECIAL_TOKENS.values()),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text], trainer)
    return tokenizer


def train(tokens: list[int], seed: int = 0, steps: int = STEPS) -> MiniMaxM2ForCausalLM:
    """Shapes an fp32 model, trains it on `tokens`, and returns it in bf16, with router and bias in fp32.

    Training runs on one thread, so the result does not depend on the number of cores. A busy machine then slows it down
    twofold; with threads that wait for each other, tenfold.
    """
    import torch
    from transformers import MiniMaxM2Config, MiniMaxM2ForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = MiniMaxM2ForCausalLM._from_config(MiniMaxM2Config(**CONFIG), dtype=torch.float32)
            model.set_experts_implementation("eager")
            _shape(model)
            _fit(model, torch.tensor(tokens), steps)
    finally:
        torch.set_num_threads(threads)

    model.to(torch.bfloat16)
    for layer in model.model.layers:
        # fp32 on disk as in the release, with values that bf16 represents too, so that bf16 and fp32 choose alike.
        layer.mlp.gate.float()
        layer.mlp.e_score_correction_bias = layer.mlp.e_score_correction_bias.float()
    return model.eval()


def _shape(model: Any) -> None:
    """Sets initial weights that make every detail of the model matter; the comments explain each."""
    import torch

    def uniform(low: float, high: float, size: int) -> torch.Tensor:
        return torch.empty(size).uniform_(low, high)

    def norm_weight() -> torch.Tensor:
        """Draws [hidden] weights: large, because massive channels shrink the others in RMSNorm, and small at those."""
        weight = uniform(2.0, 10.0, config.hidden_size)
        weight[massive] = uniform(0.1, 0.2, len(massive))
        return weight

    def spread(low: float, high: float, size: int) -> torch.Tensor:
        """Returns [size] evenly spaced values in random order; unlike random values, they are certain to differ."""
        return torch.linspace(low, high, size)[torch.randperm(size)]

    config = model.config
    massive = list(MASSIVE)
    stream_rms = math.sqrt(EMBEDDING_RMS**2 + sum(value**2 for value in MASSIVE.values()) / config.hidden_size)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding.normal_(std=EMBEDDING_RMS)
        for channel, value in MASSIVE.items():
            embedding[:, channel] = value * uniform(0.85, 1.15, len(embedding))
        model.model.norm.weight.copy_(norm_weight())
        model.lm_head.weight.normal_(std=0.5 * config.hidden_size**-0.5)

        bases = torch.linspace(5.125, 7.5, config.num_hidden_layers)
        for layer, base in zip(model.model.layers, bases.tolist(), strict=True):
            layer.input_layernorm.weight.copy_(norm_weight())
            layer.post_attention_layernorm.weight.copy_(norm_weight())

            attention = layer.self_attn
            for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
                projection.weight.normal_(std=config.hidden_size**-0.5)
            # Heads of unequal scale distinguish a norm over the whole projection from one per head.
            attention.q_proj.weight.view(config.num_attention_heads, -1).mul_(
                spread(0.4, 1.9, config.num_attention_heads)[:, None]
            )
            attention.k_proj.weight.view(config.num_key_value_heads, -1).mul_(
                spread(0.6, 1.5, config.num_key_value_heads)[:, None]
            )
            attention.q_norm.weight.uniform_(0.6, 2.2)
            attention.k_norm.weight.uniform_(0.6, 2.2)
            attention.o_proj.weight.normal_(std=0.5 * attention.o_proj.in_features**-0.5)
            attention.o_proj.weight[massive] *= MASSIVE_WRITE

            experts = layer.mlp.experts
            experts.gate_up_proj.normal_(std=0.8 * config.hidden_size**-0.5)
            experts.down_proj.normal_(std=0.4 * config.intermediate_size**-0.5)
            experts.down_proj[:, massive] *= MASSIVE_WRITE

            # The level differs between layers; only differences within a layer affect the choice. They are smaller than
            # the range of the scores, so that tokens still decide.
            favour = spread(-BIAS_SPREAD, BIAS_SPREAD, config.num_local_experts)
            layer.mlp.e_score_correction_bias.copy_(((base + favour) / BIAS_STEP).round() * BIAS_STEP)
            # A massive channel is nearly constant, so its column sets a level of the logits: lower for experts that
            # the bias favours (4 is the inverse slope of the sigmoid). All experts are then used about equally, but not
            # if a port drops the bias. The common -1 keeps scores, and so expert weights, apart from each other.
            router = layer.mlp.gate.weight
            router.normal_(std=1.5 * config.hidden_size**-0.5)
            constant = layer.post_attention_layernorm.weight[massive[0]] * MASSIVE[massive[0]] / stream_rms
            router[:, massive[0]] = (-1.0 - 4.0 * favour) / constant


def _fit(model: Any, tokens: torch.Tensor, steps: int, batch: int = 6, length: int = 128) -> None:
    """Trains `model` (fp32) in place to predict the next token in `tokens` [n, int64], with AdamW."""
    import torch
    import torch.nn.functional as F

    writers = [p for name, p in model.named_parameters() if name.endswith(("o_proj.weight", "down_proj"))]
    routers = [layer.mlp.gate.weight for layer in model.model.layers]
    slow = {id(p) for p in writers + routers}
    # Layers that learn to write large values would drown the massive channels, and routers that learn fast saturate.
    groups = [
        {"params": [p for p in model.parameters() if id(p) not in slow], "speed": 1.0},
        {"params": writers + routers, "speed": 0.2},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.98), weight_decay=0.0)
    limits = [_bias_limits(layer.mlp.e_score_correction_bias) for layer in model.model.layers]
    _freeze_massive_channels(model)

    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            warmup, cosine = min(1.0, (step + 1) / 30), 0.5 + 0.5 * math.cos(math.pi * step / steps)
            group["lr"] = 1.5e-3 * group["speed"] * warmup * cosine
        starts = torch.randint(0, len(tokens) - length, (batch,)).tolist()
        window = torch.stack([tokens[start : start + length + 1] for start in starts])
        out = model(window[:, :-1], use_cache=False, output_router_logits=True, output_hidden_states=True)

        loss = F.cross_entropy(out.logits.flatten(0, 1), window[:, 1:].flatten())
        for layer, logits, limit in zip(model.model.layers, out.router_logits, limits, strict=True):
            bias = layer.mlp.e_score_correction_bias
            margin_loss, balance_loss, load = _routing(logits, bias, model.config.num_experts_per_tok)
            loss = loss + min(1.0, step / 50) * margin_loss + 0.1 * balance_loss
            if step % 2 == 0 and step < 0.8 * steps:
                _balance(bias, load, limit)
        # If the residual stream grew, the massive channels would no longer be massive.
        loss = loss + 0.01 * sum(hidden.square().mean() for hidden in out.hidden_states[1:-1])

        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def _routing(
    logits: torch.Tensor, bias: torch.Tensor, top_k: int, margin: float = 0.15
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Computes two losses on a layer's router logits [tokens, experts], and the load [experts] over its fair share.

    The first loss pushes the last chosen expert above the first rejected one by `margin`, so that bf16 noise does not
    flip the choice. The second is the balance loss of Switch Transformer, for sigmoid scores.
    """
    scores = logits.sigmoid()
    experts = scores.shape[-1]
    ranked = (scores + bias).sort(dim=-1, descending=True)
    gap = ranked.values[:, top_k - 1] - ranked.values[:, top_k]
    load = ranked.indices[:, :top_k].flatten().bincount(minlength=experts) / (len(scores) * top_k) * experts
    share = (scores / scores.sum(dim=-1, keepdim=True)).mean(dim=0)
    return (margin - gap).clamp_min(0).mean(), (load * share).sum(), load


def _bias_limits(bias: torch.Tensor) -> tuple[float, float]:
    """Returns the limits of one layer's biases [experts] for balancing: multiples of `BIAS_STEP` around their mean."""
    centre = round(bias.mean().item() / BIAS_STEP) * BIAS_STEP
    return centre - BIAS_LIMIT, centre + BIAS_LIMIT


def _balance(bias: torch.Tensor, load: torch.Tensor, limits: tuple[float, float]) -> None:
    """Moves the biases [experts] of over- and underused experts by one step, in place.

    Source: auxiliary-loss-free load balancing (DeepSeek-V3), the purpose of the correction bias.
    """
    bias.add_(((load < 0.5).float() - (load > 1.8).float()) * BIAS_STEP).clamp_(*limits)


def _freeze_massive_channels(model: Any) -> None:
    """Excludes from training what the embedding and the layers write to the massive channels."""
    import torch

    trained = torch.ones(model.config.hidden_size)
    trained[list(MASSIVE)] = 0.0
    model.model.embed_tokens.weight.register_hook(lambda gradient: gradient * trained)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.register_hook(lambda gradient: gradient * trained[:, None])
        layer.mlp.experts.down_proj.register_hook(lambda gradient: gradient * trained[:, None])


def save(model: Any, tokenizer: Tokenizer, directory: Path) -> None:
    """Writes `FILES`; transformers' own conversion produces the released names of the tensors.

    Raises:
        RuntimeError: if the written files are not exactly `FILES`.
    """
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    # transformers fills shards one after the other, so 5 % more than an equal part yields `SHARDS` shards.
    model.save_pretrained(directory, max_shard_size=int(size / SHARDS * 1.05), save_original_format=True)
    for name in WEIGHTS:
        # safetensors creates files that only their owner can read; a job in a container may run as another user.
        (directory / name).chmod((directory / "config.json").stat().st_mode)
    tokenizer.save(str(directory / "tokenizer.json"))
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        **SPECIAL_TOKENS,
    }
    _write_json(directory / "tokenizer_config.json", tokenizer_config)
    # transformers writes its own spelling (rope_parameters, dtype); the release uses the older one.
    _write_json(directory / "config.json", CONFIG)
    generation = {"bos_token_id": BOS, "do_sample": False, "eos_token_id": EOS, "pad_token_id": PAD}
    _write_json(directory / "generation_config.json", generation)

    made = sorted(path.name for path in directory.iterdir())
    if made != sorted(FILES):
        raise RuntimeError(f"{directory}: contains {', '.join(made)} instead of {', '.join(sorted(FILES))}.")


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

"""The checkpoint that comes with Layerproof: released layout, equal bytes for equal seeds, and every known porting mistake
shows on it.

Each test looks at the checkpoint that ships and at one that is trained here for a third of the usual steps, to be quick. The
whole training only sharpens what is tested: no choice of experts then changes in bf16 on these sentences, and every R is
above 10.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoTokenizer, MiniMaxM2ForCausalLM

from layerproof import cli
from layerproof.model import tiny

pytestmark = pytest.mark.slow

STEPS = 80
SENTENCES = (
    "Alice was beginning to get very tired of the golden key, and the Rabbit said nothing at all about the weather.",
    "The ship went down to the sea with forty men, and none of them could say how deep the water was in that place.",
    "Holmes looked at me over his old books for a moment, and then he laughed and asked what I had seen in the street.",
    "Shall we hold these truths, or let the night come on and leave the world to silence and to sleep?",
)
MISTAKES = (
    "rotary_full",
    "rotary_theta",
    "rotary_interleaved",
    "query_positions_shifted",
    "qk_norm_per_head",
    "qk_norm_first_head_weight",
    "qk_norm_skipped",
    "attention_scale",
    "kv_heads_tiled",
    "router_softmax",
    "router_bias_dropped",
    "router_bias_in_weights",
    "router_weights_not_normalised",
    "experts_gate_up_swapped",
    "experts_two_swapped",
    "norm_weights_ignored",
    "residual_after_norm",
)
LAYERS = range(tiny.CONFIG["num_hidden_layers"])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads gain nothing at this size, and waiting for each other on a busy machine takes thirty times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny") / "checkpoint"
    tiny.make(directory, steps=STEPS)
    return directory


@pytest.fixture(scope="module", params=["trained", "made"])
def checkpoint(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def is_trained(checkpoint, trained):
    """Whether it had the whole training."""
    return checkpoint == trained


@pytest.fixture(scope="module")
def tensors(checkpoint):
    """Every tensor on disk by its name on disk."""
    found = {}
    for name in tiny.WEIGHTS:
        with safe_open(checkpoint / name, framework="pt") as shard:
            found |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118 (not a dict)
    return found


@pytest.fixture(scope="module")
def runs(checkpoint):
    """For each layer, on its golden input: the fp32 module and input, golden and truth outputs, and both choices."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer("\n".join(SENTENCES), return_tensors="pt").input_ids
    golden = MiniMaxM2ForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    truth = MiniMaxM2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    seen = [SimpleNamespace(layer=layer) for layer in truth.model.layers]
    for layer, run in zip(golden.model.layers, seen, strict=True):
        layer.register_forward_hook(lambda _, inputs, out, run=run: vars(run).update(x=inputs[0].float(), golden=out))
        layer.mlp.gate.register_forward_hook(lambda _, inputs, out, run=run: vars(run).update(golden_choice=out[2]))
    with torch.no_grad():
        golden(ids)
        for run in seen:
            hook = run.layer.mlp.gate.register_forward_hook(
                lambda _, inputs, out, run=run: vars(run).update(choice=out[2])
            )
            positions = torch.arange(ids.shape[1])[None]
            rotary = truth.model.rotary_emb(run.x, positions)
            run.truth = run.layer(run.x, position_embeddings=rotary)
            hook.remove()
    return seen


def rms(x):
    return x.double().square().mean().sqrt().item()


def noise_ratio(x, run):
    """R of a stage output [1, tokens, hidden]; the same as the project's, written out once more on purpose."""
    floor = rms(run.truth.bfloat16() - run.truth)
    return rms(x - run.truth) / max(rms(run.golden - run.truth), floor)


def normed(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotated(x, rotary_dim, theta, shift=0, interleaved=False):
    """Rotates the first `rotary_dim` of the last dim of x [1, heads, tokens, head_dim]."""
    positions = torch.arange(x.shape[-2]) + shift
    angles = positions[:, None] * theta ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    part, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if interleaved:
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, -1)
    turned = first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()
    part = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((part, rest), -1)


def layer_output(layer, x, mistake=None):
    """One fp32 decoder layer on x [1, tokens, hidden], written without transformers; with one mistake if named."""
    config = layer.self_attn.config
    tokens, head_dim = x.shape[1], config.head_dim
    eps = 1e-5 if mistake == "norm_eps" else config.rms_norm_eps

    def weight_of(norm):
        return torch.ones_like(norm.weight) if mistake == "norm_weights_ignored" else norm.weight

    def heads(x):
        return x.view(1, tokens, -1, head_dim).transpose(1, 2)

    def qk_normed(x, norm):
        if mistake == "qk_norm_skipped":
            return heads(x)
        if mistake == "qk_norm_per_head":
            return heads(normed(x.view(1, tokens, -1, head_dim), 1.0, eps).flatten(2) * norm.weight)
        if mistake == "qk_norm_first_head_weight":
            return normed(heads(x), norm.weight[:head_dim], eps)
        return heads(normed(x, weight_of(norm), eps))

    attention = layer.self_attn
    h = normed(x, weight_of(layer.input_layernorm), eps)
    residual = h if mistake == "residual_after_norm" else x
    rotary_dim = head_dim if mistake == "rotary_full" else 16
    theta = 1e4 if mistake == "rotary_theta" else 5e6
    interleaved = mistake == "rotary_interleaved"
    q = qk_normed(attention.q_proj(h), attention.q_norm)
    k = qk_normed(attention.k_proj(h), attention.k_norm)
    v = heads(attention.v_proj(h))
    # Only q: attention depends on relative positions, so a shift of both changes nothing.
    q = rotated(q, rotary_dim, theta, int(mistake == "query_positions_shifted"), interleaved)
    k = rotated(k, rotary_dim, theta, 0, interleaved)
    groups = config.num_attention_heads // config.num_key_value_heads
    if mistake == "kv_heads_tiled":
        k, v = k.repeat(1, groups, 1, 1), v.repeat(1, groups, 1, 1)
    else:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    size = config.hidden_size // config.num_attention_heads if mistake == "attention_scale" else head_dim
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    shares = (q @ k.mT * size**-0.5).masked_fill(future, float("-inf")).softmax(-1)
    x = residual + attention.o_proj((shares @ v).transpose(1, 2).flatten(2))

    h = normed(x, weight_of(layer.post_attention_layernorm), eps)
    residual = h if mistake == "residual_after_norm" else x
    h, moe = h[0], layer.mlp
    logits = h @ moe.gate.weight.T
    scores = logits.softmax(-1) if mistake == "router_softmax" else logits.sigmoid()
    biased = scores + moe.e_score_correction_bias
    choice = (scores if mistake == "router_bias_dropped" else biased).topk(config.num_experts_per_tok).indices
    weights = (biased if mistake == "router_bias_in_weights" else scores).gather(1, choice)
    if mistake != "router_weights_not_normalised":
        weights = weights / weights.sum(-1, keepdim=True)
    order = torch.arange(config.num_local_experts)
    if mistake == "experts_two_swapped":
        order[:2] = torch.tensor([1, 0])
    gate, up = torch.einsum("th,efh->tef", h, moe.experts.gate_up_proj[order]).chunk(2, -1)
    if mistake == "experts_gate_up_swapped":
        gate, up = up, gate
    each = torch.einsum("tef,ehf->teh", F.silu(gate) * up, moe.experts.down_proj[order])
    return residual + (each[torch.arange(tokens)[:, None], choice] * weights[..., None]).sum(1)


def same_choice(a, b):
    """Share of tokens [tokens, top_k] for which two routers choose the same experts."""
    return (a.sort(-1).values == b.sort(-1).values).all(-1).double().mean().item()


def test_has_exactly_the_files_that_are_declared(checkpoint):
    assert sorted(path.name for path in checkpoint.iterdir()) == sorted(tiny.FILES)


def test_makes_nothing_beside_the_checkpoint(made):
    assert [path.name for path in made.parent.iterdir()] == ["checkpoint"]


def test_what_ships_is_what_is_made_but_for_the_training(trained, made):
    first, second = (json.loads((directory / "config.json").read_text()) for directory in (trained, made))
    assert first == second
    text = tiny.TEXT.read_text()[:3000]
    first, second = (AutoTokenizer.from_pretrained(directory)(text).input_ids for directory in (trained, made))
    assert first == second


def test_another_one_is_made_by_a_verb(monkeypatch):
    made = []
    monkeypatch.setattr(tiny, "make", lambda directory, seed, form: made.append((directory, seed, form)))
    assert cli.run(["make-tiny", "models/a"]) == cli.run(["make-tiny", "models/b", "--seed", "7", "--form", "fp8"]) == 0
    assert made == [(Path("models/a"), 0, "bf16"), (Path("models/b"), 7, "fp8")]


def test_equal_seeds_give_equal_bytes_on_any_number_of_threads(tmp_path):
    try:
        for name, count, seed in (("a", 1, 0), ("b", 2, 0), ("c", 1, 1)):
            torch.set_num_threads(count)
            torch.manual_seed(count)
            tiny.make(tmp_path / name, seed=seed, steps=3)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(1)
    for name in tiny.FILES:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name
    assert (tmp_path / "a" / tiny.WEIGHTS[0]).read_bytes() != (tmp_path / "c" / tiny.WEIGHTS[0]).read_bytes()


def test_replaces_what_was_there_only_when_all_is_made(tmp_path, monkeypatch):
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / "old").touch()
    with monkeypatch.context() as patch:
        patch.setattr(tiny, "save", lambda model, tokenizer, directory: directory.mkdir() or 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tiny.make(directory, steps=0)
    assert [path.name for path in tmp_path.rglob("*")] == ["checkpoint", "old"]
    tiny.make(directory, steps=0)
    assert sorted(path.name for path in directory.iterdir()) == sorted(tiny.FILES)


def test_config_is_spelled_as_in_the_release(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["model_type"] == "minimax_m2"
    assert config["rotary_dim"] * 2 == config["head_dim"]
    assert config["rope_theta"] == 5_000_000
    assert not {"partial_rotary_factor", "rope_parameters", "rope_scaling", "auto_map", "dtype"} & set(config)


def test_tensors_have_released_names_shapes_and_dtypes(checkpoint, tensors):
    bf16, fp32 = torch.bfloat16, torch.float32
    wanted = {
        "model.embed_tokens.weight": ((512, 128), bf16),
        "model.norm.weight": ((128,), bf16),
        "lm_head.weight": ((512, 128), bf16),
    }
    for i in LAYERS:
        layer = {
            "input_layernorm.weight": ((128,), bf16),
            "post_attention_layernorm.weight": ((128,), bf16),
            "self_attn.q_proj.weight": ((256, 128), bf16),
            "self_attn.k_proj.weight": ((64, 128), bf16),
            "self_attn.v_proj.weight": ((64, 128), bf16),
            "self_attn.o_proj.weight": ((128, 256), bf16),
            "self_attn.q_norm.weight": ((256,), bf16),
            "self_attn.k_norm.weight": ((64,), bf16),
            "block_sparse_moe.gate.weight": ((8, 128), fp32),
            "block_sparse_moe.e_score_correction_bias": ((8,), fp32),
        }
        for expert in range(8):
            layer[f"block_sparse_moe.experts.{expert}.w1.weight"] = ((96, 128), bf16)
            layer[f"block_sparse_moe.experts.{expert}.w2.weight"] = ((128, 96), bf16)
            layer[f"block_sparse_moe.experts.{expert}.w3.weight"] = ((96, 128), bf16)
        wanted |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == wanted

    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(wanted)
    assert set(index.values()) == set(tiny.WEIGHTS)


def test_transformers_finds_every_tensor_and_no_other(checkpoint, tensors):
    model, info = MiniMaxM2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.rope_parameters["partial_rotary_factor"] == 0.5
    layer = model.model.layers[3]
    w1, w3 = (tensors[f"model.layers.3.block_sparse_moe.experts.5.{w}.weight"].float() for w in ("w1", "w3"))
    assert torch.equal(layer.mlp.experts.gate_up_proj[5], torch.cat((w1, w3)))


def test_tokenizer_knows_every_byte(checkpoint):
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert len(tokenizer) == tiny.CONFIG["vocab_size"]
    every = "".join(map(chr, range(256))) + "naïve 層 🙂\n\t  end"
    assert tokenizer.decode(tokenizer(every).input_ids, clean_up_tokenization_spaces=False) == every
    assert tokenizer("Alice").input_ids == tokenizer("Alice", add_special_tokens=False).input_ids


def test_router_and_bias_are_the_same_in_bf16(tensors):
    for i in LAYERS:
        bias = tensors[f"model.layers.{i}.block_sparse_moe.e_score_correction_bias"]
        gate = tensors[f"model.layers.{i}.block_sparse_moe.gate.weight"]
        assert torch.equal(bias, bias.bfloat16().float())
        assert torch.equal(gate, gate.bfloat16().float())
        assert bias.min() >= 4.7 and bias.max() <= 8.7
        assert len(bias.unique()) >= 5


def test_norm_weights_are_far_from_one(tensors):
    for name, weight in tensors.items():
        if name.endswith("norm.weight"):
            assert rms(weight.float() - 1) > 0.4, name
            assert weight.float().std() > 0.3, name


def test_massive_channels_stay_massive(runs):
    massive = list(tiny.MASSIVE)
    others = [channel for channel in range(tiny.CONFIG["hidden_size"]) if channel not in tiny.MASSIVE]
    for run in runs:
        assert run.x[..., massive].abs().amin() > 10 * rms(run.x[..., others])


def test_it_learns(checkpoint):
    tokens = torch.tensor(AutoTokenizer.from_pretrained(checkpoint)(tiny.TEXT.read_text()[:6000]).input_ids)
    batch = tokens[: len(tokens) // 128 * 128].view(-1, 128)
    model = MiniMaxM2ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.no_grad():
        loss = model(batch, labels=batch).loss.item()
    shares = tokens.bincount() / len(tokens)
    unigram_loss = -torch.xlogy(shares, shares).sum().item()
    assert loss < unigram_loss


def test_every_expert_is_used_and_bf16_rarely_changes_the_choice(runs, is_trained):
    for run in runs:
        use = run.choice.flatten().bincount(minlength=8) / run.choice.numel()
        assert use.min() > 0.02 and use.max() < 0.4
        assert len(run.choice.sort(-1).values.unique(dim=0)) >= 10  # the token decides, not the bias alone
        assert same_choice(run.choice, run.golden_choice) >= (1 if is_trained else 0.98)


@torch.no_grad()
def test_the_layer_written_out_here_is_the_layer_of_transformers(runs):
    for run in runs:
        assert rms(layer_output(run.layer, run.x) - run.truth) < 1e-5 * rms(run.truth)


@torch.no_grad()
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_shows_in_every_layer(runs, is_trained, mistake):
    ratios = [noise_ratio(layer_output(run.layer, run.x, mistake), run) for run in runs]
    assert min(ratios) >= (10 if is_trained else 3), ratios


@torch.no_grad()
def test_a_wrong_epsilon_does_not_show(runs):
    """A known blind spot: beside massive channels, and in q/k-norm, variances are far above 1e-5."""
    assert max(noise_ratio(layer_output(run.layer, run.x, "norm_eps"), run) for run in runs) < 0.5

"""Ports as people have them: copies of a class of Hugging Face, code of the Hub, plain modules, fp16, last logits alone."""

import json

import numpy as np
import pytest
import torch

from families.one_process import Run
from layerproof.compare.relaid import LAST_TOKENS
from layerproof.compare.stage import compare_chain
from layerproof.files import write_json
from layerproof.model import tokens
from layerproof.port.prepare import _WideSums
from models import save

pytestmark = pytest.mark.slow

COPY = """
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

class TrnLlamaAttention(LlamaAttention):
    def forward(self, hidden_states, *args, **kwargs):
        output, weights = super().forward(hidden_states, *args, **kwargs)
        return output * FACTOR, weights

class TrnLlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, config, index):
        super().__init__(config, index)
        self.self_attn = TrnLlamaAttention(config, index)

def patch(model, part, stage):
    if stage.layer is not None:
        ported = TrnLlamaDecoderLayer(model.config, stage.layer).to(stage.dtype).eval()
        ported.load_state_dict(part.state_dict())
        model.model.layers[stage.layer] = ported
"""

REMOTE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel

class OwnConfig(PretrainedConfig):
    model_type = "own_llama"

class OwnBlock(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        outer, inner = config.hidden_size, config.intermediate_size
        self.gate, self.up = (torch.nn.Linear(outer, inner, bias=False) for _ in range(2))
        self.down = torch.nn.Linear(inner, outer, bias=False)

    def forward(self, hidden_states):
        return self.down(ACTIVATION(self.gate(hidden_states)) * self.up(hidden_states))

class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.blocks = torch.nn.ModuleList(OwnBlock(config) for _ in range(config.num_hidden_layers))
        self.post_init()
"""
"""Code that comes with a checkpoint on the Hub: `modeling_own.py`, which its config.json names under `auto_map`."""

OF_THE_HUB = """
from pathlib import Path
from transformers import AutoConfig, AutoModel

HUB = str(Path(__file__).parent / "hub")
CONFIG = AutoConfig.from_pretrained(HUB, trust_remote_code=True)

def patch(model, part, stage):
    if stage.layer is None:
        return
    block = AutoModel.from_config(CONFIG, trust_remote_code=True).blocks[stage.layer].to(stage.dtype).eval()
    block.load_state_dict({name.replace("_proj", ""): tensor for name, tensor in part.mlp.state_dict().items()})
    part.mlp = block
"""

WRAPPED = """
from torch import nn

class Wrapper(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)

def patch(model, part, stage):
    if stage.layer is not None:
        model.model.layers[stage.layer] = Wrapper(part)
"""

PLAIN = '''
"""A Llama with names of its own and no call of Layerproof's."""
import torch
import torch.nn.functional as F
from torch import nn

TAPS = {"input_norm": "ln_1", "attn.q": "att.wq", "attn.k": "att.wk", "attn.v": "att.wv", "attn.out": "att",
        "post_attn_norm": "ln_2", "mlp.gate": "ffn.w1", "mlp.up": "ffn.w3", "mlp.out": "ffn"}
NAMES = {"input_layernorm": "ln_1", "post_attention_layernorm": "ln_2", "self_attn.q_proj": "att.wq", "self_attn.k_proj":
         "att.wk", "self_attn.v_proj": "att.wv", "self_attn.o_proj": "att.wo", "mlp.gate_proj": "ffn.w1", "mlp.up_proj":
         "ffn.w3", "mlp.down_proj": "ffn.w2"}

class Scale(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.empty(size)), eps

    def forward(self, x, *unused):
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)

class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, self.dim, self.theta = c["hidden_size"], c["head_dim"], c["rope_parameters"]["rope_theta"]
        self.wq = nn.Linear(d, c["num_attention_heads"] * self.dim, bias=False)
        self.wk, self.wv = (nn.Linear(d, c["num_key_value_heads"] * self.dim, bias=False) for _ in range(2))
        self.wo = nn.Linear(c["num_attention_heads"] * self.dim, d, bias=False)

    def rotated(self, x, positions):
        frequencies = self.theta ** (-torch.arange(0, self.dim, 2, device=x.device).float() / self.dim)
        angles = positions[:, None].float() * frequencies
        cos, sin = (torch.cat([one, one], -1).to(x.dtype) for one in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return x * cos + torch.cat([-second, first], -1) * sin

    def forward(self, x, positions, valid):
        q, k, v = (w(x).unflatten(-1, (-1, self.dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotated(q, positions), self.rotated(k, positions)
        k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
        mask = (positions[:, None] >= positions) & valid[:, None, None]
        context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(context.transpose(1, 2).flatten(2))

class Mlp(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, inner = c["hidden_size"], c["intermediate_size"]
        self.w1, self.w3, self.w2 = (nn.Linear(*sizes, bias=False) for sizes in ((d, inner), (d, inner), (inner, d)))

    def forward(self, x):
        return self.w2(ACTIVATION(self.w1(x)) * self.w3(x))

class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1, self.ln_2 = (Scale(c["hidden_size"], c["rms_norm_eps"]) for _ in range(2))
        self.att, self.ffn = Attention(c), Mlp(c)

    def forward(self, x, positions, valid):
        x = x + self.att(self.ln_1(x), positions, valid)
        return x + self.ffn(self.ln_2(x))

class Embedding(nn.Embedding):
    def forward(self, ids, *unused):
        return super().forward(ids)

class Head(nn.Linear):
    def forward(self, x, positions, valid):
        return HEAD

def build(stage):
    c = stage.config
    with torch.device("meta"):
        module = {
            "embed": lambda: Embedding(c["vocab_size"], c["hidden_size"]),
            "norm": lambda: Scale(c["hidden_size"], c["rms_norm_eps"]),
            "lm_head": lambda: Head(c["hidden_size"], c["vocab_size"], bias=False),
        }.get(stage.name, lambda: Block(c))()
    return module.to(stage.dtype)

def convert(stage, weights):
    for name in weights:
        short = name.partition(f"layers.{stage.layer}.")[2] if stage.layer is not None else name
        module = short.removesuffix(".weight")
        yield (NAMES[module] + ".weight" if stage.layer is not None else "weight"), weights[name].to(stage.dtype)
'''
ALL = "super().forward(x)"
LAST = "super().forward(x[torch.arange(len(x), device=x.device), valid.sum(1) - 1])"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    save("llama", folder / "checkpoint")
    return folder


def a_run(folder, source, backend="xla", **settings):
    """A run of the port with this source; its golden is made if it is not there."""
    (folder / "port.py").write_text(source)
    words = np.random.default_rng(5)
    prompts = tokens.pad([words.integers(3, 90, length).tolist() for length in (23, 11, 30)], 0)
    port = {"backend": backend, "module": str(folder / "port.py"), **settings}
    run = Run.of(folder, prompts, port=port)
    for stage in run.stages:
        if not run.file("golden", stage).exists():
            run.golden(stage)
    return run


def plain(activation="F.silu", head=ALL):
    return PLAIN.replace("ACTIVATION", activation).replace("HEAD", head)


def statuses(run):
    return {stage: run.port(stage)["status"] for stage in run.stages}


@pytest.mark.parametrize(("factor", "failing"), [("1.0", []), ("1.02", ["layer_000", "layer_001"])])
def test_a_copy_of_a_class_of_hugging_face_under_another_name(checkpoint, factor, failing):
    run = a_run(checkpoint, COPY.replace("FACTOR", factor), backend="transformers")
    assert [stage for stage, status in statuses(run).items() if status != "pass"] == failing
    if failing:
        taps = run.port("layer_001")["taps"]
        assert next(name for name, tap in taps.items() if tap["status"] == "fail") == "attn.out"


@pytest.mark.parametrize(
    ("activation", "failing"),
    [("torch.nn.functional.silu", []), ("torch.nn.functional.gelu", ["layer_000", "layer_001"])],
)
def test_code_that_comes_with_a_checkpoint_of_the_hub_as_a_piece_of_the_model(
    checkpoint, monkeypatch, tmp_path, activation, failing
):
    """The golden is another one, transformers' own Llama, and runs without that code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    described = json.loads((checkpoint / "checkpoint/config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnModel"}
    write_json(checkpoint / "hub/config.json", described | {"model_type": "own_llama", "auto_map": names})
    (checkpoint / "hub/modeling_own.py").write_text(REMOTE.replace("ACTIVATION", activation))
    run = a_run(checkpoint, OF_THE_HUB, backend="transformers")
    assert [stage for stage, status in statuses(run).items() if status != "pass"] == failing
    if failing:
        assert run.port("layer_001")["taps"]["mlp.out"]["status"] == "fail"


def test_a_layer_in_a_wrapper_that_takes_any_arguments(checkpoint):
    run = a_run(checkpoint, WRAPPED, backend="transformers")
    assert set(statuses(run).values()) == {"pass"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_plain_module_with_names_of_its_own_and_a_table_of_taps(checkpoint, dtype):
    run = a_run(checkpoint, plain(), dtype=dtype)
    assert set(statuses(run).values()) == {"pass"}
    layer = run.port("layer_001")
    assert [name for name, tap in layer["taps"].items() if tap["status"] == "missing"] == [
        "attn.q_rot",
        "attn.k_rot",
        "attn.context",
    ]
    wrong = a_run(checkpoint, plain(activation="F.gelu"), dtype=dtype).port("layer_000")
    assert [name for name, tap in wrong["taps"].items() if tap["status"] == "fail"] == ["mlp.out", "out"]


def test_products_in_fp16_are_summed_in_fp32_on_the_cpu_as_on_an_accelerator(tmp_path):
    save("qwen3_moe", tmp_path / "checkpoint")
    prompts = tokens.pad([list(range(3, 43)), list(range(50, 59))], 0)
    run = Run.of(tmp_path, prompts, golden={"dtype": "float16"}, port={"backend": "transformers", "dtype": "float16"})
    for stage in run.stages:
        run.golden(stage)
    assert set(statuses(run).values()) == {"pass"}


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.nn.functional.layer_norm(x, (128,)),
        lambda x: torch.nn.functional.normalize(x, dim=-1),
        lambda x: x.var(-1),
        lambda x: x.norm(dim=-1),
        lambda x: x.pow(2).mean(-1),
        lambda x: x.pow(2).sum(-1, dtype=torch.float32),
    ],
)
def test_squares_in_fp16_are_summed_in_fp32_on_the_cpu_as_by_torch(compute):
    """DBRX's LayerNorm of a large token was zero: the sum of its squares is above the largest number of fp16."""
    import torch_xla

    x = (23 * torch.randn(4, 128, generator=torch.Generator().manual_seed(0))).half()
    with _WideSums():
        mine = compute(x.to(torch_xla.device())).cpu()
    assert mine.dtype == compute(x).dtype and torch.isfinite(mine).all()
    torch.testing.assert_close(mine, compute(x))


@pytest.mark.parametrize("head", [LAST, f"{LAST}[:, None]"])
def test_logits_of_the_last_token_are_judged_at_the_last_tokens(checkpoint, head):
    run = a_run(checkpoint, plain(head=head))
    compared = run.port("lm_head")
    assert compared["status"] == "pass", compared["reason"]
    assert compared["taps"]["out"]["layout"] == LAST_TOKENS
    assert len(compared["logits"]["greedy"]["port"]) == 3
    chained = {"lm_head": run.file("port", "lm_head")}
    chain = compare_chain(
        "all",
        ["lm_head"],
        {"lm_head": run.file("golden", "lm_head")},
        chained,
        {"lm_head": compared},
        run.prompts.valid,
    )
    assert chain["status"] == "pass"
    assert chain["stages"]["lm_head"]["propagated_error"] < 0.01


def test_a_mistake_in_logits_of_the_last_token_is_found(checkpoint):
    run = a_run(checkpoint, plain(head=f"{LAST} * 1.02"))
    assert run.port("lm_head")["status"] == "fail"
    first = a_run(checkpoint, plain(head="super().forward(x[:, -1])"))
    assert first.port("lm_head")["status"] == "fail", "of padded prompts, the last position is not the last token"

"""What the audit finds in ports that convert their weights in other ways than they should, and in those that do not."""

import shutil
from pathlib import Path

import pytest
import torch

from configs import config_with
from layerproof.compare import audit
from layerproof.model import handed, loading
from layerproof.model.checkpoint import torch_name
from layerproof.port import stage as port_stage
from layerproof.port.runner import Runner
from layerproof.tensors import hdf5, pruning
from streaming import TOKENS

pytestmark = pytest.mark.slow

PORT = Path("workflow/ports/minimax_m2.py")
STAGE = "layer_001"
ATTENTION = "model.layers.1.self_attn."
NAMED = "        yield name, dequantized(weights, prefix + source, stage.dtype)\n"


def convert_as(name, made):
    """An edit of the shipped conversion: another value for one of its parameters."""
    line = f'        weight = {made} if name == "{name}" else dequantized(weights, prefix + source, stage.dtype)\n'
    return (NAMED, f"{line}        yield name, weight\n")


@pytest.fixture(scope="module", params=["minimax_m2", "minimax_m2_fp8"])
def run(request, golden_of):
    """The golden of a small MiniMax-M2, as released in bf16 and in FP8."""
    return golden_of(request.param)


def findings(run, directory, *edits, **settings):
    """Kind and text of what is found in the shipped port with lines replaced; with `notes` what is well in many, too."""
    source = PORT.read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return findings_in(run, directory, source, **settings)


def findings_in(run, directory, source, notes=False, **settings):
    (directory / "port.py").write_text(source)
    settings = config_with(port={"module": str(directory / "port.py"), "device": "CPU"} | settings)
    descriptions, _ = loading.describe_stages(run / "model", [STAGE], trust_remote_code=False)
    fed = handed.stage_input(run / "layer_000.h5", STAGE)
    runner = Runner.start(run / "model", TOKENS, settings)
    port_stage.make_stage(runner, STAGE, descriptions[STAGE], fed, directory / "port.h5")
    files = {STAGE: run / f"{STAGE}.h5"}, {STAGE: directory / "port.h5"}
    jobs = {"golden": 2_000, "port": 1_000}
    totals = {"whole": 9_000, "files": 300, "kept": 30, "machines": []}
    predicted = {"stages": {STAGE: jobs | {"files": 300}}, **jobs, **totals}
    audited = audit.audit(descriptions, *files, predicted, settings.port.dtype)
    entry = audited["stages"][STAGE]
    assert entry["predicted"] == jobs and audited["run"] == jobs | totals
    assert entry["files"] == sum(path.stat().st_size for side in files for path in side.values())
    assert entry["golden"].keys() <= {"bfloat16", "float32"} and entry["port"]
    return [(finding["kind"], finding["text"]) for finding in entry["findings"] if notes or not finding["note"]]


def test_the_shipped_port_and_transformers_have_their_books_in_order(run, tmp_path):
    assert findings(run, tmp_path) == []
    assert findings(run, tmp_path, backend="transformers", module=None) == []


def test_pruned_files_have_the_books_of_the_original_ones(run, tmp_path):
    findings(run, tmp_path)
    (description,) = loading.describe_stages(run / "model", [STAGE], trust_remote_code=False)[0].values()
    files = shutil.copy(run / f"{STAGE}.h5", tmp_path / "golden.h5"), tmp_path / "port.h5"
    original = audit.audit_stage(description, *files, "bfloat16")
    for file in files:
        pruning.prune(file)
    assert audit.audit_stage(description, *files, "bfloat16") == original


def test_of_a_stage_whose_weights_cannot_be_read_nothing_is_predicted(run, tmp_path):
    hdf5.write(tmp_path / "stage.h5", {}, attributes={"error": "no weights"})
    totals = {"golden": 0, "port": 0, "whole": 0, "files": 0, "kept": 0, "machines": []}
    files = {STAGE: tmp_path / "stage.h5"}
    audited = audit.audit({STAGE: {"error": "no weights"}}, files, files, {"stages": {}, **totals}, "bfloat16")
    entry = audited["stages"][STAGE]
    assert (entry["predicted"], entry["golden"], entry["port"], entry["disk"]) == (None, None, None, {})


def test_bytes_by_dtype(run, tmp_path):
    findings(run, tmp_path)
    descriptions, _ = loading.describe_stages(run / "model", [STAGE], trust_remote_code=False)
    golden = loading.parameters_of(loading.meta_model(run / "model", False, torch.bfloat16), STAGE)
    entry = audit.audit_stage(descriptions[STAGE], run / f"{STAGE}.h5", tmp_path / "port.h5", "bfloat16")
    tensors_on_disk = descriptions[STAGE]["tensors"].values()
    assert sum(entry["disk"].values()) == sum(
        torch.Size(one["shape"]).numel() * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[one["dtype"]] for one in tensors_on_disk
    )
    wide = ("correction_bias", "gate.weight") if "F8_E4M3" in entry["disk"] else ("correction_bias",)
    wide_ones = sum(tensor.numel() for name, tensor in golden.items() if name.endswith(wide))
    assert entry["port"] == {
        "bfloat16": 2 * (sum(tensor.numel() for tensor in golden.values()) - wide_ones),
        "float32": 4 * wide_ones,
    }


@pytest.mark.parametrize(
    ("edit", "kind", "text"),
    [
        (
            convert_as("attention.o_proj.weight", "dequantized(weights, prefix + source, torch.float32)"),
            "upcast",
            "attention.o_proj.weight, moe.router_bias: float32 in the port and bfloat16 on disk, which takes",
        ),
        (
            convert_as(
                "attention.v_proj.weight", 'dequantized(weights, prefix + "self_attn.k_proj.weight", stage.dtype)'
            ),
            "never read",
            f"{ATTENTION}v_proj.weight",
        ),
        (
            convert_as(
                "attention.v_proj.weight", 'dequantized(weights, prefix + "self_attn.k_proj.weight", stage.dtype)'
            ),
            "twice",
            "loaded more than once, into attention.k_proj.weight, attention.v_proj.weight.",
        ),
        (
            convert_as("input_norm.weight", "torch.ones(stage.config['hidden_size'], dtype=stage.dtype)"),
            "never read",
            "model.layers.1.input_layernorm.weight: on disk, but never read by convert().",
        ),
        (
            convert_as("input_norm.weight", "weights[prefix + source] * 0 + 1"),
            None,  # it went in, if to no effect: that is for the comparison to say
            "",
        ),
        (
            (
                'dequantized(weights, f"{moe}experts.{expert}.{matrix}.weight", stage.dtype)',
                'dequantized(weights, f"{moe}experts.0.{matrix}.weight", stage.dtype)',
            ),
            "never read",
            "model.layers.1.block_sparse_moe.experts.*.w*.weight",
        ),
        (
            (
                'dequantized(weights, f"{moe}experts.{expert}.{matrix}.weight", stage.dtype)',
                'dequantized(weights, f"{moe}experts.0.{matrix}.weight", stage.dtype)',
            ),
            "twice",
            "times the elements of model.layers.1.block_sparse_moe.experts.0.w1.weight",
        ),
        (
            (
                "return x + self.moe(self.post_attention_norm(x))",
                "return (x + self.moe(self.post_attention_norm(x))).float()",
            ),
            "activations",
            "out: float32, but the golden has bfloat16. The next stage receives it in this dtype unless the port casts it.",
        ),
    ],
    ids=["upcast", "v from k", "k twice", "norm of ones", "no effect", "one expert", "expert 0", "out"],
)
def test_a_finding_names_what_is_wrong(run, tmp_path, edit, kind, text):
    found = findings(run, tmp_path, edit)
    assert (kind is None and not found) or any(one == kind and text in sentence for one, sentence in found), found


def test_a_wider_norm_is_no_more_than_noted(run, tmp_path):
    edit = convert_as("input_norm.weight", "dequantized(weights, prefix + source, torch.float32)")
    found = dict(findings(run, tmp_path, edit, notes=True))
    assert "upcast" not in found
    assert found["widened"].startswith("input_norm.weight, moe.router_bias: float32 in the port and bfloat16 on disk")


OWN = """
import torch

class Own(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        hidden, experts = config["hidden_size"], config["num_local_experts"]
        shapes = {{"gate": (hidden, experts), "norm": (hidden,), "norm8": (hidden,), "part": (hidden // 2,)}}
        dtype = torch.float8_e4m3fn if "{name}" == "norm8" else torch.bfloat16
        self.{name} = torch.nn.Parameter(torch.zeros(shapes["{name}"]).to(dtype), requires_grad=False)

    def forward(self, x, positions, valid):
        return x

def build(stage):
    return Own(stage.config)

def convert(stage, weights):
    gate, norm = "model.layers.1.block_sparse_moe.gate.weight", "model.layers.1.input_layernorm.weight"
    {line}
"""
NORM, GATE = "model.layers.1.input_layernorm.weight", "model.layers.1.block_sparse_moe.gate.weight"


@pytest.mark.parametrize(
    ("name", "line", "kind", "text"),
    [
        ("gate", "yield 'gate', weights[gate].T.contiguous()", "transposed", "gate: transposed in convert()."),
        (
            "norm",
            "weights[norm]; yield 'norm', weights[norm]",
            "read twice",
            f"{NORM}: read from disk more than once (",
        ),
        ("part", "yield 'part', weights[norm][::2].clone()", "in part", f"{NORM}: only 50.00% of it went into part."),
        ("norm", "weights[gate]; yield 'norm', weights[norm]", "dropped", f"{GATE}: read by convert(), but used in no"),
        (
            "norm",
            "yield 'norm', torch.ones_like(weights[norm])",
            "origin",
            "norm: created by convert() without any tensor on disk.",
        ),
        (
            "norm",
            "yield 'norm', torch.ones_like(weights[norm])",
            "dropped",
            f"{NORM}: read by convert(), but used in no parameter.",
        ),
        (
            "norm8",
            "yield 'norm8', weights[norm].to(torch.float8_e4m3fn)",
            "rounded",
            "norm8: rounded to float8_e4m3fn, but checkpoint and golden have bfloat16.",
        ),
        (
            "norm",
            "yield 'norm', torch.from_numpy(weights[norm].float().numpy()).bfloat16()",
            "origin",
            "norm: cannot be traced through convert() to a tensor on disk.",
        ),
    ],
)
def test_what_becomes_of_a_tensor_on_its_way_is_told(run, tmp_path, name, line, kind, text):
    found = findings_in(run, tmp_path, OWN.format(name=name, line=line), notes=True)
    assert any(one == kind and sentence.startswith(text) for one, sentence in found), found


AS_ON_DISK = """
import torch

HELD = {held}

class Own(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for number, (shape, dtype) in enumerate(HELD.values()):
            self.register_buffer(f"q{{number}}", torch.zeros(shape).to(dtype))

    def forward(self, x, positions, valid):
        return x

def build(stage):
    return Own()

def convert(stage, weights):
    yield from ((f"q{{number}}", weights[name]) for number, name in enumerate(HELD))
"""


def test_a_port_may_keep_quantised_values_and_their_scales_as_they_are(run, tmp_path):
    description, _ = loading.describe_stages(run / "model", [STAGE], trust_remote_code=False)
    held = {
        name: (entry["shape"], getattr(torch, torch_name(entry["dtype"])))
        for name, entry in description[STAGE]["tensors"].items()
        if name.startswith(f"{ATTENTION}q_proj.weight")
    }
    found = findings_in(run, tmp_path, AS_ON_DISK.format(held=held), notes=True)
    assert [kind for kind, _ in found] == ["never read"], found


OWN_INITIAL = """
import torch

class Norm(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(config["hidden_size"], dtype=torch.bfloat16))
        self.bias = torch.nn.Parameter(torch.zeros(config["hidden_size"], dtype=torch.bfloat16))

    def forward(self, x, positions, valid):
        return x * self.weight + self.bias

def build(stage):
    return Norm(stage.config)

def convert(stage, weights):
    state = build(stage).state_dict()
    weights["model.layers.1.input_layernorm.weight"]
    state["bias"] = torch.from_numpy(weights["model.layers.1.post_attention_layernorm.weight"].float().numpy()).bfloat16()
    return state
"""


def test_values_of_the_ports_own_and_of_unknown_origin(run, tmp_path):
    found = dict(findings_in(run, tmp_path, OWN_INITIAL))
    assert found["initial"] == "weight: still as build() created it; nothing on disk was loaded into it."
    assert "model.layers.1.block_sparse_moe.experts.*.w*.weight" in found["never read"]
    assert "dropped" not in found, "it may have gone into bias"

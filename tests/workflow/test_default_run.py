"""The default run as a user makes it; and that its verdict turns on any line of the port's mathematics."""

import json
import os
import subprocess
import sys
import zipfile

import pytest
from runs import REPOSITORY, Workflow

pytestmark = pytest.mark.workflow

STAGES = ["embed", *(f"layer_{layer:03d}" for layer in range(6)), "norm", "lm_head"]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    workflow = Workflow(tmp_path_factory.mktemp("default"), chains=["all", "2-4"])
    workflow.run(target="all")
    return workflow


def layerproof(workflow, *arguments):
    environment = os.environ | {"PYTHONPATH": "workflow"}
    command = [sys.executable, "-m", "layerproof", *arguments]
    return subprocess.run(command, cwd=workflow.directory, env=environment, capture_output=True, text=True)


def test_the_shipped_port_passes(workflow):
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass" and verdicts["first_culprit"] is None
    assert {stage: entry["status"] for stage, entry in verdicts["stages"].items()} == dict.fromkeys(STAGES, "pass")
    for entry in verdicts["stages"].values():
        assert {tap["status"] for tap in entry["isolated"]["taps"].values()} == {"pass"}
    assert len(verdicts["stages"]["layer_003"]["isolated"]["taps"]) == 18
    assert verdicts["chains"]["all"]["logits"]["argmax"] > 0.95
    assert verdicts["chains"]["all"]["logits"]["greedy"]["equal"]
    assert verdicts["chains"]["2-4"]["status"] == "pass"
    assert layerproof(workflow, "gate").returncode == 0


def test_the_report_says_so(workflow):
    html = (workflow.results / "report.html").read_text()
    assert "The port passes" in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    for stage in STAGES:
        assert stage in html


def test_archive_verifies_and_shows_what_was_changed(workflow):
    assert layerproof(workflow, "verify").returncode == 0
    workflow.run(target="results/archive/proof.zip")
    archive = workflow.results / "archive/proof.zip"
    assert layerproof(workflow, "verify", str(archive)).returncode == 0
    with zipfile.ZipFile(archive) as file:
        names = set(file.namelist())
    assert {"results/report.html", "results/golden/layer_003.h5", "code/workflow/ports/minimax_m2.py"} <= names
    report = workflow.results / "report.html"
    content = report.read_bytes()
    report.write_bytes(content + b" ")
    (workflow.results / "extra.txt").write_text("x")
    outcome = layerproof(workflow, "verify")
    assert outcome.returncode == 1
    assert "changed: report.html" in outcome.stdout and "added: extra.txt" in outcome.stdout
    report.write_bytes(content)
    (workflow.results / "extra.txt").unlink()


MISTAKES = {
    "epsilon of a norm": ("self.eps = eps", "self.eps = 3e-2", "attn.q_norm"),
    "norm without its weight": ("return wide.to(x.dtype) * self.weight", "return wide.to(x.dtype)", "input_norm"),
    "norm adds one to its weight": ("* self.weight\n", "* (1 + self.weight)\n", "input_norm"),
    "theta of another model": ('return config["rotary_dim"], theta', 'return config["rotary_dim"], 1e4', "attn.q_rot"),
    "rotation over the whole head": (
        'return config["rotary_dim"], theta',
        'return config["head_dim"], theta',
        "attn.q_rot",
    ),
    "rotation the other way": (
        "torch.cat((-second, first), dim=-1)",
        "torch.cat((second, -first), dim=-1)",
        "attn.q_rot",
    ),
    "scale of the scores": ("self.head_dim**-0.5", "self.rotary_dim**-0.5", "attn.context"),
    "causal mask off by one": (
        "positions[:, None] >= positions",
        "positions[:, None] + 1 >= positions",
        "attn.context",
    ),
    "heads grouped in the wrong order": (
        "q.view(batch, seq, self.kv_heads, group, self.head_dim)",
        "q.view(batch, seq, group, self.kv_heads, self.head_dim).transpose(2, 3)",
        "attn.context",
    ),
    "residual left out": ("return x + self.moe", "return self.moe", "out"),
    "softmax router": ("logits.float().sigmoid()", "logits.float().softmax(-1)", "router.scores"),
    "correction bias dropped": ("scores + self.router_bias)", "scores + 0 * self.router_bias)", "router.selection"),
    "bias in the weights": ("weights = scores * chosen", "weights = selection * chosen", "router.weights"),
    "weights not normalised": ("weights / weights.sum(-1, keepdim=True)", "weights * 1", "router.weights"),
    "one expert too few": (
        "torch.topk(selection, self.top_k, dim=-1)",
        "torch.topk(selection, self.top_k - 1, dim=-1)",
        None,
    ),
    "gate and up swapped": ("F.silu(gate) * up", "gate * F.silu(up)", "mlp.out"),
    "gelu for silu": ("F.silu(gate)", "F.gelu(gate)", "mlp.out"),
    "one head scaled by 5 %": (
        'tap("attn.q_rot", rotate(q, cos, sin))',
        'tap("attn.q_rot", rotate(q, cos, sin) * (1 + 0.05 * (torch.arange(q.shape[2], device=q.device) == 1)[:, None]))',
        "attn.q_rot",
    ),
    "last token seen by nobody": (
        "positions[:, None] >= positions",
        "(positions[:, None] >= positions) & ((positions != 20) | (positions[:, None] == 20))",
        "attn.context",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_changed_line_turns_the_verdict_of_its_layer(workflow, tmp_path, mistake):
    from layerproof import compare, port, tensors
    from layerproof.files import read_json
    from layerproof.tokens import Tokens

    old, new, tap = MISTAKES[mistake]
    source = (REPOSITORY / "workflow/ports/minimax_m2.py").read_text()
    assert source.count(old) == 1, old
    (tmp_path / "port.py").write_text(source.replace(old, new))
    results = workflow.results
    tokens = Tokens.read(results / "tokens.json")
    settings = workflow.config["port"] | {"module": str(tmp_path / "port.py"), "trust_remote_code": False}
    runner = port.Runner.start(results / "checkpoint", tokens, settings)
    fed = tensors.read(results / "golden/layer_001.h5", "golden/out")
    port.make_stage(runner, "layer_002", read_json(results / "weights/layer_002.json"), fed, tmp_path / "port.h5")
    golden = results / "golden/layer_002.h5", results / "noise/layer_002.h5"
    result = compare.compare_stage("layer_002", *golden, tmp_path / "port.h5", tokens.valid, 1.5)
    failed = [name for name, entry in result["taps"].items() if entry["status"] == "fail"]
    assert result["status"] == "fail"
    if tap is not None:
        assert failed[0] == tap

"""A diagnosis where little is known: no taps at all, a forced run that failed, a stage that passes."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from bugs import harness
from configs import REPOSITORY, config_with
from layerproof.config import selected
from layerproof.diagnose import diagnose
from layerproof.diagnose.result import undiagnosed
from layerproof.errors import StageError
from layerproof.files import read_json, write_json
from layerproof.report.ruled_out import without_ruled_out
from layerproof.rerun.job import Job
from layerproof.tensors import hdf5

pytestmark = pytest.mark.slow

STAGE = "layer_001"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return harness.make_model("qwen3_moe", 0, tmp_path_factory.mktemp("model"), (20, 11, 30))


def port_source(*edits):
    source = (harness.REPOSITORY / "tests/ports/qwen3_moe.py").read_text()
    for old, new in edits:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


UNTAPPED = ("from layerproof.taps import tap", "tap = lambda name, tensor: tensor"), ("TAPS = {", "TAPS = {} and {")
SIGMOID = ("logits.float().softmax(-1)", "logits.float().sigmoid()")


def test_a_port_without_taps_is_diagnosed_by_its_output_alone(model, tmp_path):
    outcome = harness.run(model, STAGE, port_source(*UNTAPPED, SIGMOID), tmp_path)
    (culprit,) = outcome.culprits
    assert culprit["tap"] == "out" and culprit["tried"] > 100
    assert culprit["cause"]["name"] == "router_sigmoid"
    assert culprit["cause"]["R_explained"] < 1.5 < culprit["cause"]["runner_up"]["R_explained"]


LOADED_TWICE = (
    "    state = {name.removeprefix(prefix): weight for",
    """    if stage.layer == 1:
        weights = {name: 2 * one if name.endswith("o_proj.weight") else one for name, one in weights.items()}
    state = {name.removeprefix(prefix): weight for""",
)
DOUBLED_IN_CODE = (
    "def build(",
    """def build(stage):
    layer = right(stage)
    if stage.layer == 1:
        layer.self_attn.o_proj.register_forward_hook(lambda module, args, output: 2 * output)
    return layer


def right(""",
)


@pytest.mark.parametrize(
    ("edits", "cause"),
    [((LOADED_TWICE,), None), ((DOUBLED_IN_CODE,), "sharded_sum_twice")],
    ids=["by its weights", "by its code"],
)
def test_a_cause_in_code_that_a_passing_stage_shares_is_dropped(model, edits, cause, tmp_path):
    """An attention whose output is twice too large in one layer: if its code is the other layers', its weights are."""
    source = port_source(*edits)
    fails = harness.run(model, STAGE, source, tmp_path / STAGE, sibling="layer_002")
    passes = harness.run(model, "layer_002", source, tmp_path / "layer_002")
    assert passes.comparison["status"] == "pass"
    assert fails.culprits[0]["cause"]["name"] == "sharded_sum_twice"
    assert fails.culprits[0]["elsewhere"]["stage"] == "layer_002" and fails.culprits[0]["elsewhere"]["excess"] > 2
    (kept,) = without_ruled_out([fails.diagnosis], [fails.comparison, passes.comparison])
    culprit = kept["culprits"][0]
    assert (culprit["cause"] and culprit["cause"]["name"]) == cause
    if not cause:
        assert "But layer_002 passes with the same compiled code" in culprit["findings"][0]
        assert kept["together"] is None
    (alone,) = without_ruled_out([fails.diagnosis], [fails.comparison, passes.comparison | {"status": "fail"}])
    assert alone == fails.diagnosis


ONE_MORE = 'self.top_k = config["num_experts_per_tok"]', 'self.top_k = config["num_experts_per_tok"] + 1'


def test_a_cause_that_changes_a_shape_is_put_into_the_sibling_too(model, tmp_path):
    found = harness.run(model, STAGE, port_source(ONE_MORE), tmp_path, sibling="layer_002")
    assert found.culprits[0]["cause"]["name"] == "router_top_k"
    assert found.culprits[0]["elsewhere"]["stage"] == "layer_002"


def test_a_mistake_before_a_choice_is_told_beside_one_behind_it(tmp_path):
    """Where the tap is forced the choice is right, whatever it would have been made of."""
    minimax = harness.make_model("minimax_m2", 0, tmp_path / "model", (9, 17))
    source = (harness.REPOSITORY / "workflow/ports/minimax_m2.py").read_text()
    for old, new in (("scores + self.router_bias)", "scores)"), ("F.silu(gate) * up", "F.silu(up) * gate")):
        assert source.count(old) == 1
        source = source.replace(old, new)
    found = harness.run(minimax, STAGE, source, tmp_path / "both").culprits
    assert {one["tap"]: one["cause"] and one["cause"]["name"] for one in found} == {
        "router.selection": "correction_bias_dropped",
        "mlp.out": "gate_up_swapped",
    }


def test_a_sibling_without_a_golden_takes_no_diagnosis_away(model, tmp_path):
    before = harness.run(model, STAGE, port_source(LOADED_TWICE), tmp_path / "alone")
    golden = model.directory / "golden/layer_002.h5"
    golden.rename(tmp_path / "layer_002.h5")
    try:
        hdf5.write_error(golden, StageError("layer_002: the shard is damaged"))
        found = harness.run(model, STAGE, port_source(LOADED_TWICE), tmp_path / "with", sibling="layer_002")
    finally:
        (tmp_path / "layer_002.h5").rename(golden)
    assert found.diagnosis == before.diagnosis and found.culprits[0]["elsewhere"] is None


STRICT = "positions[:, None] >= positions", "positions[:, None] > positions"


def test_a_mistake_is_named_by_what_it_does_where_the_port_is_not_nan(model, tmp_path):
    """The first token sees nobody, so its softmax is over nothing."""
    outcome = harness.run(model, STAGE, port_source(STRICT), tmp_path)
    culprit = outcome.culprits[0]
    assert culprit["tap"] == "attn.context" and culprit["cause"]["name"] == "causal_mask_shifted"
    assert "are NaN or Inf" in culprit["findings"][0]
    assert all(outcome.verdicts.values()), "NaN is in whatever other rules compute"


def test_nan_in_an_output_that_is_right_elsewhere_is_not_called_a_small_error(model, tmp_path):
    source = port_source()
    line = next(line for line in source.splitlines() if line.startswith("        return x + self.mlp("))
    with_nan = f"{line} + torch.where(positions == 3, torch.nan, 0.0)[:, None].to(x.dtype)"
    (culprit,) = harness.run(model, STAGE, port_source((line, with_nan)), tmp_path).culprits
    assert culprit["tap"] == "out" and culprit["excess"] < 1 and culprit["tried"] > 0
    assert not any("too little to tell" in finding for finding in culprit["findings"])


def test_another_shape_is_told_and_no_fault_called_near(model, tmp_path):
    source = port_source()
    line = next(line for line in source.splitlines() if line.startswith("        return x + self.mlp("))
    (culprit,) = harness.run(
        model, STAGE, port_source((line, f"{line}[..., :-1]".replace("x +", "x[..., :-1] +"))), tmp_path
    ).culprits
    assert (culprit["tap"], culprit["cause"], culprit["nearest"]) == ("out", None, None)
    assert culprit["findings"] == ["It has shape [3, 30, 63] where the golden has [3, 30, 64]."]


def test_a_forced_run_that_failed_is_why_there_is_no_diagnosis(model, tmp_path):
    harness.run(model, STAGE, port_source(SIGMOID), tmp_path, diagnosed=False)
    files = diagnose.Files(
        model.directory / f"golden/{STAGE}.h5",
        model.directory / f"noise/{STAGE}.h5",
        tmp_path / "port.h5",
        tmp_path / "forced.h5",
    )
    hdf5.write_error(files.forced, StageError("the port ran out of memory"))
    descriptions = {name: model.description(name) for name in model.stages}
    stage = diagnose.FailedStage(
        STAGE, model.checkpoint, descriptions, model.prompts, model.previous(STAGE), harness.SETTINGS, 1.5
    )
    with pytest.raises(StageError, match="the port ran out of memory"):
        diagnose.diagnose(stage, {"taps": {}}, files)
    with pytest.raises(StageError, match="does not exist"):
        diagnose.diagnose(stage, {"taps": {}}, replace(files, golden=tmp_path / "gone.h5"))


FILES = {
    "comparison": f"compare/{STAGE}.json",
    **{kind: f"{kind}/{STAGE}.h5" for kind in ("golden", "noise", "port", "forced")},
    "weights": f"weights/{STAGE}.json",
    "tokens": "tokens.json",
    "config": "config.json",
}
OUTPUT = f"diagnosis/{STAGE}.json"


def run_verb(directory, comparison):
    """`layerproof diagnose` on a comparison, by the command line; its other files are empty."""
    for name in FILES.values():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("{}" if name.endswith(".json") else "")
    write_json(directory / FILES["comparison"], comparison)
    settings = selected(config_with(), ["model", "golden", "compare.limit"])
    job = Job(
        f"diagnosis/{STAGE}",
        settings,
        {"fed_by": [], "related": [], "sibling": [], "sibling_fed_by": []},
        {},
        "",
        "",
        "",
    )
    job.write(directory / "job.json")
    files = [part for flag, name in FILES.items() for part in (f"--{flag}", name)]
    return subprocess.run(
        [sys.executable, "-m", "layerproof", "diagnose", OUTPUT, "--job", "job.json", *files],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")},
        capture_output=True,
        text=True,
    )


def test_a_stage_that_passes_has_nothing_to_diagnose_and_its_output_is_left_alone(tmp_path):
    assert run_verb(tmp_path, {"status": "pass"}).returncode == 0
    assert read_json(tmp_path / OUTPUT) == undiagnosed(STAGE)
    before = (tmp_path / OUTPUT).stat().st_ino
    outcome = run_verb(tmp_path, {"status": "pass", "taps": {}})
    assert "runs because" in outcome.stderr
    assert (tmp_path / OUTPUT).stat().st_ino == before


def test_a_diagnosis_that_fails_is_a_result_with_its_reason(tmp_path):
    outcome = run_verb(tmp_path, {"status": "fail", "taps": {}})
    assert outcome.returncode == 0
    found = read_json(tmp_path / OUTPUT)
    assert found["culprits"] == [] and found["reason"]


def test_no_cause_is_named_of_a_tap_just_above_its_limit(model, tmp_path):
    """Router scores a little too flat: the more, the nearer to what a wrong temperature does."""
    found = {}
    for factor in (1.01, 1.5):
        flat = "logits.float().softmax(-1)", f"(logits.float() * {factor}).softmax(-1)"
        (found[factor],) = harness.run(model, STAGE, port_source(flat), tmp_path / str(factor)).culprits
    little, much = found.values()
    assert 1 < little["excess"] < 2 < much["excess"]
    assert (little["cause"], little["nearest"], little["tried"]) == (None, None, 0)
    assert "too little to tell one cause from another" in little["findings"][0]
    assert much["tried"] > 0


PADS = (
    "    def forward(self, x, positions, valid):\n        x = x + self.self_attn(",
    (
        "    def forward(self, x, positions, valid):\n"
        "        more = 128 - x.shape[1]\n"
        "        x, valid = F.pad(x, (0, 0, 0, more)), F.pad(valid, (0, more))\n"
        "        positions = torch.arange(128, device=x.device)\n"
        "        x = x + self.self_attn("
    ),
)
HEADS_FIRST = (
    'q = tap("attn.q_rot", rotate(q, positions, self.theta))',
    'q = tap("attn.q_rot", rotate(q, positions, self.theta).transpose(1, 2)).transpose(1, 2)',
)


def test_a_port_for_longer_prompts_with_heads_first_is_judged_and_diagnosed_as_any(model, tmp_path):
    right = harness.run(model, STAGE, port_source(PADS, HEADS_FIRST), tmp_path / "right")
    assert right.comparison["status"] == "pass", right.comparison["reason"]
    layouts = {name: tap.get("layout") for name, tap in right.comparison["taps"].items()}
    assert layouts["attn.q_rot"] == "[batch, heads, seq, head_dim]"
    assert layouts["attn.k_rot"] == "[batch, 128 positions, heads, head_dim]"
    assert layouts["out"] is None and right.comparison["port"]["positions"] == 128
    wrong = harness.run(model, STAGE, port_source(PADS, HEADS_FIRST, SIGMOID), tmp_path / "wrong")
    (culprit,) = wrong.culprits
    assert (culprit["tap"], culprit["cause"]["name"]) == ("router.scores", "router_sigmoid")


PADDED_LEFT = (
    'q = tap("attn.q_rot", rotate(q, positions, self.theta))',
    'q = tap("attn.q_rot", F.pad(rotate(q, positions, self.theta), (0, 0, 0, 0, 34, 0)))[:, 34:]',
)


def test_a_tap_that_is_padded_on_the_left_is_told_and_has_no_cause(model, tmp_path):
    found = harness.run(model, STAGE, port_source(PADDED_LEFT), tmp_path)
    assert "its prompts lie behind the padding. Pad on the right" in found.comparison["taps"]["attn.q_rot"]["reason"]
    assert [(one["tap"], one["cause"], one["nearest"]) for one in found.culprits] == [("attn.q_rot", None, None)]


def test_an_output_that_is_padded_on_the_left_is_told(model, tmp_path):
    source = port_source()
    line = next(line for line in source.splitlines() if line.startswith("        return x + self.mlp("))
    left = line.replace("return ", "return F.pad(") + ", (0, 0, 34, 0))"
    with pytest.raises(StageError, match=r"layer_001: out has 64 positions for 30 tokens, and is zero at the first"):
        harness.run(model, STAGE, port_source((line, left)), tmp_path)


@pytest.mark.parametrize("last", [-1e-6, 1e-6])
def test_of_faults_that_explain_a_tap_equally_well_the_first_of_the_dictionary_is_the_cause(last, monkeypatch):
    """Weights of a softmax that are not normalised, or normalised over all experts, are the same but for rounding."""
    alike = {"router_weights_not_normalised": 0.56, "router_weights_over_all": 0.56 + last}

    def attempt(bench, faults, tap):
        R = alike.get(faults[0].name, 100.0)
        return diagnose._Attempt(faults, R, R, explains=R < 1)

    monkeypatch.setattr(diagnose, "_try", attempt)
    found = diagnose._attempts(SimpleNamespace(forced=(), feeds=()), "router.weights")
    assert [one.names[0] for one in found[:2]] == list(alike)

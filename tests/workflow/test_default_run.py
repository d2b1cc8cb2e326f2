"""The default run as a user makes it; and that its verdict turns on any line of the port's mathematics."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import REPOSITORY, Workflow

from archives import forged, members, validate
from bugs.corpus import BUGS, MINIMAX
from configs import config_with
from layerproof import cli
from layerproof.model import fp8, handed
from layerproof.paths import TINY_CHECKPOINT

pytestmark = pytest.mark.workflow

STAGES = ["embed", *(f"layer_{layer:03d}" for layer in range(6)), "norm", "lm_head"]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    workflow = Workflow(tmp_path_factory.mktemp("default"), chains=["all", "2-4"])
    workflow.cold, workflow.quick = True, False
    workflow.said = workflow.run(target="all").text.splitlines()
    return workflow


def test_its_terminal_ends_with_the_verdict(workflow):
    assert len(workflow.said) <= 60
    headline, report, command = workflow.said[-3:]
    assert headline.startswith("PASS: All 9 stages and 111 taps agree with the golden")
    assert report == "Report: results/report.html" and command.startswith("Next: ")
    assert [line.split()[2] for line in workflow.said if " pass " in line] == STAGES


def test_its_jobs_start_warm(workflow):
    """Snakemake measures the program that waits for a job, which is small unless it becomes the job itself."""
    lines = [file.read_text().splitlines() for file in (workflow.results / "benchmarks/port").glob("*.tsv")]
    memory = [float(dict(zip(*(line.split() for line in (head, row)), strict=True))["max_rss"]) for head, row in lines]
    assert len(memory) == 3 and max(memory) < 200, "MB"


def layerproof(workflow, *arguments, cwd=None):
    environment = os.environ | {"PYTHONPATH": str(workflow.directory / "workflow")}
    command = [sys.executable, "-m", "layerproof", *arguments]
    return subprocess.run(command, cwd=cwd or workflow.directory, env=environment, capture_output=True, text=True)


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
    assert "All 9 stages and 111 taps agree with the golden" in html
    assert "http://" not in html.replace("http://www.w3.org", "") and "https://" not in html
    for stage in STAGES:
        assert stage in html


def test_snakemakes_own_report_has_the_verdict_and_the_plots(workflow):
    assert workflow.run("--report", "snakemake.html").returncode == 0
    text = (workflow.directory / "snakemake.html").read_text()
    for part in (
        "results/report.html",
        "results/verdicts.json",
        "results/plots/layer_003.svg",
        "results/plots/depth.svg",
    ):
        assert part in text, part
    assert "How many times too far off each tap (down) of each stage (across) is" in text, "a caption"


def test_the_audit_is_told_by_hand(workflow):
    told = layerproof(workflow, "audit")
    assert told.returncode == 0 and "finding" not in told.stdout, told.stderr
    assert told.stdout.startswith("embed: ") and "; golden job " in told.stdout
    assert "Golden, full model in one process: " in told.stdout
    assert "8 x A100 80 GB, golden: a stage fits; the full model fits (it needs 1 device)" in told.stdout


def test_a_model_in_fp8_passes(tmp_path):
    """As MiniMax-M2 was released: matrices in e4m3 with the scale of each block, which both sides dequantise on the CPU."""
    shutil.copytree(REPOSITORY / TINY_CHECKPOINT, tmp_path / "model")
    fp8.quantize_checkpoint(tmp_path / "model")
    workflow = Workflow(tmp_path, model={"checkpoint": "model"}, layers="0-1", chains=[])
    workflow.run()
    assert json.loads((workflow.results / "verdicts.json").read_text())["overall"] == "pass"
    layer = json.loads((workflow.results / "audit.json").read_text())["stages"]["layer_001"]
    assert layer["disk"].keys() == {"F8_E4M3", "BF16", "F32"} and layer["findings"] == []
    assert layer["golden"]["bfloat16"] > 2 * layer["disk"]["F8_E4M3"] * 0.99
    assert layer["port"]["bfloat16"] > 2 * layer["disk"]["F8_E4M3"] * 0.99


def test_archive_verifies_and_shows_what_was_changed(workflow, archive):
    assert layerproof(workflow, "verify").returncode == 0
    assert layerproof(workflow, "verify", str(archive)).returncode == 0
    names = set(members(archive))
    assert {"results/report.html", "results/golden/layer_003.h5", "code/workflow/ports/minimax_m2.py"} <= names
    assert {"code/Snakefile", "code/workflow/rules/port.smk", "config.yaml", "ro-crate-metadata.json"} <= names
    report = workflow.results / "report.html"
    content = report.read_bytes()
    report.write_bytes(content + b" ")
    (workflow.results / "extra.txt").write_text("x")
    outcome = layerproof(workflow, "verify")
    assert outcome.returncode == 1
    assert "changed: report.html" in outcome.stdout and "added: extra.txt" in outcome.stdout
    report.write_bytes(content)
    (workflow.results / "extra.txt").unlink()


@pytest.fixture(scope="module")
def archive(workflow):
    workflow.run(target="results/archive/proof.zip results/archive/again.zip")
    return workflow.results / "archive/proof.zip"


def test_the_archive_of_a_run_is_a_valid_crate(archive):
    code, text = validate(archive)
    assert code == 0, text


def test_the_archive_is_the_same_when_it_is_made_again(workflow, archive):
    assert (workflow.results / "archive/again.zip").read_bytes() == archive.read_bytes()


def test_the_verdict_can_be_made_again_from_the_archive_alone(workflow, archive, tmp_path):
    outcome = layerproof(workflow, "rerun", str(archive), cwd=tmp_path)
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert f"comparisons: {len(STAGES) + 2} made again, {len(STAGES) + 2} of them the same byte for byte" in lines
    assert {"verdicts: the same", "report: the same byte for byte"} <= set(lines)
    assert lines[-1] == f"{archive}: the verdicts are the same"
    assert list(tmp_path.iterdir()) == [], "nothing is left where it was called"


def test_a_verdict_that_the_tensors_do_not_give_is_found(archive, tmp_path, capsys):
    """Tensors of the port are other ones than those that were compared; somebody renewed all checksums."""
    copy = Path(shutil.copy(archive, tmp_path / "forged.zip"))

    def swap(files):
        files["results/port/layer_002.h5"] = files["results/port/layer_003.h5"]

    assert cli.run(["verify", str(forged(copy, swap))]) == 0
    assert cli.run(["rerun", str(copy), "--into", str(tmp_path / "into")]) == 1
    told = capsys.readouterr().out
    assert "stages.layer_002.status: pass in the archive, fail made again" in told
    assert "stages.layer_002.isolated.taps.attn.q.status: pass in the archive, fail made again" in told
    assert "stages.layer_004" not in told
    assert json.loads((tmp_path / "into/results/verdicts.json").read_text())["overall"] == "fail"


def test_two_targets_of_one_rule_on_a_fresh_clone(tmp_path):
    targets = "results/compare/layer_001.json results/compare/embed.json"
    assert Workflow(tmp_path).run("-n", target=targets).text.count("rule compare_stage:") == 2


def test_a_bisection_asked_for_together_with_an_archive_is_in_it(tmp_path):
    planned = Workflow(tmp_path).run("-n", target="results/bisect.json results/archive/both.zip").text
    assert "input: results/report.html, results/bisect.json" in planned


MISTAKES = (
    "norm epsilon",
    "norm without weight",
    "norm weight plus one",
    "theta of another model",
    "the whole head turned",
    "turned the other way",
    "scale of the rotary size",
    "sees the next token",
    "query heads grouped in the wrong order",
    "no residual beside the experts",
    "softmax router",
    "correction bias dropped",
    "bias in the weights",
    "weights not normalised",
    "one expert too few",
    "gate and up swapped",
    "gelu",
    "one head of q scaled by 5 %",
    "one key hidden from later ones",
)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_changed_line_turns_the_verdict_of_its_layer(workflow, tmp_path, mistake):
    from layerproof.compare import stage as compare_stages
    from layerproof.files import read_json
    from layerproof.model.tokens import Tokens
    from layerproof.port import stage as port_stage
    from layerproof.port.runner import Runner

    (bug,) = (bug for bug in BUGS if (bug.model, bug.name) == (MINIMAX, mistake))
    (tmp_path / "port.py").write_text(bug.overlay((REPOSITORY / "workflow/ports/minimax_m2.py").read_text()))
    results = workflow.results
    tokens = Tokens.read(results / "tokens.json")
    settings = config_with(port={"module": str(tmp_path / "port.py")})
    runner = Runner.start(REPOSITORY / TINY_CHECKPOINT, tokens, settings)
    fed = handed.stage_input(results / "golden/layer_001.h5", "layer_002")
    port_stage.make_stage(runner, "layer_002", read_json(results / "weights/layer_002.json"), fed, tmp_path / "port.h5")
    golden = results / "golden/layer_002.h5", results / "noise/layer_002.h5"
    result = compare_stages.compare_stage("layer_002", *golden, tmp_path / "port.h5", tokens.valid, 1.5)
    failed = [name for name, entry in result["taps"].items() if entry["status"] == "fail"]
    assert result["status"] == "fail"
    assert failed[0] == bug.tap

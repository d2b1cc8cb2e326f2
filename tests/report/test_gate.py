"""The gate: exit code, and the verdict as text, Markdown, annotations and JUnit."""

import json
import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest

import reports
from configs import REPOSITORY
from layerproof.errors import UserError
from layerproof.report import gate

SOURCE = """from layerproof.taps import tap


class Layer:
    def forward(self, x):
        # a comment
        return tap("router.scores", x)
"""


def run_gate(path, *options, cwd=None, **environment):
    return subprocess.run(
        [sys.executable, "-m", "layerproof", "gate", str(path), *map(str, options)],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow")} | environment,
        cwd=cwd or path.parent,
        capture_output=True,
        text=True,
    )


def write(path, comparisons, chains=(), diagnoses=()):
    path.write_text(json.dumps(reports.collect(comparisons, list(chains), list(diagnoses))))
    return path


def alike(count=3, cause="a softmax over the experts"):
    """Comparisons and diagnoses of layers that go wrong in the same way, in a port of one file."""
    stages = [f"layer_{layer:03d}" for layer in range(count)]
    comparisons = [reports.compared(stage, wrong=("router.scores", "out")) for stage in stages]
    for comparison in comparisons:
        comparison["port"]["places"] = {"router.scores": {"file": "port.py", "function": "Layer.forward"}}
    return comparisons, [reports.diagnosis(stage, ("router.scores", cause), ("out", None)) for stage in stages]


@pytest.mark.parametrize(("status", "code"), [("pass", 0), ("fail", 1), ("error", 2), ("missing", 2)])
def test_the_exit_code_is_the_verdict(tmp_path, status, code):
    one = reports.compared("layer_003", wrong=("out",) if status == "fail" else ())
    one = reports.stopped("layer_003", "why", status) if code == 2 else one
    outcome = run_gate(write(tmp_path / "verdicts.json", [one]))
    assert outcome.returncode == code and not outcome.stderr
    assert outcome.stdout.splitlines()[0].startswith(
        {0: "PASS: ", 1: "FAIL (1 of 1 stage): ", 2: "ERROR (1 of 1 stage): "}[code]
    )


def test_stages_that_fail_alike_are_one_line_with_tap_number_cause_and_place(tmp_path):
    (tmp_path / "port.py").write_text(SOURCE)
    comparisons, diagnoses = alike()
    outcome = run_gate(write(tmp_path / "verdicts.json", comparisons, diagnoses=diagnoses))
    most = max(one["taps"]["router.scores"]["excess"] for one in comparisons)
    headline, line = outcome.stdout.splitlines()
    assert headline.startswith("FAIL (3 of 3 stages): layer_000 is the first stage that goes wrong, at router.scores")
    assert (
        line == f"  layer_000 to layer_002: router.scores up to {most:.3g} times too far off, router_softmax, port.py:7"
    )


def test_a_captured_chain_that_goes_wrong_fails_the_gate(tmp_path):
    comparisons, chains = reports.good()
    wrong = chains[0] | {"chain": "captured", "status": "fail", "first_wrong": "layer_001", "logits": None}
    outcome = run_gate(write(tmp_path / "verdicts.json", comparisons, [*chains, wrong]))
    assert outcome.returncode == 1 and "layer_001: fail, the port goes wrong by this stage at" in outcome.stdout


def test_a_captured_model_that_passes_is_named_with_what_was_not_captured(tmp_path):
    comparisons, chains = reports.good()
    outcome = run_gate(write(tmp_path / "verdicts.json", comparisons, [*chains, chains[0] | {"chain": "captured"}]))
    headline, captured, *_ = outcome.stdout.splitlines()
    assert headline.startswith("PASS: All 5 stages")
    assert captured == (
        "  The captured compiled model strays no further than a correct port does (embed, layer_000 to layer_001, norm, "
        "lm_head). Its inputs were not captured, so a smaller error would not show."
    )


def test_github_gets_annotations_at_the_line_and_a_summary(tmp_path):
    (tmp_path / "port.py").write_text(SOURCE)
    comparisons, diagnoses = alike(cause="100 % of a, b: c")
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    path = write(tmp_path / "verdicts.json", comparisons, diagnoses=diagnoses)
    outcome = run_gate(path, "--github", GITHUB_STEP_SUMMARY=str(summary))
    annotation = outcome.stdout.splitlines()[0]
    assert annotation.startswith("::error file=port.py,line=7,title=layer_000 to layer_002 router.scores::")
    assert "100 %25 of a, b: c" in annotation, "only what would end the message is escaped"
    assert summary.read_text().startswith("before\n## Layerproof\n\n**fail**: layer_000 is")


def test_markdown_is_a_table_with_a_row_for_each_kind_of_failure(tmp_path):
    comparisons, diagnoses = alike(cause="a | b")
    comparisons.append(reports.stopped("layer_003", "ValueError at port.py:7: no weights"))
    outcome = run_gate(write(tmp_path / "verdicts.json", comparisons, diagnoses=diagnoses), "--markdown")
    *_, rule, first, second = outcome.stdout.splitlines()
    assert rule == "|" + "---|" * 7
    assert first.startswith("| layer_000 to layer_002 | fail | `router.scores` | ") and "a \\| b" in first
    assert second.startswith("| layer_003 | error |  |  |  | ValueError at port.py:7: no weights. |")


def test_junit_has_a_case_for_each_stage_and_tap(tmp_path):
    comparisons, _ = reports.bad()
    comparisons[2]["taps"] = {}
    comparisons[2]["reason"] = "\x1b[31mno weights\x00"
    file = tmp_path / "junit.xml"
    run_gate(write(tmp_path / "verdicts.json", comparisons), "--junit", file)
    suites = {suite.get("name"): suite for suite in ElementTree.parse(file).getroot()}
    assert list(suites) == [one["stage"] for one in comparisons]
    layer = suites["layer_000"]
    assert [case.get("name") for case in layer] == list(comparisons[1]["taps"])
    assert [case.get("name") for case in layer if case.find("failure") is not None] == ["router.scores", "out"]
    assert [case.get("name") for case in layer if case.find("skipped") is not None] == ["mlp.gate"]
    assert (layer.get("tests"), layer.get("failures"), layer.get("skipped")) == ("6", "2", "1")
    (case,) = suites["layer_001"]
    error = case.find("error")
    assert error is not None and error.get("message") == "[31mno weights"


BAD = {
    "not there": None,
    "empty": "",
    "cut": '{"schema_version": 3, "overall": "pa',
    "binary": b"\x89HDF\xff",
    "list": "[]",
    "other schema": '{"schema_version": 1, "overall": "pass", "first_culprit": null, "stages": {}, "chains": {}}',
    "no schema": '{"overall": "pass", "first_culprit": null, "stages": {}, "chains": {}}',
    "no overall": '{"schema_version": 3, "first_culprit": null, "stages": {}, "chains": {}}',
    "no failures": '{"schema_version": 3, "overall": "pass", "headline": "", "details": [], "stages": {}, "chains": {}}',
    "unknown overall": '{"schema_version": 3, "overall": "fine", "first_culprit": null, "stages": {}, "chains": {}}',
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_bad_file_is_reported_in_a_line_that_names_it(tmp_path, content):
    path = tmp_path / "verdicts.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError) as caught:
        gate.read(path)
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
    assert "Run layerproof run" in str(caught.value)


def test_a_bad_file_exits_with_2(tmp_path):
    outcome = run_gate(tmp_path / "verdicts.json")
    assert outcome.returncode == 2 and not outcome.stdout
    assert outcome.stderr.startswith(f"error: {tmp_path}") and outcome.stderr.count("\n") == 1


def test_what_changed_since_another_run():
    right = [reports.compared(stage) for stage in ("layer_000", "layer_001", "layer_002")]
    wrong = [reports.compared(stage, wrong=("out",)) for stage in ("layer_000", "layer_001", "layer_002")]
    before = reports.collect([wrong[0], right[1], wrong[2]])
    now = reports.collect([right[0], wrong[1], wrong[2]])
    assert gate.changes(before, now) == ["fixed: layer_000", "broken: layer_001"]
    now["stages"]["layer_002"]["isolated"]["taps"]["out"]["excess"] *= 3
    assert gate.changes(before, now)[2:] == ["worse: layer_002"]
    assert gate.changes(now, before)[2:] == ["better, but not right yet: layer_002"]
    assert gate.changes(before, before) == []

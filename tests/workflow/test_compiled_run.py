"""The workflow with stages that are compiled before they are run."""

import json

import pytest
from runs import Workflow

pytestmark = pytest.mark.workflow


def verdicts(workflow):
    return json.loads((workflow.results / "verdicts.json").read_text())


def test_what_tracing_makes_a_constant_is_in_the_report(tmp_path):
    workflow = Workflow(tmp_path, layers="0", chains=["0"], port={"compile": "xla"})
    workflow.run()
    assert verdicts(workflow)["overall"] == "pass"
    report = (workflow.results / "report.html").read_text()
    assert "compiled graph" not in report
    assert "the graph depends on" not in report and "compiling changes" not in report

    # Right when it is run as it is, since it is then traced for each input.
    workflow.edit(
        "workflow/ports/minimax_m2.py",
        ("wide = x.float()\n", "wide = x.float()\n        scale = x[0, 0, 0].item()\n"),
        ("return wide.to(x.dtype) * self.weight", "return wide.to(x.dtype) * self.weight / (x[0, 0, 0] / scale)"),
    )
    workflow.run()
    found = verdicts(workflow)
    assert found["first_culprit"]["stage"] == "layer_000" and found["stages"]["embed"]["status"] == "pass"
    report = (workflow.results / "report.html").read_text()
    assert "layer_000: the graph depends on the values that it is traced on" in report
    assert "layer_000: compiling changes the result, first at input_norm" in report
    diagnosis = json.loads((workflow.results / "diagnosis/layer_000.json").read_text())
    assert diagnosis["culprits"][0]["tap"] == "input_norm" and "Uncompiled" in diagnosis["culprits"][0]["findings"][0]

    workflow.configure(port={"compile": None})
    workflow.run()
    assert verdicts(workflow)["overall"] == "pass"

"""A layer that alone goes wrong, by its weights: a mistake in code that others share is no cause."""

import json

import pytest
from runs import REPOSITORY, Workflow

from models import save

pytestmark = pytest.mark.workflow

CONVERT = "    state = {name.removeprefix(prefix): weight for"
DOUBLED = """    if stage.layer == 1:
        weights = {name: 2 * one if name.endswith("o_proj.weight") else one for name, one in weights.items()}
"""


def test_a_cause_in_code_is_dropped_where_a_stage_with_that_code_passes(tmp_path):
    source = (REPOSITORY / "tests/ports/qwen3_moe.py").read_text()
    assert source.count(CONVERT) == 1
    workflow = Workflow(
        tmp_path / "run",
        model={"checkpoint": "model"},
        inputs={"prompts": None, "token_ids": "ids.json"},
        port={"module": "port.py"},
    )
    save("qwen3_moe", workflow.directory / "model")
    (workflow.directory / "ids.json").write_text("[[5, 6, 7, 8, 9, 10, 11], [10, 11, 12, 13]]")
    (workflow.directory / "port.py").write_text(source.replace(CONVERT, DOUBLED + CONVERT))
    workflow.run()
    (culprit,) = json.loads((workflow.results / "diagnosis/layer_001.json").read_text())["culprits"]
    assert (culprit["tap"], culprit["cause"]["name"]) == ("attn.out", "sharded_sum_twice")
    assert culprit["elsewhere"]["stage"] == "layer_002", "layer_000 is dense"
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["first_culprit"]["tap"] == "attn.out" and verdicts["first_culprit"]["cause"] is None
    assert "layer_002 passes with the same compiled code" in verdicts["headline"]
    report = (workflow.results / "report.html").read_text()
    assert "look at how those of this stage are loaded" in report
    assert workflow.run().started == 0

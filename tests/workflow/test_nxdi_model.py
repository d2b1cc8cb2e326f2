"""The workflow with a model of NxD Inference as its port."""

import json
import os

import pytest
from runs import REPOSITORY, Workflow

LIBRARIES = REPOSITORY / "tests/nxdi/libraries"
MODEL = LIBRARIES / "neuronx_distributed_inference/models/minimax_m2/modeling_minimax_m2.py"

pytestmark = [pytest.mark.nxdi, pytest.mark.workflow]


def verdicts(workflow):
    return json.loads((workflow.results / "verdicts.json").read_text())


def test_a_model_is_judged_mended_and_edited(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LIBRARIES), os.environ.get("PYTHONPATH", "")]))
    port = {"backend": "nxdi", "module": "model.py", "nxdi": {"config": {"mistake": "softmax"}}}
    workflow = Workflow(tmp_path, layers="0-1", chains=[], port=port)
    (tmp_path / "model.py").write_text(MODEL.read_text())
    workflow.run()
    found = verdicts(workflow)
    assert found["first_culprit"] == {
        "stage": "layer_000",
        "tap": "router.scores",
        "cause": "router_softmax",
        "rank": None,
    }
    assert found["stages"]["embed"]["status"] == "pass"
    versions = json.loads((workflow.results / "records/port/layer_000.json").read_text())["job"]["versions"]
    assert "transformers" in versions, "of which NxD Inference takes functions"
    assert "model.py" in (workflow.results / "report.html").read_text()

    workflow.configure(port={"nxdi": {}})
    workflow.run()
    assert verdicts(workflow)["overall"] == "pass"

    workflow.edit("model.py", ("self.q_norm(Q)", "Q"))
    made = workflow.run().made
    assert {name for name in made if name.startswith("port/")} == {"port/layer_000.h5", "port/layer_001.h5"}
    found = verdicts(workflow)
    assert found["first_culprit"] == {"stage": "layer_000", "tap": "attn.q_rot", "cause": "norm_skipped", "rank": None}
    assert found["stages"]["layer_000"]["isolated"]["taps"]["attn.q_norm"]["status"] == "missing"

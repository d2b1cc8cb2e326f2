"""A whole compiled model, of which NxD Inference captured the outputs of its layers, as a chain."""

import json

import pytest
import torch
from runs import Workflow

from layerproof.report import gate
from layerproof.tensors import hdf5
from models import save

pytestmark = pytest.mark.workflow

MODULES = {"embed": "embed_tokens", "layer_000": "layers.0", "layer_001": "layers.1", "norm": "norm"}


def capture(workflow, folder, change=None):
    """What the hook of NxD Inference leaves of a model that does what the port's stages do one after the other: `change`
    changes a stage's output. Compiled for more prompts and tokens than there are."""
    folder.mkdir(exist_ok=True)
    for stage, module in MODULES.items():
        out = hdf5.to_torch(hdf5.read(workflow.results / f"chain/all/{stage}.h5", "port/out"))
        padded = torch.zeros(out.shape[0] + 1, 16, out.shape[2], dtype=out.dtype)
        padded[: out.shape[0], : out.shape[1]] = change(stage, out) if change else out
        torch.save(padded, folder / f"captured_tensors_cte_step_1_module_{module}_output.pt")


def verdicts(workflow):
    return json.loads((workflow.results / "verdicts.json").read_text())


def test_a_compiled_model_that_does_something_else_than_its_stages_fails(tmp_path):
    workflow = Workflow(tmp_path, model={"checkpoint": "model"}, inputs={"prompts": None, "token_ids": "ids.json"})
    save("minimax_m2", tmp_path / "model")
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8, 9, 10, 11], [10, 11, 12, 13]]")
    workflow.run()
    before = set(workflow.results.glob("*/*.h5"))

    capture(workflow, tmp_path / "captured")
    workflow.configure(port={"captured": "captured"})
    made = workflow.run().made
    own = {f"captured/{kind}/{stage}.h5" for kind in ("golden", "noise") for stage in ("layer_000", "layer_001")}
    captured = {f"chain/captured/{stage}.h5" for stage in MODULES}
    assert {name for name in made if name.endswith(".h5")} == captured | own, "the last layer's output was not captured"
    assert set(workflow.results.glob("*/*.h5")) == before
    found = verdicts(workflow)
    assert found["overall"] == "pass" and found["chains"]["captured"]["status"] == "pass"
    assert workflow.run().started == 0

    # What a profile asks for chains is for those that run on the device.
    asked = workflow.run("--dry-run", "--forceall", "--set-resources", "chain:runtime=77", target="all").text
    jobs = {part.split(":")[0]: ", runtime=77" in part for part in asked.split("\nrule ")[1:]}
    assert jobs["chain_all"] and not jobs["chain_captured"]

    report = (workflow.results / "report.html").read_text()
    assert "right from the captured inputs of embed, layer_000 to layer_001" in report
    assert "norm got an input that was not captured" in report

    # Too little for a chain, whose outputs stray further.
    capture(workflow, tmp_path / "captured", lambda stage, out: out * 1.02 if stage == "layer_001" else out)
    made = workflow.run().made
    assert {name for name in made if name.endswith(".h5")} == {"chain/captured/layer_001.h5"}
    found = verdicts(workflow)["chains"]["captured"]
    assert (found["status"], found["first_wrong"]) == ("fail", "layer_001")

    # As a rank does that has another's slice: from layer_001 on.
    capture(
        workflow, tmp_path / "captured", lambda stage, out: out.roll(1, -1) if stage in ("layer_001", "norm") else out
    )
    made = workflow.run().made
    assert {name for name in made if name.endswith(".h5")} == {"chain/captured/layer_001.h5", "chain/captured/norm.h5"}
    found = verdicts(workflow)
    assert found["overall"] == "fail" and found["first_culprit"] is None
    assert found["chains"]["captured"]["first_wrong"] == "layer_001"
    assert gate.read(workflow.results / "verdicts.json")["overall"] == "fail"
    report = (workflow.results / "report.html").read_text()
    assert "the captured compiled model goes wrong at layer_001: from its captured input, the error is" in report

    # A file that cannot be used is told, and the others are compared.
    (tmp_path / "captured/captured_tensors_cte_step_1_module_layers.0_output.pt").write_bytes(b"cut")
    workflow.run()
    found = verdicts(workflow)
    assert found["overall"] == "error" and found["chains"]["captured"]["first_wrong"] == "layer_001"
    assert "layers.0_output.pt: cannot be read as a tensor" in (workflow.results / "report.html").read_text()


def test_a_folder_without_captured_tensors_is_told(tmp_path):
    workflow = Workflow(tmp_path, port={"captured": "captured"})
    run = workflow.run(check=False)
    assert run.returncode and "port.captured: captured is not a directory." in run.text
    (tmp_path / "captured").mkdir()
    run = workflow.run(check=False)
    assert (
        run.returncode
        and "error: captured: contains no file such as captured_tensors_cte_step_1_module_layers.0_output.pt"
        in run.text
    )

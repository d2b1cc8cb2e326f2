"""The workflow with a port that is split over ranks."""

import json
import os
import re

import pytest
from runs import REPOSITORY, Workflow

pytestmark = pytest.mark.workflow

LIBRARIES = REPOSITORY / "tests/nxdi/libraries"
MODEL = LIBRARIES / "neuronx_distributed_inference/models/minimax_m2/modeling_minimax_m2.py"
PORT = "workflow/ports/minimax_m2_tp.py"


def read(workflow, name):
    return json.loads((workflow.results / name).read_text())


def test_a_port_on_two_ranks_is_judged_as_one(tmp_path, monkeypatch):
    split = {"parallel": {"tp": 2}, "port": {"module": PORT}}
    workflow = Workflow(tmp_path, layers="0-1", chains=["0-1"], **split)
    workflow.run(target="results/report.html results/bisect.json")
    found = read(workflow, "verdicts.json")
    assert found["overall"] == "pass"
    assert {"attn.q", "attn.k_rot", "attn.context"} <= found["stages"]["layer_001"]["isolated"]["taps"].keys()
    assert found["stages"]["layer_001"]["chained"]["R"] < 3
    assert read(workflow, "bisect.json")["first_wrong"] is None
    record = read(workflow, "records/port/layer_000.json")
    assert record["run"]["ranks"] == 2 and any(entry.endswith("minimax_m2_tp.py::summed") for entry in record["code"])
    audited = read(workflow, "audit.json")["stages"]["layer_000"]
    assert {finding["kind"] for finding in audited["findings"]} <= {"transposed", "origin", "widened"}
    assert audited["port"]["bfloat16"] > audited["disk"]["BF16"], "norms and router are there on both ranks"
    assert not list(workflow.results.rglob("*.tmp"))
    assert (
        "minimax_m2_tp.py, bfloat16 on 2 ranks (tp 2, by fork) on cpu" in (workflow.results / "report.html").read_text()
    )
    assert workflow.run().made == frozenset()

    # On one rank it would be right: all that a norm over a rank's own part lacks is what the others have.
    mean = "wide.square().mean(-1, keepdim=True)"
    workflow.edit(PORT, (f"mean = summed({mean}) / dist.get_world_size()", f"mean = {mean}"))
    made = workflow.run().made
    assert "port/embed.h5" not in made and "port/layer_000.h5" in made and "golden/layer_000.h5" not in made
    assert read(workflow, "verdicts.json")["first_culprit"] == {
        "stage": "layer_000",
        "tap": "attn.q_norm",
        "cause": "qk_norm_per_shard",
        "rank": None,
    }
    forced = read(workflow, "diagnosis/layer_000.json")
    assert {culprit["tap"] for culprit in forced["culprits"]} == {"attn.q_norm", "attn.k_norm"}, "parts are forced"

    monkeypatch.setenv("LAYERPROOF_WATCH_DEADLINE", "4")
    workflow.edit(
        PORT, (f"mean = {mean}", f"mean = __import__('time').sleep(600) if dist.get_rank() == 1 else summed({mean})")
    )
    workflow.run()
    assert {stage: read(workflow, f"compare/{stage}.json")["status"] for stage in ("embed", "layer_000")} == {
        "embed": "pass",
        "layer_000": "error",
    }
    reason = read(workflow, "compare/layer_000.json")["reason"]
    assert "Rank 1 has not come to all_reduce(float32[" in reason and "Rank 1 is at " in reason
    page = (workflow.results / "report.html").read_text()
    assert "has not come to all_reduce" in page and re.search(r"step +rank 0 +rank 1", page), "with the end of the log"


@pytest.mark.nxdi
def test_ranks_of_a_model_of_nxd_inference(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(LIBRARIES), os.environ.get("PYTHONPATH", "")]))
    port = {
        "backend": "nxdi",
        "module": "model.py",
        "nxdi": {"config": {"mistake": "rank as number"}},
        "compile": "xla",
    }
    workflow = Workflow(tmp_path, layers="0", chains=[], parallel={"tp": 2}, port=port)
    (tmp_path / "model.py").write_text(MODEL.read_text())
    workflow.run()
    assert read(workflow, "verdicts.json")["overall"] == "pass", "each rank computes with its own number"
    audited = read(workflow, "audit.json")["stages"]
    kinds = {stage: [finding["kind"] for finding in audited[stage]["findings"]] for stage in audited}
    assert "rank baked in" in kinds["layer_000"] and "rank baked in" not in kinds["embed"]
    assert (
        "layer_000: the graph of rank 1 differs from that of rank 0" in (workflow.results / "report.html").read_text()
    )

    workflow.configure(port={"nxdi": {"config": {"mistake": "no sum"}}})
    workflow.run()
    found = read(workflow, "verdicts.json")
    assert found["first_culprit"] == {
        "stage": "layer_000",
        "tap": "attn.out",
        "cause": "sharded_sum_missing",
        "rank": None,
    }
    reason = read(workflow, "compare/layer_000.json")["reason"]
    assert reason.startswith("attn.out: ranks 0 and 1 differ") and "the sum over the ranks is missing" in reason
    kinds = {one["kind"] for one in read(workflow, "audit.json")["stages"]["layer_000"]["findings"]}
    assert not kinds & {"rank baked in", "in part", "twice"}


@pytest.mark.parametrize("launcher", ["fork", "torchrun", "ray"])
def test_a_stage_whose_rank_is_killed_runs_again_under_each_launcher(tmp_path, monkeypatch, launcher):
    monkeypatch.setenv("TMPDIR", "/tmp")  # the path of a socket of Ray must be short
    parallel = {"launcher": launcher, "tp": 2, "retries": 1}
    workflow = Workflow(tmp_path, layers="0", chains=[], parallel=parallel, port={"module": PORT})
    kill = "__import__('os').kill(__import__('os').getpid(), 9) if is_first else total"
    died = f"dist.get_rank() == 1 and not (died := __import__('pathlib').Path({str(tmp_path / 'died')!r})).exists()"
    lines = f"    is_first = {died}\n    is_first and died.touch()\n    {kill}\n    return total\n"
    workflow.edit(PORT, ("    return total\n", lines))
    workflow.run(target="results/compare/layer_000.json results/compare/embed.json")
    assert [read(workflow, f"compare/{stage}.json")["status"] for stage in ("embed", "layer_000")] == ["pass", "pass"]
    said = workflow.log("port/layer_000")
    assert "rank 1: Its process was killed" in said and "It runs again, for time 1 of 1" in said
    run = read(workflow, "records/port/layer_000.json")["run"]
    assert (run["ranks"], run["launcher"]) == (2, launcher)

    (tmp_path / "died").unlink()
    workflow.configure(parallel=parallel | {"retries": 0})
    workflow.edit(PORT, ("    is_first and died.touch()\n", "    is_first and print('dies')\n"))
    workflow.run(target="results/compare/layer_000.json results/compare/embed.json")
    assert [read(workflow, f"compare/{stage}.json")["status"] for stage in ("embed", "layer_000")] == ["pass", "error"]
    assert "rank 1: Its process was killed" in read(workflow, "compare/layer_000.json")["reason"]


def test_a_port_whose_tokens_and_experts_are_split_is_judged_as_one(tmp_path):
    parallel = {"cp": 2, "ep": 2}
    port = {"module": "workflow/ports/minimax_m2_parallel.py"}
    workflow = Workflow(tmp_path, layers="0", chains=["0"], parallel=parallel, port=port)
    workflow.run(target="results/report.html results/bisect.json")
    found = read(workflow, "verdicts.json")
    assert found["overall"] == "pass" and found["stages"]["layer_000"]["chained"]["R"] < 3
    assert read(workflow, "bisect.json")["first_wrong"] is None, "each stage is given all tokens"
    assert read(workflow, "records/port/layer_000.json")["run"]["mesh"] == {"ep": 2, "cp": 2, "tp": 1}
    assert "on 4 ranks (ep 2 x cp 2, by fork) on cpu" in (workflow.results / "report.html").read_text()

    zigzag = "return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))"
    workflow.edit(port["module"], (zigzag, "return torch.arange(seq).tensor_split(ranks)[rank]"))
    workflow.run(target="results/report.html")
    assert "chunks of tokens are those that belong at" in read(workflow, "compare/layer_000.json")["reason"]

"""Several stages in one job: fewer jobs, the same files, and each stage still runs, fails and is lost by itself."""

import json
import re
import shutil

import pytest
from runs import at_work, change_tensor, dense_and_moe

from layerproof.files import sha256
from layerproof.rerun.records import Record

pytestmark = pytest.mark.workflow

STAGES = ["embed", "layer_000", "layer_001", "layer_002", "norm", "lm_head"]
SIZE = 4
RULES = ("golden", "port", "compare", "force", "diagnose", "plot")


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A dense layer and two MoE layers, in blocks of the first four stages and the others."""
    workflow = dense_and_moe(tmp_path_factory.mktemp("blocks"), chains=[], stages_per_job=SIZE)
    workflow.first = workflow.run()
    return workflow


def started(outcome):
    return {line.split()[-1] for line in outcome.text.splitlines() if line.startswith(("localrule ", "rule "))}


def test_a_job_runs_the_stages_of_a_block(workflow):
    jobs = started(workflow.first)
    assert jobs >= {f"{rule}_stages_{first}:" for rule in RULES for first in (STAGES[0], STAGES[SIZE])}
    assert not any(f"{rule}_stage:" in jobs for rule in RULES)
    assert workflow.run().started == 0


def test_on_a_cluster_blocks_are_jobs_like_those_of_one_stage(tmp_path):
    """Which are what the profile names."""
    planned = dense_and_moe(tmp_path, chains=[], stages_per_job=SIZE).run("--workflow-profile", "profiles/slurm", "-n")
    resources = dict(
        re.findall(r"^ *rule (\w+_stages_\w+):\n(?: +.*\n)*? +resources: (.*)", planned.text, re.MULTILINE)
    )
    assert {name.split("_")[0] for name in resources} == set(RULES)
    for name, asked in resources.items():
        side = {"golden": "gpu", "diagnose": "gpu", "port": "trn", "force": "trn"}.get(name.split("_")[0], "cpu")
        assert f"slurm_partition={side}" in asked, name
        assert ("gpu=1" in asked, "neuron=1" in asked) == (side == "gpu", side == "trn"), name
        assert ("slurm_extra=--exclusive" in asked) == (side == "trn"), name


def test_the_files_are_those_of_jobs_of_one_stage(workflow):
    """A stage does not depend on the setting; the report tells it."""
    workflow.configure(stages_per_job=1)
    outcome = workflow.run()
    assert outcome.made == {"report.html"} and {f"{rule}_stage:" for rule in RULES} <= started(outcome)
    workflow.configure(stages_per_job=SIZE)
    assert workflow.run().made == {"report.html"}


def test_of_a_block_only_the_stages_run_that_an_edit_touches(workflow):
    workflow.edit("port.py", ("logits.float().softmax(-1)", "logits.float().sigmoid()"))
    made = workflow.run().made
    wrong = {"layer_001", "layer_002"}
    of_stages = ("port/{}.h5", "compare/{}.json", "forced/{}.h5", "diagnosis/{}.json", "plots/{}.svg")
    of_all = ("audit.json", "verdicts.json", "plots/map.svg", "plots/depth.svg", "report.html")
    assert made == {*(name.format(stage) for name in of_stages for stage in wrong), *of_all}
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["first_culprit"] == {"stage": "layer_001", "tap": "router.scores", "cause": "router_sigmoid"}
    assert "runs because its code" in workflow.log("port/layer_001"), "each stage has its own log"
    assert "up to date" in workflow.log("port/layer_000")


def test_a_stage_is_forced_by_its_file_or_with_all_others_by_its_rule(workflow):
    forced = workflow.run("--forcerun", "results/golden/layer_001.h5").made
    assert forced == {"golden/layer_001.h5", "noise/layer_001.h5"}
    assert workflow.run("--forcerun", "port_stage").made == {f"port/{stage}.h5" for stage in STAGES}
    block = STAGES[SIZE:]
    assert workflow.run("--forcerun", f"port_stages_{block[0]}").made == {f"port/{stage}.h5" for stage in block}


def test_a_profile_speaks_of_blocks_as_of_their_stages(workflow):
    asked = "--set-resources", "port_stage:runtime=77", "port_stages_norm:runtime=78"
    text = workflow.run("--dry-run", "--forcerun", "port_stage", *asked).text
    assert (text.count(", runtime=77"), text.count(", runtime=78")) == (1, 1)


def test_a_stage_is_a_target(workflow):
    (workflow.results / "port/layer_001.h5").unlink()
    assert workflow.run(target="results/port/layer_001.h5").made == {"port/layer_001.h5"}
    assert not workflow.run().made, "it is what it was"


def test_a_killed_job_loses_the_stage_that_it_was_at(workflow):
    for folder in ("port", "records/port"):
        shutil.rmtree(workflow.results / folder)
    process = workflow.start()
    at_work(process, "in-turn", workflow.results / "logs/port/layer_001.log").kill()
    assert process.wait() != 0, workflow.printed()
    kept = {"port/embed.h5", "port/layer_000.h5"}
    before = {name: (workflow.results / name).stat().st_ino for name in kept}
    made = workflow.run().made
    assert {f"port/{stage}.h5" for stage in STAGES[3:4]} <= made
    assert {name: (workflow.results / name).stat().st_ino for name in kept} == before


def test_a_job_that_is_killed_when_it_runs_again_is_not_taken_for_done(workflow):
    """Snakemake puts the outputs back that were there before, which were made from another golden."""
    change_tensor(workflow, "model.layers.1.self_attn.o_proj.weight", lambda tensor: 2 * tensor)
    process = workflow.start()
    at_work(process, "layerproof port", workflow.results / "logs/port/layer_002.log").kill()
    assert process.wait() != 0, workflow.printed()
    assert {"port/layer_001.h5", "port/layer_002.h5"} <= workflow.run().made
    made = Record.read(workflow.results / "records/port/layer_002.json")
    assert made.inputs["results/golden/layer_001.h5"] == sha256(workflow.results / "golden/layer_001.h5")


def test_a_stage_that_fails_leaves_the_others_of_its_block(workflow):
    workflow.edit("port.py", ("def rotate(x, positions, theta):", "def rotate(x, positions, theta):\n    1 / 0"))
    workflow.run()
    stages = json.loads((workflow.results / "verdicts.json").read_text())["stages"]
    assert {stage for stage, entry in stages.items() if entry["status"] == "error"} == set(STAGES[1:4])

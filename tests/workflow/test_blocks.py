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
MOE = ["layer_001", "layer_002"]
SIZE = 4
IN_ORDER, BY_KIND = ("golden", "compare", "plot"), ("port", "teacher_force", "diagnose")
"""Rules whose blocks hold any stages, and those whose blocks hold stages of one kind."""
RULES = (*IN_ORDER, *BY_KIND)
BLOCKS = {f"{rule}_stages_{first}" for rule in IN_ORDER for first in (STAGES[0], STAGES[SIZE])} | {
    f"{rule}_stages_{MOE[0]}" for rule in BY_KIND
}


@pytest.fixture(scope="module")
def workflow(tmp_path_factory):
    """A dense layer and two MoE layers, in blocks of the first four stages and the others."""
    workflow = dense_and_moe(tmp_path_factory.mktemp("blocks"), chains=[], stages_per_job=SIZE)
    compute = "    digest = hashlib"
    workflow.edit(
        "workflow/layerproof/digests.py", (compute, f'    open("digested", "a").write(f"{{path}}\\n")\n{compute}')
    )
    workflow.first = workflow.run()
    return workflow


def started(outcome):
    """The rule of each job."""
    lines = (line for line in outcome.log.splitlines() if line.startswith(("localrule ", "rule ")))
    return [line.split()[-1].removesuffix(":") for line in lines]


def test_a_job_runs_the_stages_of_a_block(workflow):
    """Of the port and of what diagnoses it, stages of one kind: a dense layer, embed, norm and lm_head are alone."""
    jobs = started(workflow.first)
    assert set(jobs) >= BLOCKS
    assert {rule: jobs.count(f"{rule}_stage") for rule in RULES} == dict.fromkeys(IN_ORDER, 0) | dict.fromkeys(
        BY_KIND, len(STAGES) - len(MOE)
    )
    assert workflow.run().started == 0


def test_a_result_is_read_once_for_its_digest(workflow):
    """By whoever needs it first, whatever time Snakemake gives it when its job ends."""
    read = (workflow.directory / "digested").read_text().splitlines()
    files = [path for path in workflow.results.rglob("*.h5") if path.parent.name != "chain"]
    assert len(files) > 3 * len(STAGES)
    counts = {read.count(str(path.relative_to(workflow.directory))) for path in files}
    assert counts == {1}
    workflow.run("--forcerun", "verdicts")
    again = (workflow.directory / "digested").read_text().splitlines()[len(read) :]
    assert not [path for path in again if path.endswith(".h5")]


def test_by_default_sixteen_stages_share_a_job(tmp_path):
    jobs = started(dense_and_moe(tmp_path, chains=[]).run("-n"))
    assert {f"{rule}_stages_{STAGES[0]}" for rule in IN_ORDER} <= set(jobs)
    assert not any(f"{rule}_stages_{STAGES[SIZE]}" in jobs for rule in RULES)


def test_on_a_cluster_blocks_are_jobs_like_those_of_one_stage(tmp_path):
    """Which are what the profile names."""
    planned = dense_and_moe(tmp_path, chains=[], stages_per_job=SIZE).run("--workflow-profile", "profiles/slurm", "-n")
    resources = dict(
        re.findall(r"^ *rule (\w+_stages?(?:_\w+)?):\n(?: +.*\n)*? +resources: (.*)", planned.text, re.MULTILINE)
    )
    assert resources.keys() == BLOCKS | {f"{rule}_stage" for rule in BY_KIND}
    for name, asked in resources.items():
        rule = name.partition("_stage")[0]
        side = {"golden": "gpu", "diagnose": "gpu", "port": "trn", "teacher_force": "trn"}.get(rule, "cpu")
        assert f"slurm_partition={side}" in asked, name
        assert ("gpu=1" in asked, "neuron=1" in asked) == (side == "gpu", side == "trn"), name
        assert ("slurm_extra=--exclusive" in asked) == (side == "trn"), name


def test_the_files_are_those_of_jobs_of_one_stage(workflow):
    """A stage does not depend on the setting; the report tells it."""
    workflow.configure(stages_per_job=1)
    outcome = workflow.run()
    assert outcome.made == {"report.html"} and {f"{rule}_stage" for rule in RULES} <= set(started(outcome))
    workflow.configure(stages_per_job=SIZE)
    assert workflow.run().made == {"report.html"}


def test_of_a_block_only_the_stages_run_that_an_edit_touches(workflow):
    workflow.edit("port.py", ("logits.float().softmax(-1)", "logits.float().sigmoid()"))
    made = workflow.run().made
    of_stages = ("port/{}.h5", "compare/{}.json", "forced/{}.h5", "diagnosis/{}.json", "plots/{}.svg")
    of_all = ("audit.json", "verdicts.json", "plots/map.svg", "plots/depth.svg", "report.html")
    assert made == {*(name.format(stage) for name in of_stages for stage in MOE), *of_all}
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["first_culprit"] == {
        "stage": "layer_001",
        "tap": "router.scores",
        "cause": "router_sigmoid",
        "rank": None,
    }
    assert "runs because its code" in workflow.log("port/layer_001"), "each stage has its own log"
    assert "runs because its inputs changed" in workflow.log("compare/layer_001")
    assert "up to date" in workflow.log("compare/layer_000")
    # What ran where, on which shapes, how long, and what came of it.
    assert ": port, taps: 18, out bfloat16 [2, 17, 64], on CPU" in workflow.log("port/layer_001")
    assert "compare/layer_001: fail, router.scores: " in workflow.log("compare/layer_001")
    assert "diagnosis/layer_001: router.scores: " in workflow.log("diagnosis/layer_001")
    assert re.search(
        r"^\d{4}-.* port/layer_001: done after [\d.]+ s, peak memory", workflow.log("port/layer_001"), re.M
    )


def test_a_stage_is_forced_by_its_file_or_with_all_others_by_its_rule(workflow):
    forced = workflow.run("--forcerun", "results/golden/layer_001.h5").made
    assert forced == {"golden/layer_001.h5", "noise/layer_001.h5"}
    assert workflow.run("--forcerun", "port_stage").made == {f"port/{stage}.h5" for stage in STAGES}
    assert workflow.run("--forcerun", "port_stages_layer_001").made == {f"port/{stage}.h5" for stage in MOE}
    block = STAGES[SIZE:]
    made = workflow.run("--forcerun", f"golden_stages_{block[0]}").made
    assert made == {f"{side}/{stage}.h5" for side in ("golden", "noise") for stage in block}


def test_a_profile_speaks_of_blocks_as_of_their_stages(workflow):
    asked = "--set-resources", "golden_stage:runtime=77", "golden_stages_norm:runtime=78"
    text = workflow.run("--dry-run", "--forcerun", "golden_stage", *asked).text
    assert (text.count(", runtime=77"), text.count(", runtime=78")) == (1, 1)


def test_a_stage_is_a_target(workflow):
    (workflow.results / "port/layer_001.h5").unlink()
    assert workflow.run(target="results/port/layer_001.h5").made == {"port/layer_001.h5"}
    assert not workflow.run().made, "it is what it was"


def test_a_stage_that_is_asked_for_alone_runs_alone(workflow, tmp_path):
    """Of the golden the stages before it run as well, and none behind it. (Where a block made them, Snakemake starts their
    jobs again, because the rule is another one; they find nothing to do.)
    """
    for stage in MOE:
        (workflow.results / f"port/{stage}.h5").unlink()
        (workflow.results / f"compare/{stage}.json").unlink()
    outcome = workflow.run(target="results/compare/layer_001.json")
    assert outcome.made == {"port/layer_001.h5", "compare/layer_001.json"}
    assert sorted(job for job in started(outcome) if job != "golden_stage") == ["compare_stage", "port_stage"]
    assert workflow.run().made == {"port/layer_002.h5", "compare/layer_002.json"}

    jobs = started(dense_and_moe(tmp_path, stages_per_job=SIZE).run("-n", target="results/compare/layer_001.json"))
    alone = {f"{rule}_stage": jobs.count(f"{rule}_stage") for rule in ("golden", "port", "compare")}
    assert alone == {"golden_stage": 3, "port_stage": 1, "compare_stage": 1}
    assert not [job for job in jobs if "_stages_" in job or job.startswith("chain")]


@pytest.fixture
def waiting(workflow):
    """The port waits at layer_002 as long as this file is there."""
    file = workflow.directory / "waiting"
    if "waiting" not in (workflow.directory / "port.py").read_text():
        signature = "def convert(stage: Stage, weights):\n"
        wait = '    while stage.name == "layer_002" and os.path.exists("waiting"):\n        time.sleep(0.1)\n'
        imports = "import torch\nimport torch.nn.functional as F\n"
        workflow.edit("port.py", (signature, signature + wait), (imports, f"import os\nimport time\n\n{imports}"))
        workflow.run()
    file.touch()
    yield file
    file.unlink(missing_ok=True)


def test_a_killed_job_loses_the_stage_that_it_was_at(workflow, waiting):
    for folder in ("port", "records/port"):
        shutil.rmtree(workflow.results / folder)
    process = workflow.start(warm_jobs=True)
    at_work(workflow, process, "layerproof port", workflow.results / "logs/port/layer_002.log").kill()
    assert process.wait() != 0, workflow.printed()
    waiting.unlink()
    made = {f"port/{stage}.h5" for stage in STAGES if stage != "layer_002"}
    before = {name: (workflow.results / name).stat().st_ino for name in made}
    assert {name for name in workflow.run().made if name.startswith("port/")} == {"port/layer_002.h5"}
    assert {name: (workflow.results / name).stat().st_ino for name in made} == before


def test_a_job_that_is_killed_when_it_runs_again_is_not_taken_for_done(workflow, waiting):
    """Snakemake puts the outputs back that were there before, which were made from another golden."""
    change_tensor(workflow, "model.layers.1.self_attn.o_proj.weight", lambda tensor: 2 * tensor)
    process = workflow.start(warm_jobs=True)
    at_work(workflow, process, "layerproof port", workflow.results / "logs/port/layer_002.log").kill()
    assert process.wait() != 0, workflow.printed()
    waiting.unlink()
    assert {f"port/{stage}.h5" for stage in MOE} <= workflow.run().made
    made = Record.read(workflow.results / "records/port/layer_002.json")
    assert made.inputs["results/golden/layer_001.h5"] == sha256(workflow.results / "golden/layer_001.h5")


def test_a_stage_that_fails_leaves_the_others_of_its_block(workflow):
    workflow.edit("port.py", ("def rotate(x, positions, theta):", "def rotate(x, positions, theta):\n    1 / 0"))
    workflow.run()
    stages = json.loads((workflow.results / "verdicts.json").read_text())["stages"]
    assert {stage for stage, entry in stages.items() if entry["status"] == "error"} == set(STAGES[1:4])

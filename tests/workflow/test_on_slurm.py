"""The workflow on a real Slurm, by the profile that ships."""

import json
import math
import shutil
import subprocess
import sys

import pytest
from runs import REPOSITORY, Workflow

from slurm import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.workflow]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with Slurm(tmp_path_factory.mktemp("slurm"), port=16817) as slurm:
        yield slurm


def test_the_default_run_survives_a_cancelled_job_and_a_lost_node(slurm, tmp_path):
    workflow = Workflow(tmp_path)
    profile = "--workflow-profile", "profiles/slurm", "--slurm-init-seconds-before-status-checks=1"
    command = workflow.command(*profile, target="all", cold=True)
    process = workflow.start([part for part in command if part not in ("--cores", "1")], warm_jobs=True)

    def running(rules: str) -> str:
        return slurm.wait_for_job(rules, tmp_path, unless=lambda: process.poll() is not None and workflow.printed())

    try:
        cancelled = running("rule_golden_")
        slurm.run("scancel", cancelled)
        lost = running("rule_port_")
        slurm.kill_node()
        slurm.wait_for_node("down")
        slurm.start("slurmd", "-D")
        process.wait()
    finally:
        process.kill()
    assert process.returncode == 0, workflow.printed()
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass" and len(verdicts["stages"]) == 9
    assert (workflow.results / "manifest.json").exists()

    jobs = slurm.jobs(tmp_path)
    by_rules = {}
    for job in jobs:
        by_rules.setdefault(job["Comment"].split("_")[1], []).append(job)
    golden, port = by_rules["golden"], by_rules["port"]
    assert golden[0]["JobId"] == cancelled and [job["JobState"] for job in golden] == ["CANCELLED", "COMPLETED"]
    assert port[0]["JobId"] == lost and port[-1]["JobState"] == "COMPLETED"
    assert len(port) == 2 or port[0]["Restarts"] == "1"

    # All stages of a kind in one submission, on the partition of their side: with one GPU, or the whole node.
    assert {job["Partition"] for name in ("golden", "diagnose") for job in by_rules[name]} == {"gpu"}
    assert {job["Partition"] for name in ("port", "force", "chain") for job in by_rules[name]} == {"trn"}
    assert {job["Partition"] for name in ("prepare", "compare", "report") for job in by_rules[name]} == {"cpu"}
    assert {job["TresPerJob"] for job in golden} == {"gres:gpu:1"} and {job["NumCPUs"] for job in golden} == {"1"}
    assert {job["OverSubscribe"] for job in port} == {"NO"} and {job["NumCPUs"] for job in port} == {"64"}

    # What is asked for is what was predicted, and more of it the second time.
    predicted = json.loads((workflow.results / "prediction.json").read_text())
    first, second = (int(job["MinMemoryNode"].removesuffix("M")) for job in golden)
    assert first == math.ceil((2e9 + 1.5 * predicted["golden"]) / 1e6)
    assert second == math.ceil(1.5 * (2e9 + 1.5 * predicted["golden"]) / 1e6)


def test_srun_starts_the_ranks_of_a_program_and_of_a_port(slurm, tmp_path):
    """In a job of Slurm: a killed rank ends the others, and the program runs again; then a port on two ranks is judged."""
    workflow = Workflow(
        tmp_path / "run",
        layers="0",
        chains=[],
        parallel={"launcher": "srun", "tp": 2},
        port={"module": "workflow/ports/minimax_m2_tp.py"},
    )
    shutil.copytree(REPOSITORY / "examples", workflow.directory / "examples")
    example = "examples/launchers/train_step.py out --dies 2"
    launch = (
        f"{sys.executable} -m layerproof launch --launcher srun --config examples/launchers/config.yaml -- {example}"
    )
    judge = " ".join(workflow.command("--nolock", target="results/compare/layer_000.json", cold=True))
    batch = [
        "sbatch",
        "--wait",
        "--chdir",
        str(workflow.directory),
        "--output",
        "job.txt",
        "--wrap",
        f"{launch} && {judge}",
    ]
    environment = workflow.options()["env"] | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(batch, env=environment, capture_output=True, text=True)
    said = (workflow.directory / "job.txt").read_text()
    assert ended.returncode == 0, said
    assert "Rank 2 ended without an error of Python" in said and "runs the program again, for time 1 of 1" in said
    assert json.loads((workflow.directory / "out/loss.json").read_text())["mesh"] == {"dp": 2, "tp": 2}
    assert json.loads((workflow.results / "compare/layer_000.json").read_text())["status"] == "pass"
    run = json.loads((workflow.results / "records/port/layer_000.json").read_text())["run"]
    assert (run["ranks"], run["launcher"], run["mesh"]) == (2, "srun", {"ep": 1, "cp": 1, "tp": 2})

"""The workflow on a real Slurm, by the profile that ships."""

import json
import math

import pytest
from runs import Workflow

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

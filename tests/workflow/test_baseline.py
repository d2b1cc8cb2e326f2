"""What benchmarks hold the workflow against makes the same as the workflow."""

import json
import subprocess
import sys

import h5py
import pytest
from runs import REPOSITORY, Workflow

from models import save

pytestmark = pytest.mark.workflow


def content(file):
    """The bytes of each dataset."""
    found = {}

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            found[name] = node[...].tobytes()

    with h5py.File(file) as opened:
        opened.visititems(visit)
    return found


def workflow_of(directory, **config):
    (directory.parent / "ids.json").write_text(json.dumps([list(range(3, 19)), list(range(5, 13))]))
    inputs = {"prompts": None, "token_ids": str(directory.parent / "ids.json")}
    return Workflow(
        directory, model={"checkpoint": str(directory.parent / "model")}, inputs=inputs, chains=[], **config
    )


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A run as it is by default: a stage at a time, several in a job."""
    directory = tmp_path_factory.mktemp("baseline")
    save("minimax_m2", directory / "model")
    jobs = workflow_of(directory / "jobs")
    jobs.run()
    return jobs


def assert_same(ours, theirs):
    """Tensors by stage, and what came of their comparison."""
    files = sorted(path.relative_to(theirs) for path in theirs.glob("compare/*.json"))
    assert [path.stem for path in files] == sorted(path.stem for path in ours.glob("compare/*.json")) != []
    for path in files:
        for side in ("golden", "noise", "port"):
            wanted, found = (content(results / side / f"{path.stem}.h5") for results in (theirs, ours))
            assert found == wanted, path
        found, wanted = (json.loads((results / path).read_text()) for results in (ours, theirs))
        assert found["golden"].pop("alone", 0) == 0, (
            "of a stage of the whole model, how far it is off when it runs alone"
        )
        assert found == wanted
    assert (ours / "report.html").stat().st_size > 1e5


def test_the_whole_golden_in_one_process_makes_what_a_stage_at_a_time_makes(jobs):
    places = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(3)}
    golden = {"mode": "whole", "device_map": places, "offload_folder": "offload"}
    whole = workflow_of(jobs.directory.parent / "whole", golden=golden)
    ran = whole.run().log
    assert "rule golden_whole:" in ran and "rule golden_stage" not in ran
    assert_same(whole.results, jobs.results)
    assert whole.run().started == 0
    made = whole.run("--forcerun", "results/golden/layer_001.h5").made
    assert made == {"golden/layer_001.h5", "noise/layer_001.h5"}


def test_a_whole_golden_that_cannot_be_loaded_is_tried_once(jobs):
    whole = workflow_of(jobs.directory.parent / "unloaded", golden={"mode": "whole", "device_map": "cpu"})
    loading = "model = _load(directory, settings)"
    whole.edit(
        "workflow/layerproof/golden/whole.py", (loading, "open('tried', 'a').write('x'); raise RuntimeError('no room')")
    )
    assert whole.run().returncode == 0
    assert (whole.directory / "tried").read_text() == "x"
    verdict = json.loads((whole.results / "verdicts.json").read_text())
    assert verdict["overall"] == "error"
    with h5py.File(whole.results / "golden/norm.h5") as file:
        assert "no room" in str(file.attrs["error"])


def test_one_process_makes_the_tensors_comparisons_and_report_of_the_workflow(jobs):
    process = workflow_of(jobs.directory.parent / "process")
    options = process.options()
    # One thread, as --cores 1 has it for every job.
    options["env"] |= {"PYTHONPATH": str(REPOSITORY / "workflow"), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run([sys.executable, str(REPOSITORY / "benchmarks/one_process.py")], **options)
    assert outcome.returncode == 0, outcome.stdout
    assert_same(process.results, jobs.results)

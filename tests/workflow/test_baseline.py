"""What benchmarks hold the workflow against makes the same as the workflow."""

import json
import subprocess
import sys

import h5py
from runs import REPOSITORY, Workflow

from models import save


def content(file):
    """The bytes of each dataset."""
    found = {}

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            found[name] = node[...].tobytes()

    with h5py.File(file) as opened:
        opened.visititems(visit)
    return found


def test_one_process_makes_the_tensors_comparisons_and_report_of_the_workflow(tmp_path):
    save("minimax_m2", tmp_path / "model")
    (tmp_path / "ids.json").write_text(json.dumps([list(range(3, 19)), list(range(5, 13))]))
    by = {}
    for name in ("jobs", "process"):
        inputs = {"prompts": None, "token_ids": str(tmp_path / "ids.json")}
        model = {"checkpoint": str(tmp_path / "model")}
        by[name] = Workflow(tmp_path / name, model=model, inputs=inputs, chains=[])
    by["jobs"].run()
    options = by["process"].options()
    # One thread, as --cores 1 has it for every job.
    options["env"] |= {"PYTHONPATH": str(REPOSITORY / "workflow"), "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run([sys.executable, str(REPOSITORY / "benchmarks/one_process.py")], **options)
    assert outcome.returncode == 0, outcome.stdout

    ours, theirs = (by[name].results for name in ("process", "jobs"))
    files = sorted(path.relative_to(theirs) for path in theirs.glob("compare/*.json"))
    assert [path.stem for path in files] == sorted(path.stem for path in ours.glob("compare/*.json")) != []
    for path in files:
        for side in ("golden", "noise", "port"):
            wanted, found = (content(results / side / f"{path.stem}.h5") for results in (theirs, ours))
            assert found == wanted, path
        assert json.loads((ours / path).read_text()) == json.loads((theirs / path).read_text())
    assert (ours / "report.html").stat().st_size > 1e5

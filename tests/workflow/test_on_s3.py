"""Golden and port on hosts that share nothing but a bucket, on a real S3 server."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from runs import Workflow
from s3 import Swift

from models import save

pytestmark = [pytest.mark.s3, pytest.mark.workflow]

STAGES = ["embed", "layer_000", "layer_001", "layer_002", "norm", "lm_head"]
GOLDEN = "results/golden/lm_head.h5"
"""Needs the golden of all other stages."""


@pytest.fixture(scope="module")
def swift(tmp_path_factory):
    with Swift(tmp_path_factory.mktemp("swift"), bucket="runs") as swift, pytest.MonkeyPatch.context() as patch:
        for name, value in swift.environment().items():
            patch.setenv(name, value)
        yield swift


def verify(host):
    command = [sys.executable, "-m", "layerproof", "verify"]
    environment = os.environ | {"PYTHONPATH": str(host.directory / "workflow")}
    return subprocess.run(command, cwd=host.directory, env=environment, capture_output=True, text=True).stdout


class Hosts:
    """A host of the golden and one of the port: one at a time is there, the other one's files are out of reach."""

    def __init__(self, folder, storage):
        self.apart = folder / "apart"
        self.golden, self.port = (
            Workflow(folder / name, model={"checkpoint": "model"}, golden={"storage": storage})
            for name in ("golden", "port")
        )
        self.port.configure(golden={"mode": "stored"})
        save("minimax_m2", self.golden.directory / "model")
        shutil.copytree(self.golden.directory / "model", self.port.directory / "model")
        for host in (self.golden, self.port):
            (host.directory / "ids.json").write_text("[[5, 6, 7, 8, 9], [10, 11, 12]]")
            host.configure(inputs={"prompts": None, "token_ids": "ids.json"})

    def on_golden(self, *arguments, target="export_golden", **options):
        return self._alone(self.golden, self.port, *arguments, target=target, **options)

    def on_port(self, *arguments, target="all", **options):
        return self._alone(self.port, self.golden, *arguments, target=target, **options)

    def _alone(self, host, other, *arguments, **options):
        other.directory.rename(self.apart)
        try:
            return host.run(*arguments, **options)
        finally:
            self.apart.rename(other.directory)


def test_a_port_is_compared_with_a_golden_that_another_host_made(swift, tmp_path):
    hosts = Hosts(tmp_path, "s3://runs/one")
    made = hosts.on_golden().made
    assert {name.split("/")[0] for name in made} == {
        "weights", "tokens.json", "prediction.json", "preflight", "golden", "noise",
    }  # fmt: skip
    assert {key for key in swift.objects() if key.startswith("one/")} == {
        f"one/{name}.zip" for name in ("preflight", *STAGES)
    }
    assert hosts.on_golden().started == 0
    hosts.on_golden(target="all")
    assert "every file is as it was" in verify(hosts.golden)

    hosts.on_port()
    assert "every file is as it was" in verify(hosts.port)
    verdicts = json.loads((hosts.port.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass" and list(verdicts["stages"]) == STAGES
    for stage in STAGES:
        for folder in ("golden", "noise"):
            name = f"{folder}/{stage}.h5"
            assert (hosts.port.results / name).read_bytes() == (hosts.golden.results / name).read_bytes()
    record = json.loads((hosts.port.results / "records/golden/layer_001.json").read_text())
    assert record["run"]["command"].startswith("layerproof import-golden ")
    assert record["run"]["made"]["settings"]["golden"]["mode"] == "streamed"
    assert not list((hosts.port.directory / ".snakemake/storage").rglob("*.zip"))
    assert hosts.on_port().started == 0

    # An edit of the port reaches the port alone.
    hosts.port.edit("workflow/ports/minimax_m2.py", ("logits.float().sigmoid()", "logits.float().softmax(-1)"))
    made = hosts.on_port(target="results/report.html").made
    assert "port/layer_001.h5" in made and not [name for name in made if name.startswith(("golden", "noise"))]
    verdicts = json.loads((hosts.port.results / "verdicts.json").read_text())
    assert verdicts["first_culprit"]["cause"] == "router_softmax"

    # One of the golden's code is none that the exported golden was made by.
    hosts.port.edit(
        "workflow/layerproof/golden/stage.py", ("stage) if full_model else", "stage) if full_model is not None else")
    )
    run = hosts.on_port(target=GOLDEN, check=False)
    assert run.returncode and "embed.zip: was computed by other code (layerproof/golden/stage.py" in run.text
    hosts.golden.edit(
        "workflow/layerproof/golden/stage.py", ("stage) if full_model else", "stage) if full_model is not None else")
    )
    exported = swift.get("one/norm.zip")
    hosts.on_golden()
    assert swift.get("one/norm.zip") != exported, "its record has the other code"
    hosts.on_port(target=GOLDEN)


def test_a_golden_made_from_something_else_is_not_imported(swift, tmp_path):
    hosts = Hosts(tmp_path, "s3://runs/two")
    hosts.on_golden()
    hosts.on_port(target=GOLDEN)
    before = {path: path.read_bytes() for path in (hosts.port.results / "golden").iterdir()}

    (hosts.golden.directory / "ids.json").write_text("[[5, 6, 7, 8, 9], [10, 11, 13]]")
    hosts.on_golden()
    run = hosts.on_port(target=GOLDEN, check=False)
    assert run.returncode and "s3://runs/two/embed.zip: was computed from other tokens." in run.text
    assert {path: path.read_bytes() for path in (hosts.port.results / "golden").iterdir()} == before

    shutil.copy(hosts.golden.directory / "ids.json", hosts.port.directory)
    made = hosts.on_port(target=GOLDEN).made
    assert {f"golden/{stage}.h5" for stage in STAGES} <= made


def test_an_object_that_was_cut_short_is_told(swift, tmp_path):
    hosts = Hosts(tmp_path, "s3://runs/three")
    hosts.on_golden()
    swift.put("three/layer_001.zip", swift.get("three/layer_001.zip")[:-1000])
    run = hosts.on_port(target="results/golden/layer_002.h5", check=False)
    assert run.returncode and "layer_001.zip: is damaged" in run.text
    assert not (hosts.port.results / "golden/layer_001.h5").exists()
    hosts.on_golden("--forcerun", "export_stage")
    hosts.on_port(target="results/golden/layer_002.h5")


def test_what_cannot_be_done_is_told(swift, tmp_path):
    hosts = Hosts(tmp_path, "s3://runs/four")
    run = hosts.on_port(check=False)
    assert run.returncode and "s3://runs/four/embed.zip" in run.text and not run.made
    run = hosts.on_port(check=False, target="export_golden")
    assert run.returncode and "error: config.yaml: golden.mode: stored imports the golden." in run.text
    hosts.golden.configure(golden={"storage": None})
    run = hosts.on_golden(check=False)
    assert (
        run.returncode
        and "error: config.yaml: golden.storage: is missing, but export_golden writes the golden there." in run.text
    )
    storage = ("--default-storage-provider", "s3", "--default-storage-prefix", "s3://runs/four")
    run = hosts.on_golden(*storage, check=False, target="results/golden/embed.h5")
    assert run.returncode and "error: --default-storage-provider: results/ must be local." in run.text

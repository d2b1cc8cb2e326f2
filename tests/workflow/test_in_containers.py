"""The workflow in containers, built by the recipes: golden and port in images of their own."""

import json
import os
import re
import shutil
import subprocess
import tempfile
import textwrap
from pathlib import Path

import pytest
from runs import REPOSITORY, Workflow

from environments import CACHE
from layerproof.files import digest_of, sha256
from layerproof.paths import TINY_CHECKPOINT

pytestmark = [pytest.mark.apptainer, pytest.mark.workflow]

SCRIPTS = REPOSITORY / "tests/containers"


@pytest.fixture(scope="module")
def images():
    """Apptainer on PATH, and images that are built once for these recipes."""
    recipes = [
        *SCRIPTS.glob("*.sh"),
        *REPOSITORY.glob("containers/*.def"),
        *(REPOSITORY / f"requirements/{name}.txt" for name in ("uv", "run", "port")),
    ]
    folder = CACHE / digest_of(sorted(map(sha256, recipes)))[:16]
    subprocess.run(["bash", SCRIPTS / "install-apptainer.sh", CACHE / "apptainer"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{CACHE}/apptainer/usr/bin:{os.environ['PATH']}")
        if not (folder / "done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            subprocess.run(["bash", SCRIPTS / "build-images.sh", folder], check=True)
            (folder / "done").touch()
        # Containers that idle: what the kernel has read of an image stays in memory as long as one of them runs.
        idle = [subprocess.Popen(["apptainer", "exec", image, "sleep", "infinity"]) for image in folder.glob("*.sif")]
        yield folder
        for process in idle:
            process.terminate()
            process.wait()


@pytest.fixture
def elsewhere():
    """A folder that a container does not see of itself, as it does /tmp."""
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        yield Path(folder)


def containers(images, port="neuron"):
    layerproof = str(images / "layerproof.sif")
    return {"golden": layerproof, "port": str(images / f"{port}.sif"), "cpu": layerproof}


def record(workflow, name):
    return json.loads((workflow.results / f"records/{name}.json").read_text())


def run(workflow, **options):
    workflow.cold = True  # the images have a Python of their own
    return workflow.run("--sdm", "apptainer", "--cores", "2", **options)


def test_the_default_run_sees_what_the_config_names_and_a_rebuilt_image_runs_its_side_again(images, elsewhere):
    checkpoint, port = elsewhere / "models" / "small", elsewhere / "ports" / "my_port.py"
    shutil.copytree(REPOSITORY / TINY_CHECKPOINT, elsewhere / "shipped")
    checkpoint.mkdir(parents=True)
    for file in (elsewhere / "shipped").iterdir():
        (checkpoint / file.name).symlink_to(file)
    port.parent.mkdir()
    port.write_text((REPOSITORY / "workflow/ports/minimax_m2.py").read_text())

    workflow = Workflow(
        elsewhere / "run",
        model={"checkpoint": str(checkpoint)},
        port={"module": str(port)},
        containers=containers(images),
    )
    run(workflow, target="all")
    verdicts = json.loads((workflow.results / "verdicts.json").read_text())
    assert verdicts["overall"] == "pass" and len(verdicts["stages"]) == 9

    golden, its_port = record(workflow, "golden/layer_003"), record(workflow, "port/layer_003")
    digests = {side: f"sha256:{sha256(images / f'{side}.sif')}" for side in ("layerproof", "neuron")}
    assert golden["job"]["versions"] == {"container": digests["layerproof"]}
    assert its_port["job"]["versions"] == {"container": digests["neuron"]}
    assert "transformers" in golden["run"]["packages"] and "transformers" not in its_port["run"]["packages"]
    report = (workflow.results / "report.html").read_text()
    assert all(digest in report for digest in digests.values())
    manifest = json.loads((workflow.results / "manifest.json").read_text())
    assert manifest["jobs"]["port/norm"]["versions"]["container"] == digests["neuron"]

    # Golden, port and Snakemake have a Python of their own, and agree on what code is.
    assert run(workflow, target="all").started == 0

    workflow.configure(containers=containers(images, port="layerproof"), layers=0, chains=[])
    made = run(workflow).made
    assert {name for name in made if name.endswith(".h5")} == {"port/embed.h5", "port/layer_000.h5"}

    workflow.configure(containers=containers(images), layers="all")
    workflow.edit(str(port), ("logits.float().sigmoid()", "logits.float().softmax(-1)"))
    made = run(workflow, target="results/diagnosis/layer_005.json").made
    assert json.loads((workflow.results / "diagnosis/layer_005.json").read_text())["culprits"]
    assert "port/layer_000.h5" in made or "port/layer_005.h5" in made
    assert "port/norm.h5" not in made and not any(name.startswith("golden/") for name in made)


def test_recipes_and_scripts_are_clean_to_shellcheck(tmp_path):
    """What Apptainer runs of a recipe, by /bin/sh; and the scripts of tests, docs and set-up."""
    subprocess.run(["bash", REPOSITORY / "tests/apt-install.sh", "shellcheck"], check=True)
    scripts = [path for folder in ("tests", "docs", "requirements") for path in REPOSITORY.glob(f"{folder}/**/*.sh")]
    recipes = sorted(REPOSITORY.glob("containers/*.def"))
    assert len(scripts) >= 6 and len(recipes) == 2
    for recipe in recipes:
        for name, lines in re.findall(
            r"^%(post|environment|test)\n((?:    .*\n|\n)*)", recipe.read_text(), re.MULTILINE
        ):
            scripts.append(tmp_path / f"{recipe.stem}.{name}.sh")
            scripts[-1].write_text(f"#!/bin/sh\n{textwrap.dedent(lines)}")
    # SC1091: what they source is in the image.
    checked = subprocess.run(
        ["shellcheck", "--severity=warning", "--exclude=SC1091", *scripts], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout


def test_an_image_that_is_not_there_is_told(images, tmp_path):
    (tmp_path / "there.sif").touch()
    there = str(tmp_path / "there.sif")
    workflow = Workflow(tmp_path, containers={"golden": there, "port": "containers/missing.sif", "cpu": there})
    failed = workflow.run("--sdm", "apptainer", "-n", check=False)
    assert failed.returncode != 0 and "Traceback" not in failed.text
    assert "config.yaml: containers: containers/missing.sif does not exist. Build it" in failed.text
    # Hosts of the other side do not have it.
    assert workflow.run("--sdm", "apptainer", "-n", target="results/golden/embed.h5").returncode == 0

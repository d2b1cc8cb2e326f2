"""Layerproof in a folder of one's own: `layerproof init` and `run`, and the three ways by Snakemake itself."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from runs import REPOSITORY

import warm_server
from environments import environment
from layerproof.warm import VARIABLE
from programs import write_program

pytestmark = pytest.mark.workflow

BIN = Path(sys.executable).parent
MODULE = """
module parity:
    snakefile: "{snakefile}"
    config: {{"inputs": {{"prompts": "prompts.txt"}}, "port": {{"backend": "transformers"}}}}

use rule * from parity as parity_*

rule done:
    default_target: True
    input: "results/compare/embed.json"
    output: "done.txt"
    shell: "touch {{output}}"
"""


def run(*command, cwd, code=0, **variables):
    env = environment() | {"PATH": f"{BIN}:{os.environ['PATH']}", VARIABLE: warm_server.server()} | variables
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    run("layerproof", "init", "mine", cwd=tmp_path)
    return tmp_path / "mine"


def test_what_init_writes_runs_as_it_is_and_says_why_it_would_run_again(folder):
    run("layerproof", "run", "results/compare/layer_001.json", cwd=folder)
    assert "port/layer_001: up to date" in run("layerproof", "why", "results/port/layer_001.h5", cwd=folder)
    config = folder / "config.yaml"
    written = config.read_text()
    command = ["layerproof", "why", "results/port/layer_001.h5"]
    for line, key in (("options: {level: 2}", "port.options.level"), ("dtype: float32", "port.dtype")):
        config.write_text(written.replace("  # dtype: bfloat16", f"  {line}"))
        outcome = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
        assert outcome.returncode == 1
        assert outcome.stdout == f"port/layer_001: would run, because its settings changed ({key})\n"
    assert "port_stage" in run("layerproof", "run", "results/compare/layer_001.json", "--", "--dry-run", cwd=folder)
    for file, told in (("records/port/layer_001.json", "has no record"), ("manifest.json", "no job has written it")):
        command[-1] = f"results/{file}"
        outcome = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
        assert outcome.returncode and f"results/{file}: {told}" in outcome.stderr


def test_jobs_have_the_python_of_layerproof_where_its_environment_is_not_activated(folder, tmp_path):
    other = tmp_path / "bin/python"
    write_program(other, "exit 1")
    path = f"{other.parent}:/usr/bin:/bin"
    command = [BIN / "layerproof", "run", "results/tokens.json"]
    done = subprocess.run(command, cwd=folder, env=environment() | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_port_to_fill_in_ends_as_an_error_that_names_what_is_missing(folder):
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("backend: transformers", "module: port.py"))
    files = "results/compare/layer_000.json", "results/compare/embed.json"
    said = run("layerproof", "run", *files, cwd=folder, code=2)
    assert "ERROR: layer_000: error, port.py has no layer yet. Write class Layer" in said and "PASS: embed" in said
    assert "port.py has no layer yet. Write class Layer." in (folder / "results/compare/layer_000.json").read_text()
    assert '"status": "pass"' in (folder / "results/compare/embed.json").read_text()


def test_init_overwrites_nothing(folder):
    (folder / "config.yaml").write_text("mine")
    command = ["layerproof", "init", str(folder)]
    outcome = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert outcome.returncode == 2 and "config.yaml: already exists" in outcome.stderr
    assert (folder / "config.yaml").read_text() == "mine"


def test_snakemake_takes_the_snakefile_from_any_folder(folder, tmp_path):
    snakefile = run("layerproof", "snakefile", cwd=folder).strip()
    planned = run("snakemake", "-s", snakefile, "--directory", ".", "--cores", "1", "-n", cwd=folder)
    assert planned == run("snakemake", "-s", snakefile, "--cores", "1", "-n", "--directory", folder, cwd=tmp_path) or (
        planned.count("\nrule ") > 10
    )


def test_another_workflow_takes_it_as_a_module(folder):
    snakefile = run("layerproof", "snakefile", cwd=folder).strip()
    (folder / "config.yaml").unlink()
    (folder / "Snakefile").write_text(MODULE.format(snakefile=snakefile))
    run("snakemake", "--cores", "1", cwd=folder)
    assert (folder / "done.txt").exists()
    assert '"status": "pass"' in (folder / "results/compare/embed.json").read_text()


def test_the_wheel_runs_where_there_is_no_clone(tmp_path):
    """Installed with --no-deps beside the locked packages, as the tests have them."""
    source = tmp_path / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.nb?")
    source.mkdir()
    for name in ("Snakefile", "config.yaml", "pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(REPOSITORY / name, source)
    for name in ("workflow", "profiles", "docs"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=ignored)
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {"layerproof/py.typed", "layerproof/_workflow/Snakefile"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env", cwd=tmp_path)
    python = tmp_path / "env/bin/python"
    (packages,) = (tmp_path / "env/lib").glob("python3.*/site-packages")
    (installed,) = (Path(sys.executable).parents[1] / "lib").glob("python3.*/site-packages")
    (packages / "locked.pth").write_text(f"{installed}\n")
    run(BIN / "uv", "pip", "install", "--quiet", "--python", python, "--no-deps", wheel, cwd=tmp_path)
    own = {"PATH": f"{tmp_path}/env/bin:{os.environ['PATH']}"}
    assert str(packages) in run(python, "-c", "import layerproof; print(layerproof.__file__)", cwd=tmp_path, **own)
    run(tmp_path / "env/bin/layerproof", "init", "mine", cwd=tmp_path, **own)
    run(tmp_path / "env/bin/layerproof", "run", "results/compare/embed.json", cwd=tmp_path / "mine", **own)
    record = (tmp_path / "mine/results/records/compare/embed.json").read_text()
    assert '"layerproof/compare/stage.py::compare_stage"' in record
    assert str(packages) not in record.partition('"code"')[2].partition('"run"')[0]

"""Ten inputs of the table through the command that people type."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from configs import REPOSITORY
from inputs.case import Case, make_base
from inputs.table import TABLE

pytestmark = pytest.mark.workflow

SAYS = (
    "a GGUF file",
    "one file that is a pointer of Git LFS",
    "an epsilon as a text",
    "GPTQ",
    "FP8 with a scale missing",
    "code of its own, not trusted",
    "a tokenizer with more words than the model",
    "an id beyond the vocabulary",
)
WORKS = ("the cache of the Hub", "NVFP4, by compressed-tensors")
ROWS = {row[0]: row for rows in TABLE.values() for row in rows}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    make_base(folder)
    return folder


def layerproof_run(case):
    """`layerproof run` in a folder of its own: exit code and what the terminal shows."""
    (case.folder / "config.yaml").write_text(yaml.safe_dump(case.settings))
    command = [sys.executable, "-m", "layerproof", "run", "--cores", "1"]
    env = os.environ | {"PYTHONPATH": str(REPOSITORY / "workflow"), "NO_COLOR": "1", "HOME": str(case.folder)}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    done = subprocess.run(
        command, cwd=case.folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("what", SAYS)
def test_the_terminal_says_what_is_wrong_and_no_traceback(base, tmp_path, what):
    case = Case(tmp_path / "run", base)
    _, change, says = ROWS[what]
    change(case)
    code, said = layerproof_run(case)
    assert code != 0
    assert " ".join(says.split()) in " ".join(said.split())
    assert "Traceback" not in said
    assert len(said.splitlines()) < 60


@pytest.mark.parametrize("what", WORKS)
def test_it_works_by_the_command_too(base, tmp_path, what):
    case = Case(tmp_path / "run", base)
    ROWS[what][1](case)
    code, said = layerproof_run(case)
    assert code == 0, said
    assert "pass" in said

"""Ten inputs of the table through the command that people type."""

import pytest

from environments import hurried
from families.command import layerproof_run
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


@pytest.mark.parametrize("what", SAYS)
def test_the_terminal_says_what_is_wrong_and_no_traceback(base, tmp_path, what):
    case = Case(tmp_path / "run", base)
    _, change, says = ROWS[what]
    change(case)
    code, said = layerproof_run(case.folder, case.settings, **hurried())
    assert code != 0
    assert " ".join(says.split()) in " ".join(said.split())
    assert "Traceback" not in said
    assert len(said.splitlines()) < 60


@pytest.mark.parametrize("what", WORKS)
def test_it_works_by_the_command_too(base, tmp_path, what):
    case = Case(tmp_path / "run", base)
    ROWS[what][1](case)
    code, said = layerproof_run(case.folder, case.settings, **hurried())
    assert code == 0, said
    assert "pass" in said

"""A slice of `make bugs`: bugs of every kind and how they are named, and clean runs that must raise no alarm."""

import pytest

from bugs import run
from bugs.corpus import BUGS, MINIMAX_FP8

pytestmark = pytest.mark.slow

SLICE = (
    "norm epsilon",
    "q norm left out",
    "weights of the next layer",
    "one head's rows of q never loaded",
    "k not turned",
    "scale of the rotary size",
    "last position of the output",
    "softmax router",
    "one expert too few",
    "one expert never loaded",
    "head shards in reverse",
    "theta, and gate and up swapped",
    "theta, and turned the other way",
    "gelu, dense",
    "fp8 scales of experts transposed",
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("bugs")


@pytest.mark.parametrize("name", SLICE)
def test_a_bug_is_found_placed_and_named(directory, name):
    (bug,) = (bug for bug in BUGS if bug.name == name)
    row = run.run_bug(bug, directory)
    assert row["verdicts"]["layerproof"]
    assert row["found"] == row["expected"], row["culprits"]
    assert any(bug.says in finding for finding in row["culprits"][0]["findings"]) or not bug.says
    if bug.cause:
        assert row["together"]["explains"]
        cause = row["culprits"][0]["cause"]
        assert cause["R_explained"] < 2 < (cause["runner_up"] or {"R_explained": 9})["R_explained"]
    if name.endswith("gate and up swapped"):
        assert row["together"]["causes"] == ["rope_theta", "gate_up_swapped"], "both mistakes of the stage are named"


@pytest.mark.parametrize("case", run.clean_cases()[::42], ids=str)
def test_a_clean_run_raises_no_alarm(directory, case):
    row = run.run_clean(case, directory)
    assert not row["verdicts"]["layerproof"], row


def test_the_corpus_is_large_enough_and_every_bug_its_own():
    assert len(BUGS) >= 60 and len(run.clean_cases()) >= 200
    assert len({(bug.model, bug.name) for bug in BUGS}) == len(BUGS)
    assert {case.model for case in run.clean_cases()} == {*run.ARCHITECTURES, MINIMAX_FP8}


def row(kind, verdicts, expected=None, found=None):
    return {"kind": kind, "verdicts": verdicts, "expected": expected, "found": found, "says": "", "culprits": []}


def test_the_table_counts_what_was_found_and_what_was_right():
    def place(tap, cause):
        return {"stage": "layer_002", "tap": tap, "cause": cause}

    said = dict.fromkeys(run.RULES, True)
    rows = [
        row("bug", said, place("out", "a"), place("out", "a")),
        row("bug", said, place("out", "a"), place("attn.q", None)),
        row("bug", said | {"layerproof": False}, place("out", "a"), {"stage": None, "tap": None, "cause": None}),
        row("clean", said | {"layerproof": False}),
    ]
    lines = run.table(rows).splitlines()
    assert lines[1].split() == ["Layerproof", "2/3", "2/2", "1/2", "1/2", "0/1"]
    assert lines[2].split()[-5:] == ["3/3", "–", "–", "–", "1/1"]

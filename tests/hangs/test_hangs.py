"""Each mistake in four forked ranks or so, and healthy programs: what is said names the rank and the cause."""

import sys

import pytest

from hangs import drawn, others, run
from layerproof.distributed import process_group

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", autouse=True)
def no_group():
    """Ranks that are forked would have the group of this process, which another test has joined."""
    process_group.leave()


@pytest.mark.parametrize("kind", drawn.KINDS)
def test_a_mistake_is_named_with_its_rank_and_all_ranks_end(kind):
    program = drawn.draw(1, kind)
    outcome = drawn.run(program)
    print(f"{outcome.seconds - program.deadline:.1f} s after the deadline")
    assert (drawn.is_right(program, outcome), outcome.is_left) == ((True, True), False), (program, outcome)
    assert outcome.sentence.endswith(".")


@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_said_of_a_healthy_program(seed):
    outcome = drawn.run(drawn.draw(seed))
    assert (outcome.cause, set(outcome.ended)) == ("", {0}), outcome


def test_rows_that_are_there_are_not_run_again(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(others, "WAYS", ("plain torch",))
    monkeypatch.setattr(
        sys, "argv", ["run.py", "--hangs", "1", "--healthy", "1", "--output", str(tmp_path / "rows.jsonl")]
    )
    assert run.main() == 0
    first = capsys.readouterr().out
    for module, name in ((drawn, "run"), (others, "said_of")):
        monkeypatch.setattr(module, name, lambda *arguments: pytest.fail("it was run again"))
    assert run.main() == 0
    table = capsys.readouterr().out
    assert table in first and "1 healthy programs: 0 false alarms" in table

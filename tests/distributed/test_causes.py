"""What follows from what ranks have posted, without any process."""

import pytest

from layerproof.distributed.board import State
from layerproof.distributed.causes import FINISHED, Cause, explain
from layerproof.distributed.marks import Step
from layerproof.distributed.table import reported

ALL = (0, 1, 2, 3)


def step(name, number, detail="", group="all", where="train.py:7", is_open=False):
    return Step(name, detail, group, number, where, 100.0 + number, None if is_open else 100.5 + number)


def state(rank, *steps, groups=None, **others):
    counts = {one.group: one.number + 1 for one in steps}
    values = {"address": "host:1", "host": "elsewhere", "groups": groups or {"all": ALL}} | others
    return State(rank, 4, steps=steps, counts=counts, **values)


def of(*states, size=4):
    return explain({one.rank: one for one in states}, size)


JOINED = step("init_process_group", 0)
WAITS = step("barrier", 1, is_open=True)


def test_a_rank_that_does_not_come_is_at_its_innermost_line():
    late = state(3, JOINED, stack=["train.py:1 in main", "train.py:30 in load"])
    found = of(*(state(rank, JOINED, WAITS) for rank in ALL[:3]), late)
    assert (found.cause, found.ranks, found.step) == (Cause.OTHER_CODE, (3,), "barrier at train.py:7")
    assert "Rank 3 is at train.py:30 in load; its last step was init_process_group at train.py:7." in found.sentence


def test_a_rank_that_has_begun_the_step_and_gone_on_is_not_to_blame():
    """As after an all_reduce with async_op."""
    begun = state(2, JOINED, step("barrier", 1), stack=["train.py:9 in main"])
    found = of(*(state(rank, JOINED, WAITS) for rank in (0, 1)), begun, state(3, JOINED, stack=["train.py:30 in load"]))
    assert (found.cause, found.ranks) == (Cause.OTHER_CODE, (3,))


def test_who_is_waited_for_in_the_end_is_to_blame():
    """Ranks 0 and 1 wait for 2, which waits for 3 in a group of both."""
    groups = {"all": ALL, "2,3": (2, 3)}
    waits = step("all_reduce", 0, group="2,3", is_open=True)
    ranks = [state(rank, WAITS, groups=groups) for rank in (0, 1)]
    found = of(*ranks, state(2, waits, groups=groups), state(3, groups=groups, stack=["a.py:3 in f"]))
    assert (found.cause, found.ranks) == (Cause.OTHER_CODE, (3,))


def test_of_two_ranks_the_one_that_does_what_fewer_do_in_the_world_is_to_blame():
    def calls(detail, group):
        return step("all_reduce", 0, detail, group, is_open=True)

    groups = {"0,1": (0, 1), "2,3": (2, 3)}
    found = of(
        state(0, calls("float32[4]", "0,1"), groups=groups),
        state(1, calls("float32[4]", "0,1"), groups=groups),
        state(2, calls("float32[6]", "2,3"), groups=groups),
        state(3, calls("float32[4]", "2,3"), groups=groups),
    )
    assert (found.cause, found.ranks) == (Cause.OTHER_SIGNATURE, (2,))


@pytest.mark.parametrize(
    ("first", "others", "cause"),
    [
        ({"ended": "raised ValueError: no weights", "ended_at": 5.0}, "Connection closed by peer", Cause.RAISED),
        ({"ended": "was killed by SIGKILL", "ended_at": 9.0}, "Connection reset by peer", Cause.DIED),
        ({"ended": FINISHED, "ended_at": 5.0}, "Connection closed by peer", Cause.LEFT),
    ],
)
def test_those_that_lose_another_rank_are_not_to_blame(first, others, cause):
    lost = [state(rank, WAITS, ended=f"raised RuntimeError: {others}", ended_at=6.0) for rank in ALL[1:]]
    found = of(state(0, JOINED, **first), *lost)
    assert (found.cause, found.ranks) == (cause, (0,))


def test_those_that_a_launcher_kills_after_an_error_are_not_to_blame():
    killed = [state(rank, WAITS, ended="was killed by SIGTERM", ended_at=4.0) for rank in ALL[:3]]
    found = of(*killed, state(3, JOINED, ended="raised ValueError: no weights", ended_at=5.0))
    assert (found.cause, found.ranks) == (Cause.RAISED, (3,))


@pytest.mark.parametrize(("line", "to_blame"), [(3, 1), (9, 0)])
def test_of_a_message_and_another_step_the_one_in_the_earlier_line_was_skipped(line, to_blame):
    """Rank 0 waits for a message of rank 1, which waits for all."""
    groups = {"all": ALL, "1>0": (1, 0)}
    receives = step("recv", 0, "float32[4]", "1>0", f"train.py:{line}", is_open=True)
    found = of(*(state(rank, WAITS, groups=groups) for rank in ALL[1:]), state(0, receives, groups=groups))
    assert found.ranks == (to_blame,) and found.cause is Cause.SKIPPED


def test_what_flight_recorder_has_counts_where_marks_show_nothing():
    waits = Step("all_reduce", "", "all, by Flight Recorder", 4, "a line", 100.0)
    ranks = {rank: state(rank, JOINED, recorded=[waits], groups={"all, by Flight Recorder": ALL}) for rank in ALL[:3]}
    found = reported(ranks | {3: state(3, JOINED, stack=["train.py:30 in load"])}, 4).finding
    assert (found.cause, found.ranks) == (Cause.OTHER_CODE, (3,))


def test_the_report_shows_ranks_with_the_same_progress_in_one_column_and_whole_lists_shortly():
    many = tuple(range(12))
    waiting = [state(rank, JOINED, WAITS, groups={"all": many}) for rank in many[:11]]
    late = state(11, JOINED, groups={"all": many}, stack=["train.py:30 in load"])
    made = reported({one.rank: one for one in (*waiting, late)}, 12)
    assert made.finding.sentence.startswith("Rank 11 has not come to barrier at train.py:7, where ranks 0 to 10 wait.")
    head, *rows = made.text.split("\n\n")[1].splitlines()
    assert head.split() == ["step", "ranks", "0", "to", "10", "rank", "11"]
    assert [row.split()[-1] for row in rows] == ["done", "-"]
    assert type(made).read(made.write()) == made

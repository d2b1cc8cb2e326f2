"""Why ranks hang: the first difference between what they did, and the rank that it leads to. It does not import torch."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from .board import State
from .marks import Step
from .wording import by_value, capital, listed


class Cause(StrEnum):
    """What can be wrong."""

    ADDRESS = "another address or port"
    SIZE = "another world size"
    DUPLICATE = "two processes with one rank"
    NOT_STARTED = "a rank that never started"
    DIED = "a process that died"
    RAISED = "an error on one rank"
    LEFT = "a rank that ended early"
    OTHER_CODE = "a rank in other code"
    SKIPPED = "a step that one rank skipped"
    OTHER_COLLECTIVE = "another collective"
    OTHER_SIGNATURE = "a collective with another shape, dtype, operation or root"
    OTHER_ORDER = "steps in another order"
    UNKNOWN = "nothing that ranks differ in"


@dataclass(frozen=True)
class Finding:
    """The ranks that differ from the others, and what it looks like. `step` is the one that the others wait in."""

    cause: Cause
    ranks: tuple[int, ...]
    sentence: str
    step: str = ""


States = Mapping[int, State]
HOST_LOST = "has ended, and with it the store of all ranks: it was killed, called os._exit, or left its group"
KILLED = "ended without an error of Python: it was killed, or called os._exit"
FINISHED = "finished"
RAISED = "raised"
LOST = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection (was )?(likely )?(closed|refused|reset)|remote process", re.I
)
"""What backends say on ranks that have lost another one."""
LEAVING = "end"
"""The group of the step in which a rank destroys its default process group."""
GROUPS = "groups"
"""The group of steps in which all ranks create a process group; its members alone do in `groups of ...`."""


def explain(states: States, size: int) -> Finding:
    """Says why the ranks of a world of this size do not get on."""
    finding = _found(states, size)
    return replace(finding, sentence=capital(finding.sentence))


def _found(states: States, size: int) -> Finding:
    looks = (mismatch, _other_collective, _other_members, _ended, _not_started, _absent, _in_a_circle, _left_in_it)
    for look in looks:
        if finding := look(states, size):
            return finding
    steps = [step for state in states.values() if (step := state.open())]
    if not steps:
        return Finding(Cause.UNKNOWN, (), "no rank is in a step that can be seen here.")
    stuck = f"all ranks have come to {steps[0]}, and none gets on. The network or the backend is stuck, or a collective that"
    return Finding(Cause.UNKNOWN, (), f"{stuck} torch does not show here.", str(steps[0]))


def mismatch(states: States, size: int) -> Finding | None:
    """Ranks of one world that look for each other at different addresses, or expect another number of them."""
    alive = {rank: state for rank, state in states.items() if not state.ended and state.is_alive()}
    if rivals := [state for state in alive.values() if state.rivals]:
        twice = rivals[0]
        return Finding(
            Cause.DUPLICATE,
            (twice.rank,),
            f"processes {', '.join(map(str, sorted({twice.pid, *twice.rivals})))} of {twice.host} all say that they are "
            f"rank {twice.rank}. Give each process a RANK of its own.",
            "init_process_group",
        )
    addresses = {rank: state.address for rank, state in alive.items()}
    sizes = {rank: state.size for rank, state in alive.items()}
    return _other_value(
        Cause.ADDRESS,
        addresses,
        f"{by_value(addresses, 'looks for the others at', 'look for the others at')}. Give all ranks the same MASTER_ADDR "
        "and MASTER_PORT.",
    ) or _other_value(
        Cause.SIZE,
        sizes,
        f"{by_value(sizes, 'expects a world of', 'expect a world of')} ranks. Give all ranks the same WORLD_SIZE.",
    )


def _other_value[T](cause: Cause, values: Mapping[int, T], sentence: str) -> Finding | None:
    odd = _minority(values)
    return Finding(cause, odd, sentence, "init_process_group") if odd else None


def _ended(states: States, size: int) -> Finding | None:
    """The rank that ended first, if one that is still there waits for it or has ended later."""
    gone = [state for state in states.values() if state.ended or not state.is_alive()]
    gone = [state for state in gone if state.ended != FINISHED or _misses(state, states)]
    if not gone:
        return None
    first = min(gone, key=lambda state: (_is_consequence(state, gone), state.ended_at))
    waits = _awaited_by(first.rank, states)
    last = first.open() or first.last()
    where = f"; {'it was in' if last and last.ended is None else 'its last step was'} {last}" if last else ""
    others = f" {capital(_subject(waits))} for it in {_step_of(waits[0])}." if waits else ""
    if first.ended == FINISHED:
        missed = _misses(first, states)
        ended = f"rank {first.rank} has left its group or ended its program without coming to {missed}"
        return Finding(Cause.LEFT, (first.rank,), f"{ended}{where}.{others}", str(missed))
    cause = Cause.RAISED if first.ended.startswith(RAISED) else Cause.DIED
    return Finding(cause, (first.rank,), f"rank {first.rank} {first.ended or KILLED}{where}.{others}", str(last or ""))


def _is_consequence(state: State, gone: Sequence[State]) -> bool:
    """Whether a rank ended because another did: it lost the connection, or was killed after another raised an error."""
    if state.ended.startswith(RAISED):
        return bool(LOST.search(state.ended))
    errors = [one for one in gone if one.ended.startswith(RAISED) and not LOST.search(one.ended)]
    return state.ended != FINISHED and bool(errors)


def _misses(state: State, states: States) -> Step | None:
    """The last step of another rank, if this one should have come to it and did not."""
    lasts = ((other.open() or other.last(), other) for other in states.values())
    return next((step for step, other in lasts if step and _is_awaited(state, step, other)), None)


def _not_started(states: States, size: int) -> Finding | None:
    missing = tuple(rank for rank in range(size) if rank not in states)
    waits = [state for state in states.values() if state.open()]
    if not missing or not waits:
        return None
    return Finding(
        Cause.NOT_STARTED,
        missing,
        f"{listed(missing)} never came to init_process_group: the process was not started, or ended before. "
        f"{capital(_subject(waits))} in {_step_of(waits[0])}. Look into the launcher's output.",
        str(_step_of(waits[0])),
    )


def _other_collective(states: States, size: int) -> Finding | None:
    """The first step of a group that is not the same on all of its ranks."""
    steps: dict[tuple[str, int], dict[int, Step]] = {}
    for rank, state in states.items():
        for step in state.steps:
            steps.setdefault(step.key, {})[rank] = step
    for (group, number), came in sorted(steps.items(), key=lambda item: item[0][1]):
        if is_between_two(group):
            came = {rank: step for rank, step in came.items() if step.detail}
            whats = {rank: step.detail for rank, step in came.items()}
        else:
            whats = {rank: step.what for rank, step in came.items()}
        if len(set(whats.values())) < 2:
            continue
        odd = _minority(whats) or tuple(sorted(came))
        if len(odd) * 2 >= len(came):
            odd = _judged_by_all(came, states) or odd
        return _differing(came, odd, number)
    return None


def _differing(came: Mapping[int, Step], odd: Sequence[int], number: int) -> Finding:
    others = [rank for rank in came if rank not in odd] or list(came)
    usual, other = came[others[0]], came[odd[0]]
    verb = "create" if usual.group.startswith(GROUPS) else "call"
    said = by_value(came, f"{verb}s", verb)
    if usual.name == "barrier" != other.name:
        sentence = f"{listed(odd)} skipped the barrier at {usual.where} that {_subject(others)} in: {said}."
        return Finding(Cause.SKIPPED, tuple(odd), sentence, str(usual))
    if usual.group.startswith(GROUPS):
        sentence = f"ranks create different groups as their number {number}: {said}."
        return Finding(
            Cause.OTHER_ORDER, tuple(odd), f"{sentence} All ranks must create all groups in one order.", str(usual)
        )
    if usual.name != other.name:
        return Finding(
            Cause.OTHER_COLLECTIVE,
            tuple(odd),
            f"ranks of a group call different collectives as their number {number}: {said}. {capital(listed(odd))} took "
            "another path, or skipped a step.",
            str(usual),
        )
    return Finding(
        Cause.OTHER_SIGNATURE,
        tuple(odd),
        f"ranks of a group call {usual.name} differently as their number {number}: {said}. Shape, dtype, operation and "
        "root have to be the same on all ranks.",
        str(usual),
    )


def _other_members(states: States, size: int) -> Finding | None:
    """Ranks that create a group with all ranks, while others of its members create it with the members alone."""
    creates = {rank: step for rank, state in states.items() if (step := state.open()) and step.group.startswith(GROUPS)}
    with_all = {step.name for step in creates.values() if step.group == GROUPS}
    alone = {step.name for step in creates.values() if step.group != GROUPS}
    creates = {rank: step for rank, step in creates.items() if step.name in with_all & alone}
    if not creates:
        return None
    odd = _minority({rank: step.group == GROUPS for rank, step in _latest(states, GROUPS).items()})
    how = {True: "with all ranks", False: "with its members alone"}
    told = {rank: f"{how[step.group == GROUPS]} at {step.where}" for rank, step in creates.items()}
    said = by_value(told, "creates a group", "create a group")
    return Finding(
        Cause.OTHER_ORDER,
        odd,
        f"ranks create a group differently: {said}. use_local_synchronization has to be the same on all ranks.",
        str(next(iter(creates.values()))),
    )


def _latest(states: States, prefix: str) -> dict[int, Step]:
    """The last step of each rank whose group begins with this."""
    found = {rank: [step for step in state.steps if step.group.startswith(prefix)] for rank, state in states.items()}
    return {rank: steps[-1] for rank, steps in found.items() if steps}


def _absent(states: States, size: int) -> Finding | None:
    """Ranks that others wait for, and that wait for nobody."""
    waits = _waits(states)
    roots = tuple(sorted({one for ranks in waits.values() for one in ranks} - set(waits)))
    if not roots:
        return None
    first = states[roots[0]]
    waiting = [states[rank] for rank, ranks in waits.items() if set(ranks) & set(roots)]
    step = _step_of(waiting[0])
    at = f"at {first.stack[-1]}" if first.stack else "somewhere that its stack does not show"
    last = first.last()
    silent = (
        ""
        if first.answers
        else " It does not answer: native code holds Python's lock there, or the process is stopped."
    )
    return Finding(
        Cause.OTHER_CODE,
        roots,
        f"{listed(roots)} {'have' if roots[1:] else 'has'} not come to {step}, where {_subject(waiting)}. "
        f"Rank {roots[0]} is {at}; {f'its last step was {last}' if last else 'it was in no step before'}."
        f"{'' if first.answers else silent} It is slow there, stuck, or on another path.",
        str(step),
    )


def _in_a_circle(states: States, size: int) -> Finding | None:
    """Ranks that wait for each other in different steps."""
    waits = _waits(states)
    if not waits:
        return None
    keys = {rank: _step_of(states[rank]).key for rank in waits}
    most, _ = max(Counter(keys.values()).items(), key=lambda item: (item[1], len(_members(states, item[0][0]))))
    waiting = [states[rank] for rank, key in keys.items() if key == most]
    odd = tuple(sorted({one for state in waiting for one in waits[state.rank]}))
    step, other = _step_of(waiting[0]), _step_of(states[odd[0]])
    pairs = [states[rank] for rank in waits if is_between_two(_step_of(states[rank]).group)]
    if pairs:
        return _message_missed(pairs[0], states[waits[pairs[0].rank][0]])
    if step.name == "barrier":
        return Finding(
            Cause.SKIPPED,
            odd,
            f"{listed(odd)} skipped the barrier at {step.where} that {_subject(waiting)} in, and {_wait(odd)} "
            f"in {other}.",
            str(step),
        )
    return Finding(
        Cause.OTHER_ORDER,
        odd,
        f"{_subject(waiting)} in {step} for {listed(odd)}, which {_wait(odd)} in {other} for "
        f"{listed(waits[odd[0]])}. All ranks must come to the steps of their groups in one order.",
        str(step),
    )


def _message_missed(waits: State, other: State) -> Finding:
    """One rank waits for a message, and the one that it is for or from waits elsewhere, for the first in the end.

    Either may have skipped a step: the one that is in the later line of a file, or nobody knows.
    """
    step, elsewhere = _step_of(waits), _step_of(other)
    does = "sent what" if "recv" in step.name else "received what"
    missed = f"rank {other.rank} has not {does} rank {waits.rank} waits for in {step}, and waits in {elsewhere}"
    (file, line), (other_file, other_line) = (at.where.rpartition(":")[::2] for at in (step, elsewhere))
    if file != other_file:
        odd, skipped = tuple(sorted((waits.rank, other.rank))), "One of both skipped a step"
    elif int(line) < int(other_line):
        odd, skipped = (other.rank,), f"Rank {other.rank} skipped it"
    else:
        odd, skipped = (waits.rank,), f"Rank {waits.rank} skipped the step at {elsewhere.where}"
    return Finding(Cause.SKIPPED, odd, f"{missed}. {skipped}.", str(step))


def _left_in_it(states: States, size: int) -> Finding | None:
    """A rank that left right after a step that the others are still in: they lost the connection in it."""
    waits = [state for state in states.values() if state.open() and not state.ended]
    gone = [state for state in states.values() if state.ended == FINISHED or _leaves(state)]
    waits = [state for state in waits if not _leaves(state)]
    if not waits or not gone:
        return None
    first = min(gone, key=lambda state: (not _leaves(state), state.ended_at))
    step = _step_of(waits[0])
    said = f"rank {first.rank} has left its group or ended its program while {_subject(waits)} in {step}."
    return Finding(Cause.LEFT, (first.rank,), said, str(step))


def _leaves(state: State) -> bool:
    step = state.last()
    return step is not None and step.group == LEAVING


def _waits(states: States) -> dict[int, tuple[int, ...]]:
    """The ranks that each waiting rank waits for: those that have not begun its step."""
    waits = {}
    for rank, state in states.items():
        if step := state.open():
            waits[rank] = tuple(
                one for one in state.groups.get(step.group, ()) if _is_awaited(states.get(one), step, state)
            )
    return {rank: awaited for rank, awaited in waits.items() if awaited}


def _awaited_by(rank: int, states: States) -> list[State]:
    """The ranks still there that are in a step which this rank has not begun."""
    waits = _waits({one: state for one, state in states.items() if one == rank or not state.ended})
    return [states[one] for one, awaited in waits.items() if rank in awaited]


def _is_awaited(state: State | None, step: Step, other: State) -> bool:
    """Whether this rank is one of those that have to come to a step of another one, and has not begun it."""
    return (
        state is not None
        and state.rank != other.rank
        and state.rank in other.groups.get(step.group, ())
        and state.counts.get(step.group, 0) <= step.number
    )


def _members(states: States, group: str) -> Collection[int]:
    return next((state.groups[group] for state in states.values() if group in state.groups), ())


def is_between_two(group: str) -> bool:
    """Whether its steps are those of a sender and a receiver, which are called differently."""
    return ">" in group


def _judged_by_all(came: Mapping[int, Step], states: States) -> tuple[int, ...]:
    """The ranks of a small group whose step fewer ranks of the whole world have than that of the others, if any."""
    common = Counter(step.what for state in states.values() for step in state.steps)
    counts = {rank: common[step.what] for rank, step in came.items()}
    most = max(counts.values())
    return tuple(rank for rank, count in counts.items() if count < most)


def _minority[T](values: Mapping[int, T]) -> tuple[int, ...]:
    """The ranks whose value is not the most common one; of two that are as common, the one of the lowest rank counts."""
    if len(set(values.values())) < 2:
        return ()
    usual = Counter(values[rank] for rank in sorted(values)).most_common(1)[0][0]
    return tuple(rank for rank in sorted(values) if values[rank] != usual)


def _subject(waiting: Iterable[State] | Iterable[int]) -> str:
    ranks = [one if isinstance(one, int) else one.rank for one in waiting]
    return f"{listed(ranks)} {_wait(ranks)}"


def _wait(ranks: Sequence[int]) -> str:
    return "wait" if ranks[1:] else "waits"


def _step_of(state: State) -> Step:
    step = state.open()
    assert step, "it waits"
    return step

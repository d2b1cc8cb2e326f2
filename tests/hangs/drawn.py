"""Programs of several ranks that are drawn from a seed, healthy or with one mistake, and what is said of them.

Each rank runs the same list of steps in a process that was forked. A mistake changes what one rank does at one step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import init_device_mesh

from layerproof import distributed
from layerproof.distributed import doctor
from layerproof.distributed.board import free_port
from layerproof.distributed.causes import Cause, Finding
from layerproof.distributed.launcher import Attendant
from layerproof.distributed.table import Report
from layerproof.rerun import children

OTHER_PATH = (Cause.SKIPPED, Cause.OTHER_ORDER, Cause.OTHER_COLLECTIVE, Cause.OTHER_SIGNATURE, Cause.OTHER_CODE)
KINDS: dict[str, tuple[Cause, ...]] = {
    "another port": (Cause.ADDRESS,),
    "another world size": (Cause.SIZE,),
    "never started": (Cause.NOT_STARTED,),
    "the rank of another": (Cause.DUPLICATE,),
    "stuck before it joins": (Cause.OTHER_CODE,),
    "killed": (Cause.DIED,),
    "raises": (Cause.RAISED,),
    "ends early": (Cause.LEFT,),
    "groups in another order": (Cause.OTHER_ORDER,),
    "skips a group": (Cause.OTHER_ORDER, Cause.OTHER_CODE, Cause.SKIPPED),
    "creates a group with other ranks": (Cause.OTHER_ORDER,),
    "group by its members alone": (Cause.OTHER_ORDER,),
    "another collective": (Cause.OTHER_COLLECTIVE,),
    "another shape": (Cause.OTHER_SIGNATURE,),
    "another dtype": (Cause.OTHER_SIGNATURE,),
    "another root": (Cause.OTHER_SIGNATURE,),
    "skips a barrier": (Cause.SKIPPED, Cause.LEFT),
    "skips a collective": OTHER_PATH,
    "does not send": OTHER_PATH,
    "stuck in Python": (Cause.OTHER_CODE,),
    "stuck in native code": (Cause.OTHER_CODE,),
    "stopped": (Cause.OTHER_CODE,),
}
"""The mistakes, and the causes that are right for each."""
NEEDS_LAUNCHER = ("another port", "another world size", "never started", "the rank of another", "stuck before it joins")
"""Mistakes before there is a store of the ranks' own."""
CHECKED = ("another shape", "another dtype", "another root")
"""Mistakes that give wrong numbers in place of a hang, if collectives are not compared."""
FOR_EVER = 300.0


@dataclass(frozen=True)
class Op:
    """A step of a program. `group` is an index of the groups created so far; 0 is that of all ranks."""

    what: str
    group: int = 0
    size: int = 4
    root: int = 0
    seconds: float = 0.0
    members: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Program:
    """What ranks do, and the mistake that one of them makes; `kind` is empty for healthy ones."""

    seed: int
    ranks: int
    deadline: float
    by_launcher: bool
    check: bool
    ops: tuple[Op, ...]
    delays: tuple[float, ...]
    kind: str = ""
    rank: int = -1
    at: int = -1


@dataclass
class Outcome:
    """What was said of a run, and how long it took from the deadline on."""

    cause: str = ""
    ranks: list[int] = field(default_factory=list)
    sentence: str = ""
    seconds: float = 0.0
    ended: list[int | None] = field(default_factory=list)
    is_left: bool = False
    """Whether a process was left behind."""


def draw(seed: int, kind: str = "") -> Program:
    """A program from a seed, with a mistake of this kind."""
    dice = random.Random(f"{seed} {kind}")
    while True:
        program = _draw(dice, seed, kind)
        if not kind or (program := _with_mistake(program, dice, kind)):
            return program


def _draw(dice: random.Random, seed: int, kind: str) -> Program:
    ranks = dice.choice([4, 4, 4, 3, 6])
    deadline = dice.uniform(4, 7)
    groups: list[tuple[int, ...]] = [tuple(range(ranks))]
    ops: list[Op] = []
    for _ in range(dice.randint(4, 12)):
        op = _op(dice, ranks, groups)
        ops.append(op)
        groups += op.members
    is_slow = dice.random() < 0.4 and not kind
    # Together they stay below the deadline.
    delays = tuple(dice.uniform(0, 0.4) * deadline if is_slow else 0.0 for _ in range(ranks))
    by_launcher = kind in NEEDS_LAUNCHER or dice.random() < 0.5
    check = kind in CHECKED or dice.random() < 0.2
    return Program(seed, ranks, deadline, by_launcher, check, (*ops, Op("barrier")), delays)


def _are_equal(members: list[int], groups: list[tuple[int, ...]]) -> bool:
    """Whether these ranks are in equally many groups: otherwise torch hangs in new_group with use_local_synchronization."""
    return len({sum(rank in group for group in groups) for rank in members}) == 1


def _op(dice: random.Random, ranks: int, groups: list[tuple[int, ...]]) -> Op:
    group, size = dice.randrange(len(groups)), dice.choice([1, 4, 6, 64])
    root = dice.choice(groups[group])
    match dice.choice(
        ["collective"] * 5 + ["barrier"] * 3 + ["group"] * 3 + ["mesh", "send", "ring", "async", "compute"]
    ):
        case "group":
            members = sorted(dice.sample(range(ranks), dice.randint(2, ranks)))
            if dice.random() < 0.5 and ranks % 2 == 0:
                half = ranks // 2
                return Op("groups", members=(tuple(range(half)), tuple(range(half, ranks))))
            what = dice.choice(["groups", "local groups"]) if _are_equal(members, groups) else "groups"
            return Op(what, members=(tuple(members),))
        case "mesh":
            return Op("mesh", size=2 if ranks % 2 == 0 else ranks)
        case "compute":
            return Op("compute", seconds=dice.uniform(0, 0.5))
        case "send":
            return Op("send", root=dice.randrange(ranks), size=size)
        case "collective":
            names = ["all_reduce", "all_reduce", "broadcast", "all_gather", "gather", "reduce", "object", "functional"]
            return Op(dice.choice(names), group, size, root)
        case other:
            return Op(other, group, size, root)


def _with_mistake(program: Program, dice: random.Random, kind: str) -> Program | None:
    """Puts the mistake into a step of the program. Returns None if no step allows it."""
    members = _members(program)
    fitting = [at for at, op in enumerate(program.ops) if _fits(kind, op, members[at])]
    if not fitting:
        return None
    at = dice.choice(fitting)
    op = program.ops[at]
    able = members[at] if op.what in COLLECTIVES else tuple(range(program.ranks))
    rank = op.root if kind == "does not send" else dice.choice(able)
    if kind == "another root" and len(able) < 3:
        return None
    return replace(program, kind=kind, rank=rank, at=at)


COLLECTIVES = (
    "all_reduce",
    "broadcast",
    "all_gather",
    "gather",
    "reduce",
    "object",
    "functional",
    "async",
    "barrier",
    "ring",
)


def _fits(kind: str, op: Op, members: tuple[int, ...]) -> bool:
    match kind:
        case "groups in another order":
            return op.what == "groups" and len(op.members) == 2
        case "skips a group" | "creates a group with other ranks":
            return op.what == "groups" and len(op.members) == 1
        case "group by its members alone":
            return op.what == "groups" and len(op.members) == 2
        case "another collective":
            return op.what in ("all_reduce", "all_gather") and len(members) > 2
        case "another shape" | "another dtype":
            return op.what == "all_reduce" and len(members) > 2
        case "another root":
            return op.what == "broadcast"
        case "skips a barrier":
            return op.what == "barrier" and len(members) > 2
        case "skips a collective":
            return op.what in ("all_reduce", "all_gather") and len(members) > 2
        case "does not send":
            return op.what == "send"
        case _:
            return True


def _members(program: Program) -> list[tuple[int, ...]]:
    """The ranks of the group of each step."""
    groups: list[tuple[int, ...]] = [tuple(range(program.ranks))]
    found = []
    for op in program.ops:
        found.append(groups[op.group])
        groups += op.members
    return found


def run(program: Program) -> Outcome:
    """Runs the ranks of a program in processes that are forked from this one."""
    attendant = Attendant(f"{program.kind} {program.seed} {time.time()}")
    started = time.monotonic()
    outcome = Outcome()
    said: list[Report] = []
    with forked(program, _rank, attendant.variables() if program.by_launcher else {}) as ranks:
        ended_at = _attend(ranks, attendant, said, program)
        outcome.ended = [_exit_code(ranks[rank]) if rank in ranks else None for rank in range(program.ranks)]
        outcome.is_left = ended_at is None
        outcome.seconds = (ended_at or time.monotonic()) - started
    if program.by_launcher:
        said = attendant.reports() or said
    if said:
        found = said[0].finding
        outcome.cause, outcome.ranks, outcome.sentence = str(found.cause), list(found.ranks), found.sentence
    return outcome


@contextlib.contextmanager
def forked(
    program: Program, work: Callable[[Program, int, Connection], None], variables: Mapping[str, str]
) -> Iterator[dict[int, children.ForkedChild]]:
    """The ranks of a program in processes that do this work; they are killed at the end of the block."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(program.ranks), **variables}
    ranks: dict[int, children.ForkedChild] = {}
    try:
        for rank in range(program.ranks):
            if program.kind == "never started" and rank == program.rank:
                continue
            own = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(program.ranks)}
            ranks[rank] = children.start(functools.partial(_quietly, work, program, rank), own)
        yield ranks
    finally:
        for child in ranks.values():
            child.end()


def _quietly(work: Callable[[Program, int, Connection], None], program: Program, rank: int, sender: Connection) -> None:
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    work(program, rank, sender)


def _attend(
    ranks: dict[int, children.ForkedChild], attendant: Attendant, said: list[Report], program: Program
) -> float | None:
    """Waits until all ranks have ended. Returns when they had, or None if they did not."""
    end = time.monotonic() + program.deadline * 3 + 60
    while time.monotonic() < end:
        attendant.look()
        for child in ranks.values():
            with contextlib.suppress(EOFError, OSError):
                while child.messages.poll():
                    said.append(Report.read(child.messages.recv()))
        if not any(child.process.is_alive() for child in ranks.values()):
            return time.monotonic()
        time.sleep(0.05)
    return None


def _exit_code(child: children.ForkedChild) -> int | None:
    return None if child.process.is_alive() else child.process.exitcode


def _rank(program: Program, rank: int, sender: Connection) -> None:
    """What one rank does, in its process."""
    kept = doctor.reported

    def reported(*arguments: object) -> Report:
        made = kept(*arguments)
        if not program.by_launcher:
            sender.send(made.write())
        return made

    doctor.reported = reported
    mine = program.kind if rank == program.rank else ""
    make_early_mistake(mine, program, rank)
    distributed.watch(timedelta(seconds=program.deadline), program.check)
    time.sleep(program.delays[rank])
    if mine == "stuck before it joins":
        _stuck(FOR_EVER)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=max(60, 3 * program.deadline)))
        if program.check and program.seed % 2 and not program.kind:  # it is set up a second time
            store = distributed_c10d.PrefixStore("again", distributed_c10d._get_default_store())
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=program.ranks)
        run_steps(program, rank, mine)
        dist.destroy_process_group()
        distributed.ended()
    except Exception as error:
        distributed.ended(error)
        if "is not the same on all ranks" in str(error) and not program.by_launcher:
            time.sleep(0.5)
            sender.send(_from_error(error).write())
        sys.stdout.flush()
        os._exit(1)


def make_early_mistake(mine: str, program: Program, rank: int) -> None:
    """Changes the environment of a rank whose mistake is there."""
    if mine == "another port":
        os.environ["MASTER_PORT"] = str(free_port())
    if mine == "another world size":
        os.environ["WORLD_SIZE"] = str(program.ranks + 1)
    if mine == "the rank of another":
        os.environ["RANK"] = str((rank + 1) % program.ranks)


def _from_error(error: Exception) -> Report:
    """What the error of the ledger says: the ranks that are fewer than the others, and whether it is of a group."""
    text = str(error)
    parts = text.partition("ranks: ")[2].partition(". All ranks")[0].split("; ")
    named = [
        [int(word) for word in part.partition(" c")[0].replace(",", "").split() if word.isdigit()] for part in parts
    ]
    most = max(named, key=len)
    cause = Cause.OTHER_ORDER if ": group " in text else Cause.OTHER_SIGNATURE
    if cause is Cause.OTHER_SIGNATURE:
        called = {part.partition("(")[0].split()[-1].partition("(")[0] for part in parts}
        cause = Cause.OTHER_COLLECTIVE if len(called) > 1 else cause
        cause = Cause.SKIPPED if any(" barrier at" in part for part in parts) else cause
    return Report(Finding(cause, tuple(sorted(set().union(*map(set, named)) - set(most))), text), text)


def _stuck(seconds: float) -> None:
    time.sleep(seconds)


def run_steps(program: Program, rank: int, mine: str) -> None:
    groups: list[object] = [None]
    members: list[tuple[int, ...]] = [tuple(range(program.ranks))]
    for at, op in enumerate(program.ops):
        mistake = mine if at == program.at else ""
        match mistake:
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raises":
                raise ValueError("no weights for me")
            case "ends early":
                return
            case "stuck in Python":
                _stuck(FOR_EVER)
            case "stuck in native code":
                ctypes.PyDLL(None).sleep(int(FOR_EVER))
            case "stopped":
                os.kill(os.getpid(), signal.SIGSTOP)
        if op.members or op.what == "mesh":
            _create(at, op, rank, mistake, program, groups, members)
        else:
            _do(at, op, rank, mistake, groups[op.group], members[op.group], program.ranks)


def _create(at: int, op: Op, rank: int, mistake: str, program: Program, groups: list, members: list) -> None:
    here = {"dist": dist, "init_device_mesh": init_device_mesh, "made": {}}
    if op.what == "mesh":
        here["shape"] = (program.ranks // op.size, op.size)
        _at_line(at, "init_device_mesh('cpu', shape, mesh_dim_names=('dp', 'tp'))", here)
        return
    wanted = list(op.members)
    is_local = op.what == "local groups"
    everyone_alone = program.kind == "group by its members alone" and at == program.at
    for one in wanted[::-1] if mistake == "groups in another order" else wanted:
        if mistake == "skips a group" or (rank not in one and (everyone_alone or is_local)):
            continue
        ranks = list(one)
        if mistake == "creates a group with other ranks":
            ranks = [other for other in range(program.ranks) if other != one[0]]
        here |= {"one": one, "ranks": ranks, "local": is_local}
        _at_line(at, "made[one] = dist.new_group(ranks, use_local_synchronization=local)", here)
    made = here["made"]
    groups += [made.get(one) for one in wanted]
    members += wanted


def _do(at: int, op: Op, rank: int, mistake: str, group: object, members: tuple[int, ...], size: int) -> None:
    """One step of one rank; a rank that is no member of its group goes on."""
    if op.what == "compute":
        time.sleep(op.seconds)
        return
    tensor = torch.ones(op.size)
    here = {
        "dist": dist,
        "tensor": tensor,
        "group": group,
        "members": members,
        "rank": rank,
        "root": op.root,
        "size": size,
    }
    if op.what == "send":
        if rank == op.root and mistake != "does not send":
            _at_line(at, "dist.send(tensor, (root + 1) % size)", here)
        if rank == (op.root + 1) % size:
            _at_line(at, "dist.recv(tensor, root)", here)
        return
    if rank not in members or mistake in ("skips a barrier", "skips a collective"):
        return
    what = op.what
    match mistake:
        case "another shape":
            here["tensor"] = torch.ones(op.size + 3)
        case "another dtype":
            here["tensor"] = tensor.double()
        case "another root":
            here["root"] = members[(members.index(op.root) + 1) % len(members)]
        case "another collective":
            what = "broadcast"
    _at_line(at, CALLS[what], here)


def _at_line(at: int, source: str, names: dict[str, object]) -> None:
    """Runs a step as if it were in a line of its own in a file of the program, as those of people are."""
    exec(compile("\n" * at + source, "drawn.py", "exec"), names | {"__name__": "drawn"})


CALLS = {
    "all_reduce": "dist.all_reduce(tensor, group=group)",
    "broadcast": "dist.broadcast(tensor, root, group=group)",
    "reduce": "dist.reduce(tensor, root, group=group)",
    "barrier": "dist.barrier(group=group)",
    "all_gather": "dist.all_gather([tensor.clone() for _ in members], tensor, group=group)",
    "gather": "dist.gather(tensor, [tensor.clone() for _ in members] if rank == root else None, root, group=group)",
    "object": "dist.all_gather_object([None] * len(members), {'rank': rank}, group=group)",
    "functional": "import torch.distributed._functional_collectives as functional; "
    "functional.all_reduce(tensor, 'sum', group or dist.group.WORLD).sum()",
    "async": "dist.all_reduce(tensor, group=group, async_op=True).wait()",
    "ring": "at = members.index(rank); after, before = members[(at + 1) % len(members)], members[at - 1]; "
    "ops = [dist.P2POp(dist.isend, tensor, after, group), dist.P2POp(dist.irecv, tensor.clone(), before, group)]; "
    "[work.wait() for work in dist.batch_isend_irecv(ops)]",
}


def is_right(program: Program, outcome: Outcome) -> tuple[bool, bool]:
    """Whether the rank and the cause are right."""
    named = (program.rank + 1) % program.ranks if program.kind == "the rank of another" else program.rank
    wanted = [named]
    if program.kind == "group by its members alone":  # every rank does, so no rank is more to blame than another
        return bool(outcome.ranks), outcome.cause in KINDS[program.kind]
    return outcome.ranks == wanted, outcome.cause in KINDS[program.kind]

"""Watches torch.distributed: replaces its functions by ones that leave marks, and that agree before they create groups."""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing import util
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d
from torch.distributed.distributed_c10d import Work

from . import ADDRESS, CHECK, DEADLINE, board, flight
from .causes import FINISHED, GROUPS, LEAVING
from .collectives import ALIKE, BETWEEN_TWO, call_of
from .doctor import Doctor, raised
from .ledger import COLLECTIVE, LOCAL_GROUP, Entry, Ledger, group_entry, mesh_entry
from .marks import Step, record

BEFORE = 0.9
"""Part of torch's timeout after which ranks are ended: torch would end them one by one, without a word of the others."""

Enter = Callable[..., AbstractContextManager[Step | None]]


@dataclass
class _Watched:
    """What this process is watched with."""

    deadline: timedelta | None = None
    check_collectives: bool = False
    doctor: Doctor | None = None
    originals: tuple[tuple[Callable, Callable], ...] = ()
    hooked: int = 0
    """The process that posts how it ends."""


_watched = _Watched()
_inside = threading.local()
"""Whether this thread is in a function of torch, which calls others in turn."""
_works: weakref.WeakKeyDictionary[Any, Step] = weakref.WeakKeyDictionary()
"""The steps that were begun without waiting for their end."""
_current: list[tuple[weakref.ref, Ledger]] = []
"""The default group of this process and its ledger, as long as the group is there: a store that is kept keeps its port."""


def watch(deadline: timedelta | None = None, check_collectives: bool = False) -> None:
    """Watches the process groups of this process from now on; idempotent.

    Call it in every rank, before `init_process_group` if you can. All ranks then agree on every group and mesh before torch
    creates it, and a rank that has been in one step of torch.distributed for longer than `deadline` ends them all with a
    report that says why. With `check_collectives` they agree before each collective, too. The variables DEADLINE and CHECK
    do the same; without either, the deadline is nine tenths of the timeout of `init_process_group`.

    It needs no other change: the functions are replaced in torch and in all modules that have imported them. A mesh and the
    groups that it makes inside are one entry. With `use_local_synchronization` the members alone agree.
    """
    # torch_xla has a new_group of its own in torch.distributed, which calls the one of distributed_c10d.
    if hasattr(distributed_c10d.new_group, "_watched"):
        return
    flight.switch_on()
    seconds = os.environ.get(DEADLINE)
    _watched.deadline = deadline or (timedelta(seconds=float(seconds)) if seconds else None)
    _watched.check_collectives = check_collectives or CHECK in os.environ
    enters: dict[Callable, Enter] = {
        distributed_c10d.init_process_group: _initialising,
        distributed_c10d.destroy_process_group: _destroying,
        distributed_c10d.new_group: functools.partial(_creating, group_entry),
        device_mesh.init_device_mesh: functools.partial(_creating, mesh_entry),
    }
    for name in (*ALIKE, *BETWEEN_TWO):
        function = getattr(distributed_c10d, name)
        enters[function] = functools.partial(_calling, function)
    pairs = tuple((function, _with_marks(function, enter)) for function, enter in enters.items())
    _replace(pairs)
    waits = (Work.wait, _with_wait(Work.wait))
    Work.wait = waits[1]
    _watched.originals = (*pairs, waits)
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            _start(dist.get_rank(), dist.get_world_size(), _deadline())
    elif "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _start_early()


def unwatch() -> None:
    """Takes back what `watch` replaced."""
    if not _watched.originals:
        return
    *pairs, (wait, _) = _watched.originals
    _replace([(new, old) for old, new in pairs])
    Work.wait = wait
    _watched.originals = ()
    _stop()


def progress() -> None:
    """Says that this rank is getting on, in a compiler for one: the others' deadline begins anew."""
    if _watched.doctor:
        with contextlib.suppress(dist.DistError):
            _watched.doctor.board.report_progress()


def ended(error: BaseException | None) -> None:
    """Says that this rank has ended, with an error or without one."""
    if _watched.doctor:
        _watched.doctor.end(raised(error) if error else FINISHED)


def rests(is_so: bool) -> None:
    """Says that this rank has done what it was asked for, or that it goes on."""
    if _watched.doctor:
        _watched.doctor.rest(is_so)


def _replace(pairs: Any) -> None:
    """Puts the second function of each pair in the place of the first, in all modules that have it."""
    new = {id(old): (old, replacement) for old, replacement in pairs}
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            found = new.get(id(value))
            if found and found[0] is value and value is not None:
                setattr(module, name, found[1])


def _with_marks(function: Callable, enter: Enter) -> Callable:
    """A function of torch, which leaves marks when it is called from outside torch."""

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or getattr(_inside, "torch", False):
            return function(*args, **kwargs)
        # The words of a step are made of them, too, and an iterator can be read only once.
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        kwargs = {name: list(one) if isinstance(one, Iterator) else one for name, one in kwargs.items()}
        with enter(*args, **kwargs) as step:
            with _in_torch():
                result = function(*args, **kwargs)
            if step and isinstance(result, Work):
                _works[result] = step
            return result

    cast("Any", marked)._watched = function
    return marked


def _with_wait(function: Callable) -> Callable:
    @functools.wraps(function)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        step = None if getattr(_inside, "torch", False) else _works.get(work)
        with record.again(step) if step else contextlib.nullcontext():
            return function(work, *args, **kwargs)

    return wait


@contextlib.contextmanager
def _in_torch() -> Iterator[None]:
    _inside.torch = True
    try:
        yield
    finally:
        _inside.torch = False


@contextlib.contextmanager
def _initialising(*args: Any, **kwargs: Any) -> Iterator[None]:
    bound = inspect.signature(distributed_c10d.init_process_group).bind(*args, **kwargs)
    bound.apply_defaults()
    values = bound.arguments
    rank = values["rank"] if values["rank"] >= 0 else int(os.environ.get("RANK", 0))
    size = values["world_size"] if values["world_size"] > 0 else int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield
        return
    if _watched.doctor:
        _watched.doctor.state = replace(_watched.doctor.state, rank=rank, size=size, address=board.address())
        _watched.doctor.deadline = _deadline(values["timeout"])
    elif store := _side_store():
        _start(rank, size, _deadline(values["timeout"]), store)
    with record.step("init_process_group", "init", range(size)):
        if _watched.doctor:
            _watched.doctor.check()
        yield
    if _watched.doctor:
        _watched.doctor.post()
    else:
        _start(rank, size, _deadline(values["timeout"]))


@contextlib.contextmanager
def _destroying(group: Any = None) -> Iterator[None]:
    if _watched.doctor and not _watched.doctor.is_hosted and group in (None, distributed_c10d.GroupMember.WORLD):
        _watched.doctor.end(FINISHED)  # the store goes with the group
        _watched.doctor = None
    with record.step("destroy_process_group", LEAVING, ()):
        yield


@contextlib.contextmanager
def _creating(entry_of: Callable, *args: Any, **kwargs: Any) -> Iterator[None]:
    if not dist.is_initialized() and entry_of is mesh_entry:
        dist.init_process_group()  # as the function itself would
    what, members = entry_of(*args, **kwargs)
    ledger = _ledger()
    if members is not None and ledger.rank not in members:
        yield
        return
    page = GROUPS if members is None else f"{GROUPS} of {','.join(map(str, sorted(members)))}"
    with record.step(what, page, range(ledger.size) if members is None else members) as step:
        if members is None:
            ledger.agree(Entry(step.what, step.where))
        else:
            own = f"as a member of {len(distributed_c10d._world.pg_names)} groups"
            ledger.agree(Entry(f"{step.what} {own}", step.where), members, LOCAL_GROUP)
        yield
    if _watched.doctor:
        _watched.doctor.post()


@contextlib.contextmanager
def _calling(function: Callable, *args: Any, **kwargs: Any) -> Iterator[Step | None]:
    call = call_of(function, *args, **kwargs) if dist.is_initialized() else None
    if call is None:
        yield None
        return
    with record.step(function.__name__, call.group, call.members, call.detail) as step:
        if _watched.check_collectives and function.__name__ in ALIKE:
            _ledger().agree(Entry(step.what, step.where), call.members, COLLECTIVE, call.group)
        yield step


def _ledger() -> Ledger:
    """The ledger of the default group; a new one after the group was destroyed and created again."""
    default = distributed_c10d._get_default_group()
    if not _current:
        store = distributed_c10d.PrefixStore("layerproof/ledger", distributed_c10d._get_default_store())
        ledger = Ledger(store, dist.get_rank(), dist.get_world_size())
        _current.append((weakref.ref(default, lambda _: _current.clear()), ledger))
    return _current[0][1]


def _start_early() -> None:
    """Joins the launcher's board before the group is there: a rank that never comes to it can be asked where it is."""
    rank, size, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), board.known_world()
    store = _side_store() if size > 1 and world else None
    # A process that the rank starts has its variables, too: a worker that loads data, say.
    if store and rank not in board.Board(store, world).states():
        _start(rank, size, _deadline(), store)


def _deadline(timeout: timedelta | None = None) -> timedelta:
    return _watched.deadline or (timeout or distributed_c10d.default_pg_timeout) * BEFORE


def _side_store() -> Any:
    """The store that the launcher hosts, or None: that of one of several hosts does not hear of all ranks."""
    local, size = os.environ.get("LOCAL_WORLD_SIZE"), os.environ.get("WORLD_SIZE")
    if ADDRESS not in os.environ or (local != size and local is not None and board.WORLD not in os.environ):
        return None
    return board.connect(os.environ[ADDRESS])


def _start(rank: int, size: int, deadline: timedelta, side_store: Any = None) -> None:
    """Starts the doctor of this rank, with a board in the launcher's store if there is one."""
    if side_store := side_store or _side_store():
        where = board.Board(side_store, board.known_world() or board.address())
    else:  # by a connection of its own: that of the group may be waiting
        store: Any = distributed_c10d._get_default_store()
        where = board.Board(distributed_c10d.PrefixStore("layerproof/board", store.clone()), "world")
    doctor = Doctor(where, board.State(rank, size, board.address()), deadline, is_hosted=side_store is not None)
    doctor.start()
    _watched.doctor = doctor
    _post_the_end()


def _post_the_end() -> None:
    """Has this process post how it ends, whichever doctor it has then."""
    if _watched.hooked == os.getpid():
        return
    _watched.hooked, behind = os.getpid(), sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        ended(error)
        behind(kind, error, trace)

    sys.excepthook = hook
    atexit.register(ended, None)
    util.Finalize(None, _ended_as_child, exitpriority=0)


def _ended_as_child() -> None:
    """A child of multiprocessing runs neither atexit nor the hook for exceptions, but this, while its error is under way."""
    error = sys.exception()
    is_orderly = isinstance(error, SystemExit) and not error.code
    ended(None if is_orderly else error)


def _stop() -> None:
    if _watched.doctor:
        _watched.doctor.stop()
        _watched.doctor = None


def _after_fork() -> None:
    """A child has no thread that looks, and is no rank yet."""
    _watched.doctor = None
    _current.clear()


os.register_at_fork(after_in_child=_after_fork)

"""The ledger: before a process group is created, every rank writes down which one, and compares it with the others.

torch connects groups by a counter of each process, not by their members. So ranks that create groups in another order are
connected crosswise: their sums are wrong, often without an error, or they wait for ever. A rank that skips a group does that
to all others, and `new_group` does not inherit the timeout of `init_process_group`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d

from .errors import DistributedError

GOODBYE = timedelta(seconds=5)
"""How long the rank that hosts the store waits, before it raises, for others to read what went wrong."""


@dataclass(frozen=True)
class Entry:
    """What one rank is about to create, as it is written in code, and the line that does."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


@dataclass
class Ledger:
    """The entries of one rank of a world, and how many it has made with the same members."""

    store: Any  # a torch.distributed.Store, whose stubs lack half of its methods
    rank: int
    size: int
    deadline: timedelta
    pages: Counter[str] = field(default_factory=Counter)

    def agree(self, entry: Entry, members: Sequence[int] | None = None) -> None:
        """Writes down what this rank is about to create, and waits until all members (None: all ranks) have agreed.

        Raises:
            DistributedError: on all ranks that came, if one creates something else, or does not come until the deadline.
        """
        ranks = sorted(members) if members is not None else list(range(self.size))
        page = "all" if members is None else ",".join(map(str, ranks))
        number = self.pages[page]
        self.pages[page] += 1
        keys = {rank: f"{page}/{number}/{rank}" for rank in ranks}
        self.store.set(f"last/{self.rank}", str(entry))
        self.store.set(keys[self.rank], json.dumps([entry.what, entry.where]))
        try:
            self.store.wait(list(keys.values()), self.deadline)
        except dist.DistStoreError:
            here = [rank for rank in ranks if self.store.check([keys[rank]])]
            if away := [rank for rank in ranks if rank not in here]:
                raise self._differ(page, number, here, self._are_missing(entry, number, away)) from None
        entries = [Entry(*json.loads(one)) for one in self.store.multi_get(list(keys.values()))]
        if len({one.what for one in entries}) > 1:
            raise self._differ(page, number, ranks, _different(number, dict(zip(ranks, entries, strict=True))))

    def _are_missing(self, entry: Entry, number: int, away: Sequence[int]) -> str:
        came = [rank for rank in away if self.store.check([f"last/{rank}"])]
        last = [f"the last of rank {rank} is {self.store.get(f'last/{rank}').decode()}" for rank in came]
        last += [f"{_listed(never)} created none"] if (never := [rank for rank in away if rank not in came]) else []
        return (
            f"{_listed(away)} did not come to group {number}, {entry}, within {self.deadline.total_seconds():g} s; "
            f"{'; '.join(last)}. Every rank must create every group, also those that it is no member of."
        )

    def _differ(self, page: str, number: int, here: Iterable[int], message: str) -> DistributedError:
        """The error, once the others that are here have read the store: it ends with the rank that hosts it."""
        self.store.set(f"{page}/{number}/{self.rank}/told", "")
        if self.rank == 0:
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"{page}/{number}/{rank}/told" for rank in here], GOODBYE)
        return DistributedError(f"rank {self.rank}: {message}")


def _different(number: int, entries: dict[int, Entry]) -> str:
    """Says which ranks create what, those with the same words together."""
    by_words: dict[str, list[int]] = {}
    for rank, entry in entries.items():
        by_words.setdefault(str(entry), []).append(rank)
    told = [f"{_listed(ranks)} {'create' if ranks[1:] else 'creates'} {words}" for words, ranks in by_words.items()]
    return f"group {number} is not the same on all ranks: {'; '.join(told)}. All ranks must create all groups in one order."


def _listed(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0, 1 and 2`."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


_inside = threading.local()
"""Whether this thread is creating a group or a mesh, which creates others in turn."""
_current: list[tuple[weakref.ref, Ledger]] = []
"""The default group of this process and its ledger, as long as the group is there: a store that is kept keeps its port."""


def watch(deadline: timedelta = distributed_c10d.default_pg_timeout) -> None:
    """Has all ranks agree, from now on, on every group and mesh before torch creates it; idempotent.

    Call it in every rank, before or after `init_process_group`. `deadline` is how long ranks may be apart when they create a
    group, by default torch's own half an hour: a rank may compile before it does. It needs no other change: `new_group` and
    `init_device_mesh` are replaced in torch and in all modules that have imported them. A mesh and the groups that it makes
    inside are one entry. With `use_local_synchronization` the members alone agree. An entry takes a few operations of the
    store.
    """
    # torch_xla has a new_group of its own in torch.distributed, which calls the one of distributed_c10d.
    if hasattr(distributed_c10d.new_group, "_watched"):
        return
    _replace(distributed_c10d.new_group, _watched(distributed_c10d.new_group, deadline, _group_entry))
    _replace(device_mesh.init_device_mesh, _watched(device_mesh.init_device_mesh, deadline, _mesh_entry))


def unwatch() -> None:
    """Takes back what `watch` replaced."""
    for watched in (distributed_c10d.new_group, device_mesh.init_device_mesh):
        if original := getattr(watched, "_watched", None):
            _replace(watched, original)


def _replace(old: Callable, new: Callable) -> None:
    for module in list(sys.modules.values()):
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                setattr(module, name, new)


def _watched(create: Callable, deadline: timedelta, entry_of: Callable) -> Callable:
    """torch's function to create groups, called once all ranks have agreed."""

    @functools.wraps(create)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "creating", False):
            return create(*args, **kwargs)
        # The words of an entry are made of them, too, and an iterator can be read only once.
        args = tuple(list(one) if isinstance(one, Iterator) else one for one in args)
        kwargs = {name: list(one) if isinstance(one, Iterator) else one for name, one in kwargs.items()}
        if not dist.is_initialized() and entry_of is _mesh_entry:
            dist.init_process_group()  # as the function itself would
        what, members = entry_of(*args, **kwargs)
        ledger = _ledger(deadline)
        if members is None or ledger.rank in members:
            ledger.agree(Entry(what, _caller()), members)
        with _creating():
            return create(*args, **kwargs)

    cast("Any", agreed)._watched = create
    return agreed


@contextlib.contextmanager
def _creating() -> Iterator[None]:
    _inside.creating = True
    try:
        yield
    finally:
        _inside.creating = False


def _group_entry(
    ranks: Iterable[int] | None = None,
    timeout: Any = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    *others: Any,
    **named: Any,
) -> tuple[str, list[int] | None]:
    """The words of a call of `new_group`, and the ranks that have to agree; None for all."""
    members = None if ranks is None else list(ranks)
    listed = [*([] if members is None else [str(members)]), *([f"backend={backend!r}"] if backend else [])]
    return f"new_group({', '.join(listed)})", members if use_local_synchronization else None


def _mesh_entry(
    device_type: str, mesh_shape: Iterable[int], *, mesh_dim_names: Iterable[str] | None = None, **named: Any
) -> tuple[str, None]:
    """The words of a call of `init_device_mesh`, to which all ranks have to come."""
    names = f", {tuple(mesh_dim_names)}" if mesh_dim_names else ""
    return f"init_device_mesh({device_type!r}, {tuple(mesh_shape)}{names})", None


def _caller() -> str:
    """The line outside torch and this file that creates a group."""
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_filename == __file__ or _is_torchs(frame.f_globals.get("__name__", ""))):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "an unknown line"


def _is_torchs(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "torch_xla")


def _ledger(deadline: timedelta) -> Ledger:
    """The ledger of the default group; a new one after the group was destroyed and created again."""
    default = distributed_c10d._get_default_group()
    if not _current:
        store = distributed_c10d.PrefixStore("layerproof/ledger", distributed_c10d._get_default_store())
        ledger = Ledger(store, dist.get_rank(), dist.get_world_size(), deadline)
        _current.append((weakref.ref(default, lambda _: _current.clear()), ledger))
    return _current[0][1]

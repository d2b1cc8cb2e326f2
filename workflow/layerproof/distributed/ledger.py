"""The ledger: before a process group is created, every rank writes down which one, and compares it with the others.

torch connects groups by a counter of each process, not by their members. So ranks that create groups in another order are
connected crosswise: their sums are wrong, often without an error, or they wait for ever. A collective with another shape or
dtype on one rank may give wrong sums, too.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .errors import DistributedError
from .wording import by_value

FOR_EVER = timedelta(days=365)
"""How long a rank waits for the others: the doctor ends it before."""
GOODBYE = timedelta(seconds=5)
"""How long the rank that hosts the store waits, before it raises, for others to read what went wrong."""


@dataclass(frozen=True)
class Entry:
    """What one rank is about to do, as it is written in code, and the line that does."""

    what: str
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


@dataclass(frozen=True)
class Kind:
    """Words for what ranks agree on."""

    noun: str
    one: str
    several: str
    remedy: str


GROUP = Kind("group", "creates", "create", "All ranks must create all groups in one order.")
LOCAL_GROUP = replace(
    GROUP,
    remedy="torch names a group with use_local_synchronization by the number of groups that a rank is in, so all of its "
    "members have to be in equally many before.",
)
COLLECTIVE = Kind(
    "collective",
    "calls",
    "call",
    "All ranks of a group must call its collectives in one order, with the same shapes, dtypes, operations and roots.",
)


@dataclass
class Ledger:
    """The entries of one rank of a world, and how many it has made on each page."""

    store: Any  # a torch.distributed.Store, whose stubs lack half of its methods
    rank: int
    size: int
    pages: Counter[str] = field(default_factory=Counter)

    def agree(self, entry: Entry, members: Sequence[int] | None = None, kind: Kind = GROUP, page: str = "") -> None:
        """Writes down what this rank is about to do, and waits until all members (None: all ranks) have agreed.

        Entries of different pages are counted apart; without a name, a page is that of its members.

        Raises:
            DistributedError: on all members, if one is about to do something else.
        """
        ranks = sorted(members) if members is not None else list(range(self.size))
        page = f"{kind.noun} {page or ('all' if members is None else ','.join(map(str, ranks)))}"
        number = self.pages[page]
        self.pages[page] += 1
        keys = {rank: f"{page}/{number}/{rank}" for rank in ranks}
        self.store.set(keys[self.rank], json.dumps([entry.what, entry.where]))
        self.store.wait(list(keys.values()), FOR_EVER)
        entries = [Entry(*json.loads(one)) for one in self.store.multi_get(list(keys.values()))]
        if len({one.what for one in entries}) > 1:
            told = by_value(dict(zip(ranks, entries, strict=True)), kind.one, kind.several)
            message = f"{kind.noun} {number} is not the same on all ranks: {told}. {kind.remedy}"
            raise self._differ(f"{page}/{number}", ranks, message)
        if number > 0:  # all members have read the entry before, or they would not be here
            self.store.delete_key(f"{page}/{number - 1}/{self.rank}")

    def _differ(self, key: str, ranks: Iterable[int], message: str) -> DistributedError:
        """The error, once the others have read the store: it ends with the rank that hosts it."""
        self.store.set(f"{key}/{self.rank}/read", "")
        if self.rank == 0:
            with contextlib.suppress(dist.DistStoreError):
                self.store.wait([f"{key}/{rank}/read" for rank in ranks], GOODBYE)
        return DistributedError(f"rank {self.rank}: {message}")


def group_entry(
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


def mesh_entry(
    device_type: str, mesh_shape: Iterable[int], *, mesh_dim_names: Iterable[str] | None = None, **named: Any
) -> tuple[str, None]:
    """The words of a call of `init_device_mesh`, to which all ranks have to come."""
    names = f", {tuple(mesh_dim_names)}" if mesh_dim_names else ""
    return f"init_device_mesh({device_type!r}, {tuple(mesh_shape)}{names})", None

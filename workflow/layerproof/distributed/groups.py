"""What ranks call a process group: by its members, because torch's own names are counters of each process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def members_of(group: Any = None) -> tuple[int, ...]:
    """The ranks of a group, of the default one for None; none if this rank is no member."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or not dist.is_initialized():
        return ()
    return tuple(dist.get_process_group_ranks(group or distributed_c10d._get_default_group()))


def name_of(group: Any, members: Sequence[int]) -> str:
    """The same text on all ranks of a group: its ranks, and which of the groups with these ranks it is."""
    group = group or distributed_c10d._get_default_group()
    if group not in _names:
        groups = [one for one in distributed_c10d._world.pg_map if set(members_of(one)) == set(members)]
        number = groups.index(group) if group in groups else 0
        _names[group] = f"{','.join(map(str, members))}{f'#{number + 1}' if number else ''}"
    return _names[group]

"""What ranks call a process group: by its members, because torch's own names are counters of each process."""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

_known: weakref.WeakKeyDictionary[Any, tuple[str, tuple[int, ...]]] = weakref.WeakKeyDictionary()


def named(group: Any = None) -> tuple[str, tuple[int, ...]]:
    """The name of a group, the same text on all of its ranks, and its ranks. None is the default group.

    The name lists the ranks, with a number if earlier groups have the same. Both are empty if this rank is no member.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        return "", ()
    group = group or distributed_c10d._get_default_group()
    if group not in _known:
        members = _members(group)
        alike = [one for one in distributed_c10d._world.pg_map if set(_members(one)) == set(members)]
        number = alike.index(group) if group in alike else 0
        _known[group] = f"{','.join(map(str, members))}{f'#{number + 1}' if number else ''}", members
    return _known[group]


def _members(group: Any) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))

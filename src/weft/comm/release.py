"""Letting go of waits in groups that can never finish: a rank has failed, and whoever supervises the ranks says so."""

from __future__ import annotations

from contextlib import suppress

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from weft.comm.device import runs_on_gloo
from weft.comm.shared_memory import shared_memory_group
from weft.comm.watched_group import WatchedGroup, close_connections


def release_groups(lost: int, released: set[str]) -> None:
    """End all waits of this process in its groups, in whatever thread, with an error there; ranks that wait for this
    one in them are released, too.  Not collective; from any thread.

    A group over shared memory to which the rank `lost` belongs sees by itself within a second that its process is gone,
    and names it: there only what goes by messages is let go.  `released` holds the names of the groups that this has
    been done for, and is added to.
    """
    world = distributed_c10d._world  # pyright: ignore[reportPrivateUsage]  # the only list of all groups
    for group in list(world.pg_map):
        name = group.group_name
        if name in released:
            continue
        released.add(name)
        with suppress(RuntimeError, ValueError):  # it is being left at this moment: nobody waits there
            _release(group, lost)


def _release(group: dist.ProcessGroup, lost: int) -> None:
    shared = shared_memory_group(group)
    if shared is not None and lost in shared.ranks:
        close_connections(shared.plain)
    elif not isinstance(group, WatchedGroup) and runs_on_gloo(torch.device("cpu"), group):
        close_connections(group)
    else:
        group.abort()

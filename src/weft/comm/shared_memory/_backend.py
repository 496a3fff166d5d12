"""Making the backend known to torch, without loading what it is made of."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch.distributed as dist

from weft.comm.watched_group import WatchedGroup

if TYPE_CHECKING:
    from weft.comm.shared_memory.group import SharedMemoryGroup

BACKEND = "weft"


def register_shared_memory_backend(*, use_engine: bool = True, warns_of_hosts: bool = True) -> None:
    """Let `init_process_group("cpu:weft")` and `new_group(backend="weft")` work in this process.

    No collective; on every rank before such a group is made.  Twice is as good as once.  `use_engine=False`: as if the
    C++ engine had not been built.

    A group whose ranks cannot share memory (they are on several hosts, or in containers of their own, or the engine is
    not built on one of them) is plain Gloo.  That is settled by all ranks alike, and said once, on rank 0; that ranks
    are on several hosts only if it `warns_of_hosts`.
    """
    create = partial(_create, use_engine=use_engine, warns_of_hosts=warns_of_hosts)
    if BACKEND in dist.Backend.backend_list:
        # torch refuses a second registration; the last one given is to hold.
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, True)  # pyright: ignore[reportPrivateUsage]
        return
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def _create(options: Any, _: object, *, use_engine: bool, warns_of_hosts: bool) -> Any:
    """What torch calls on every rank of a new group."""
    from weft.comm.shared_memory.forming import create_group

    return create_group(options, use_engine=use_engine, warns_of_hosts=warns_of_hosts)


def shared_memory_group(group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
    """The group as one over shared memory; None where something else carries it."""
    return cast("SharedMemoryGroup", group) if isinstance(group, WatchedGroup) and group.shares_memory else None

"""Making the backend known to torch, and making its groups."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm._watched_group import WatchedGroup, gloo_backend
from weft.comm.shared_memory._call import Transport
from weft.comm.shared_memory._group import SharedMemoryGroup
from weft.comm.shared_memory._meeting import Meeting

BACKEND = "weft"


def register_shared_memory_backend(*, use_engine: bool = True, speaks_of_hosts: bool = True) -> None:
    """Let `init_process_group("cpu:weft")` and `new_group(backend="weft")` work in this process.

    No collective; on every rank before such a group is made.  Twice is as good as once.  `use_engine=False`: as if the
    C++ engine had not been built.

    A group whose ranks cannot share memory (they are on several hosts, or in containers of their own) is plain Gloo.
    Which of the three it became, the engine, pure Python or Gloo, is settled by all ranks alike; what is slower than it
    could be is said once, on rank 0; that ranks are on several hosts only if it `speaks_of_hosts`.
    """
    create = partial(_create, use_engine=use_engine, speaks_of_hosts=speaks_of_hosts)
    if BACKEND in dist.Backend.backend_list:
        # torch refuses a second registration; the last one given is to hold.
        dist.Backend._plugins[BACKEND.upper()] = dist.Backend._BackendPlugin(create, True)  # pyright: ignore[reportPrivateUsage]
        return
    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu"])


def shared_memory_group(group: dist.ProcessGroup | None) -> SharedMemoryGroup | None:
    """The group as one over shared memory; None where something else carries it."""
    return group if isinstance(group, SharedMemoryGroup) else None


def open_transport(
    store: dist.Store,
    *,
    rank: int,
    num_ranks: int,
    num_local_ranks: int,
    timeout: timedelta,
    speaks: bool,
    use_engine: bool = True,
) -> Transport | None:
    """Open what carries calls between some ranks over memory that they share; None where they have none in common.

    Call on each of these ranks, which alone use `store`.  No process group comes of it.  Which transport it is, the
    engine or pure Python, is settled by all of them alike; where it is not the engine, the rank that `speaks` warns.

    Args:
        num_local_ranks: that compute on this machine in all: where they outnumber its cores, nobody spins.
    """
    gloo = gloo_backend(store, rank, num_ranks, timeout)
    return Meeting(
        store=dist.PrefixStore("shared_memory", store),
        gloo=gloo,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=num_local_ranks,
        timeout=timeout,
        speaks=speaks,
        use_engine=use_engine,
    ).settle()


def _create(options: Any, _: object, *, use_engine: bool, speaks_of_hosts: bool) -> Any:
    """What torch calls on every rank of a new group."""
    rank, ranks = options.group_rank, list(options.global_ranks_in_group)
    num_ranks = options.group_size
    gloo = gloo_backend(options.store, rank, num_ranks, options.timeout)
    ranks = ranks or list(range(num_ranks))  # torch names none for the default group
    local = dist.get_world_size() if dist.is_initialized() else num_ranks
    transport = Meeting(
        store=dist.PrefixStore("shared_memory", options.store),
        gloo=gloo,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=max(local, num_ranks),
        timeout=options.timeout,
        speaks=ranks[rank] == 0,
        use_engine=use_engine,
        speaks_of_hosts=speaks_of_hosts,
    ).settle()
    if transport is None:
        return WatchedGroup(gloo, rank=rank, num_ranks=num_ranks)
    return SharedMemoryGroup(transport, gloo, rank=rank, ranks=ranks, timeout=options.timeout)

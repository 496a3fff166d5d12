"""Making the backend known to torch, and making its groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from weft.comm._watched_group import WatchedGroup, gloo_backend
from weft.comm.shared_memory._call import Transport
from weft.comm.shared_memory._group import SharedMemoryGroup
from weft.comm.shared_memory._meeting import Meeting
from weft.comm.shared_memory._process import Process
from weft.comm.shared_memory._roll import RollCall, processes_that_came

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
    ranks: Sequence[int],
    num_local_ranks: int,
    timeout: timedelta,
    speaks: bool,
    use_engine: bool = True,
) -> Transport | None:
    """Open what carries calls between some ranks over memory that they share; None where they have none in common.

    Call on each of these ranks, which alone use `store`.  No process group comes of it.  Which transport it is, the
    engine or pure Python, is settled by all of them alike; where it is not the engine, the rank that `speaks` warns.

    Args:
        rank: this rank's position among `ranks`.
        ranks: as errors name them.
        num_local_ranks: that compute on this machine in all: where they outnumber its cores, nobody spins.

    Raises:
        CollectiveError: a rank died, or did not come in time, on the way.
    """
    roll = _called(store, rank, ranks, timeout)
    return Meeting(
        roll=roll,
        rank=rank,
        num_ranks=len(ranks),
        num_local_ranks=num_local_ranks,
        speaks=speaks,
        use_engine=use_engine,
    ).settle()


def meet(store: dist.Store, *, rank: int, num_ranks: int, seconds: float, earlier: dist.Store | None = None) -> None:
    """Wait at `store`, which nobody has used before, until all ranks have come.  Call on each of them.

    `earlier` is the store of these ranks' meeting before, if there was one: who has ended since is then seen at once.

    Raises:
        CollectiveError: a rank did not come in time, or is dead; it is named.
    """
    ranks = range(num_ranks)
    processes = processes_that_came(earlier, ranks) if earlier is not None else {}
    RollCall(store, rank=rank, ranks=ranks, seconds=seconds, processes=processes).begin()


def _create(options: Any, _: object, *, use_engine: bool, speaks_of_hosts: bool) -> Any:
    """What torch calls on every rank of a new group."""
    rank, num_ranks, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(num_ranks))  # torch names none for the default group
    roll = _called(options.store, rank, ranks, timeout)
    gloo = roll.during("gloo", lambda: gloo_backend(options.store, rank, num_ranks, timeout))
    local = dist.get_world_size() if dist.is_initialized() else num_ranks
    transport = Meeting(
        roll=roll,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=max(local, num_ranks),
        speaks=ranks[rank] == 0,
        use_engine=use_engine,
        speaks_of_hosts=speaks_of_hosts,
    ).settle()
    if transport is None:
        return WatchedGroup(gloo, rank=rank, num_ranks=num_ranks)
    processes = {ranks[position]: process for position, process in roll.processes.items()}
    return SharedMemoryGroup(transport, gloo, rank=rank, ranks=ranks, timeout=timeout, processes=processes)


def _called(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> RollCall:
    """A roll call to which all ranks have come."""
    roll = RollCall(
        dist.PrefixStore("roll", store),
        rank=rank,
        ranks=ranks,
        seconds=timeout.total_seconds(),
        processes=_known(ranks),
    )
    roll.begin()
    return roll


def _known(ranks: Sequence[int]) -> Mapping[int, Process]:
    """Processes, by position, of those ranks that this one met when the default group was formed."""
    default = shared_memory_group(dist.group.WORLD) if dist.is_initialized() else None
    met = default.processes if default is not None else {}
    return {position: met[rank] for position, rank in enumerate(ranks) if rank in met}

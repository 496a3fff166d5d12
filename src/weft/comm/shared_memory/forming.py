"""Forming the groups of the backend, and engines without a group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.comm._process import Process
from weft.comm._rendezvous import Rendezvous
from weft.comm._watched_group import WatchedGroup, gloo_backend
from weft.comm.shared_memory._backend import shared_memory_group
from weft.comm.shared_memory._handshake import Handshake
from weft.comm.shared_memory.engine import Engine
from weft.comm.shared_memory.group import SharedMemoryGroup


def open_engine(
    store: dist.Store,
    *,
    rank: int,
    ranks: Sequence[int],
    num_local_ranks: int,
    timeout: timedelta,
    warns: bool,
    use_engine: bool = True,
) -> Engine | None:
    """Open the engine between some ranks; None where they share no memory, of which the rank that `warns` warns.

    Call on each of these ranks, which alone use `store`.  No process group comes of it.

    Args:
        rank: this rank's position among `ranks`.
        ranks: as errors name them.
        num_local_ranks: that compute on this machine in all: where they outnumber its cores, nobody spins.

    Raises:
        CollectiveError: a rank died, or did not come in time, on the way.
    """
    return Handshake(
        rendezvous=_arrived(store, rank, ranks, timeout),
        rank=rank,
        num_ranks=len(ranks),
        num_local_ranks=num_local_ranks,
        warns=warns,
        use_engine=use_engine,
    ).open_engine()


def create_group(options: Any, *, use_engine: bool, warns_of_hosts: bool) -> WatchedGroup:
    """Return a new group as torch's `options` say; over Gloo alone where its ranks share no memory."""
    rank, num_ranks, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(num_ranks))  # torch names none for the default group
    rendezvous = _arrived(options.store, rank, ranks, timeout)
    gloo = rendezvous.during("gloo", lambda: gloo_backend(options.store, rank, num_ranks, timeout))
    local = dist.get_world_size() if dist.is_initialized() else num_ranks
    engine = Handshake(
        rendezvous=rendezvous,
        rank=rank,
        num_ranks=num_ranks,
        num_local_ranks=max(local, num_ranks),
        warns=ranks[rank] == 0,
        use_engine=use_engine,
        warns_of_hosts=warns_of_hosts,
    ).open_engine()
    if engine is None:
        return WatchedGroup(gloo, rank=rank, num_ranks=num_ranks)
    processes = {ranks[position]: process for position, process in rendezvous.processes.items()}
    return SharedMemoryGroup(engine, gloo, rank=rank, ranks=ranks, timeout=timeout, processes=processes)


def _arrived(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> Rendezvous:
    """A rendezvous to which all ranks have come."""
    rendezvous = Rendezvous(
        dist.PrefixStore("roll", store),
        rank=rank,
        ranks=ranks,
        seconds=timeout.total_seconds(),
        processes=_known(ranks),
    )
    rendezvous.begin()
    return rendezvous


def _known(ranks: Sequence[int]) -> Mapping[int, Process]:
    """Processes, by position, of those ranks that this one met when the default group was formed."""
    default = shared_memory_group(dist.group.WORLD) if dist.is_initialized() else None
    met = default.processes if default is not None else {}
    return {position: met[rank] for position, rank in enumerate(ranks) if rank in met}

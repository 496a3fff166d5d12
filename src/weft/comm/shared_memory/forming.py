"""Forming the groups of the backend."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from weft.comm._process import Process
from weft.comm.rendezvous import Rendezvous
from weft.comm.shared_memory._handshake import Handshake
from weft.comm.shared_memory.group import SharedMemoryGroup
from weft.comm.watched_group import WatchedGroup, gloo_backend


def create_group(options: Any, *, use_engine: bool, warns_of_hosts: bool) -> WatchedGroup:
    """Return a new group as torch's `options` say; over Gloo alone where its ranks share no memory."""
    rank, num_ranks, timeout = options.group_rank, options.group_size, options.timeout
    ranks = list(options.global_ranks_in_group) or list(range(num_ranks))  # torch names none for the default group
    rendezvous = arrived(options.store, rank, ranks, timeout)
    gloo = rendezvous.during("gloo", lambda: gloo_backend(options.store, rank, num_ranks, timeout))
    local = dist.get_world_size() if dist.is_initialized() else num_ranks
    engine = Handshake(
        rendezvous=rendezvous,
        num_local_ranks=max(local, num_ranks),
        warns=ranks[rank] == 0,
        use_engine=use_engine,
        warns_of_hosts=warns_of_hosts,
    ).open_engine()
    if engine is None:
        return WatchedGroup(gloo, rank=rank, num_ranks=num_ranks)
    processes = {ranks[position]: process for position, process in rendezvous.processes.items()}
    return SharedMemoryGroup(engine, gloo, rank=rank, ranks=ranks, timeout=timeout, processes=processes)


def arrived(store: dist.Store, rank: int, ranks: Sequence[int], timeout: timedelta) -> Rendezvous:
    """Return the rendezvous of ranks that alone use `store`, once all have come.  Call on each of them.

    Raises:
        CollectiveError: a rank died, or did not come in time.
    """
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
    default = dist.group.WORLD if dist.is_initialized() else None
    met = default.processes if isinstance(default, SharedMemoryGroup) else {}
    return {position: met[rank] for position, rank in enumerate(ranks) if rank in met}

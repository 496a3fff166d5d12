"""The rendezvous of a default group's ranks: every group that a process makes gets a key prefix of its own.

A store outlives the group that was formed at it: the launcher's, torchrun's, the file of launched ranks.  Another group
at the same keys would read what the first has left there, such as a segment of memory that is gone.  So every rank
counts, in the store itself, how often it has come, and ranks that have come equally often meet under that number.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.errors import LaunchError
from weft.run.launch._rank_info import RankInfo

if TYPE_CHECKING:
    from torch.distributed import Store

_RETRY_SECONDS = 0.05


def rendezvous_store(rank_info: RankInfo, timeout: timedelta) -> Store:
    """Wait for all ranks of a new group, and return the store that they use.  Call on every rank.

    Raises:
        CollectiveError: a rank has not come in time, or has died.
        LaunchError: the environment names a place that cannot be, or a port that is taken.
    """
    import torch.distributed as dist

    deadline = time.monotonic() + timeout.total_seconds()
    while True:
        store = _store(rank_info, timeout)
        try:
            return _store_of_group(store, rank_info, timeout)
        except dist.DistError:
            # Without a launcher the store is rank 0's, and each of its groups has another: this was the one before.
            if not _is_of_rank_0(rank_info) or rank_info.rank == 0 or time.monotonic() >= deadline:
                raise
            del store
            time.sleep(_RETRY_SECONDS)


def _store_of_group(store: Store, rank_info: RankInfo, timeout: timedelta) -> Store:
    """The part of the store for the group that this rank forms now."""
    import torch.distributed as dist

    from weft.comm.rendezvous import rendezvous

    if rank_info.world_size == 1:
        return store
    # Each rank counts its own joins, so no rank has to know which groups the others have formed: ranks that make the
    # same groups in the same order get equal numbers.
    number = store.add(f"weft/joined/{rank_info.rank}", 1)
    earlier = dist.PrefixStore(f"weft/rendezvous/{number - 1}", store) if number > 1 else None
    rendezvous(
        dist.PrefixStore(f"weft/rendezvous/{number}", store),
        rank=rank_info.rank,
        num_ranks=rank_info.world_size,
        seconds=timeout.total_seconds(),
        earlier=earlier,
    )
    return dist.PrefixStore(f"weft/group/{number}", store)


def _is_of_rank_0(rank_info: RankInfo) -> bool:
    """Whether rank 0's own process has the store, and not whoever started the ranks."""
    return rank_info.store is None and not rank_info.launcher_serves


def _store(rank_info: RankInfo, timeout: timedelta) -> Store:
    """The store of the job."""
    import torch.distributed as dist

    if rank_info.store is not None:
        return dist.FileStore(rank_info.store)  # whoever started the ranks removes the file: a later group needs it
    if rank_info.address is None and rank_info.world_size == 1:
        return dist.HashStore()
    if rank_info.address is None:
        raise LaunchError(
            f"rank {rank_info.rank} of {rank_info.world_size} has no address at which its ranks meet. Give RankInfo a"
            " store or an address."
        )
    host, _, port = rank_info.address.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LaunchError(f"MASTER_PORT = {port!r} in the environment is no port. Give a number from 1 to 65535.")
    is_host = _is_of_rank_0(rank_info) and rank_info.rank == 0
    try:
        return dist.TCPStore(
            host,
            int(port),
            rank_info.world_size,
            is_master=is_host,
            timeout=timeout,
            wait_for_workers=False,  # the rendezvous does, and names the ranks that are missing
            multi_tenant=is_host,
        )
    except dist.DistNetworkError as problem:
        from weft.run.launch._taken_port import explained  # loaded where a store cannot be made

        raise explained(problem, port, is_host=is_host) from None

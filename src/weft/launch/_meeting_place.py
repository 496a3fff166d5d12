"""Where the ranks of a default group meet: a store of their own for each group, as many as a process may make.

A store outlives the group that was formed at it: the launcher's, torchrun's, the file of launched ranks.  Another group
at the same keys would read what the first has left there, such as a segment of memory that is gone.  So every rank
counts, in the store itself, how often it has come, and ranks that have come equally often meet under that number.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from weft.errors import LaunchError
from weft.launch._place import Place, place_from_environment

if TYPE_CHECKING:
    from torch.distributed import Store

_AGAIN_SECONDS = 0.05


def meeting_place(place: Place, patience: timedelta) -> Store:
    """Return a store that the ranks of one group use, all of which have come.  Call on every rank.

    Raises:
        CollectiveError: a rank has not come in time, or has died.
        LaunchError: the environment names a place that cannot be.
    """
    import torch.distributed as dist

    deadline = time.monotonic() + patience.total_seconds()
    while True:
        store = _store(place, patience)
        try:
            return _met(store, place, patience)
        except dist.DistError:
            # Without a launcher the store is rank 0's, and each of its groups has another: this was the one before.
            if not _is_of_rank_0(place) or place.rank == 0 or time.monotonic() >= deadline:
                raise
            del store
            time.sleep(_AGAIN_SECONDS)


def _met(store: Store, place: Place, patience: timedelta) -> Store:
    """The part of the store for the group that this rank forms now."""
    import torch.distributed as dist

    from weft.comm import meet

    if place.world_size == 1:
        return store
    number = store.add(f"weft/joined/{place.rank}", 1)
    earlier = dist.PrefixStore(f"weft/meeting/{number - 1}", store) if number > 1 else None
    meet(
        dist.PrefixStore(f"weft/meeting/{number}", store),
        rank=place.rank,
        num_ranks=place.world_size,
        seconds=patience.total_seconds(),
        earlier=earlier,
    )
    return dist.PrefixStore(f"weft/group/{number}", store)


def _is_of_rank_0(place: Place) -> bool:
    """Whether rank 0's own process has the store, and not whoever started the ranks."""
    return place.store is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)


def _store(place: Place, patience: timedelta) -> Store:
    """The store of the job."""
    import torch.distributed as dist

    if place.store is not None:
        return dist.FileStore(place.store)  # whoever started the ranks removes the file: a later group needs it
    if place.world_size == 1 and place_from_environment() is None:
        return dist.HashStore()
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise LaunchError(f"MASTER_PORT = {port!r} in the environment is no port. Give a number from 1 to 65535.")
    is_host = _is_of_rank_0(place) and place.rank == 0
    return dist.TCPStore(
        host,
        int(port),
        place.world_size,
        is_master=is_host,
        timeout=patience,
        wait_for_workers=False,  # the roll call does, and names who is missing
        multi_tenant=is_host,
    )

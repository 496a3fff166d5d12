"""Recording of ranks that no launcher of Weft's has started: under torchrun, in a notebook, in plain Python."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from pathlib import Path

import xxhash

from weft.events.ring import RankRing, open_ring, ring_path
from weft.process import start_of
from weft.run.launch import RankInfo
from weft.run.launch.memory_folder import RINGS, named_memory_folder

logger = logging.getLogger(__name__)


def open_rank_ring(rank_info: RankInfo, run: Path, stack: ExitStack) -> RankRing | None:
    """Return the ring in which this rank records what it does; None where nothing would collect it.

    Under a launcher of Weft's its process collects.  Elsewhere a thread of the first rank does, until `stack` is left;
    ranks on other hosts are not recorded then.  Call on every rank.
    """
    if rank_info.failure_pipe is not None:
        return rank_info.open_ring(logger.warning)
    if rank_info.rank != rank_info.local_rank:
        return None
    # Ranks of one host have one parent and one folder of their run: so all of them find one name, and no others do.
    parent = os.getppid()
    where = xxhash.xxh3_64_hexdigest(f"{parent} {start_of(parent)} {run.resolve()}".encode())
    rings = named_memory_folder(RINGS, where, owns=rank_info.local_rank == 0)
    if rings is None:
        if rank_info.local_rank == 0:
            logger.warning("The run is not recorded: no folder could be made in /dev/shm. Give the host one.")
        return None
    if rank_info.local_rank == 0:
        from weft.watch.collector import Collecting  # other ranks have no use for it

        stack.enter_context(Collecting(lambda: run, rings=rings, removes_after=rank_info.local_world_size))
    generation = rings / "1"
    try:
        generation.mkdir(mode=0o700, exist_ok=True)
        ring_path(generation, rank_info.rank).unlink(missing_ok=True)  # of a process that was killed
    except OSError:
        return None
    return open_ring(generation, rank_info.rank, logger.warning)

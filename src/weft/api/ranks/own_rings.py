"""Recording of ranks that no launcher of Weft's has started: under torchrun, in a notebook, in plain Python."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from weft.errors import LaunchError
from weft.events import RunFolder
from weft.events.ring import RankRing, open_ring, ring_path
from weft.files import write_whole
from weft.process import start_of
from weft.run.launch import RankInfo
from weft.run.launch.memory_folder import RINGS, named_memory_folder

if TYPE_CHECKING:
    from weft.config.recipe import RunRecipe
    from weft.run.hosts.signed import JobSecret

logger = logging.getLogger(__name__)

_NUMBER = 1
"""Number of the generation: whoever starts the ranks again starts another run of them."""
_NOTE = "collector.json"
"""File in the run's folder that tells other hosts where the collector listens."""


def open_rank_ring(
    rank_info: RankInfo, run: Path, stack: ExitStack, recipe: RunRecipe | None = None
) -> RankRing | None:
    """Return the ring in which this rank records what it does; None where nothing would collect it, or the recipe wants
    no telemetry.

    Under a launcher of Weft's its process collects.  Elsewhere a thread of the first rank of each host reads the rings,
    until `stack` is left: that of rank 0 collects, and the others report to it.  Call on every rank.
    """
    if recipe is not None and not recipe.telemetry:
        return None
    if rank_info.failure_pipe is not None:
        return rank_info.open_ring(logger.warning)
    # Ranks of one host have one parent and one folder of their run: so all of them find one name, and no others do.
    parent = os.getppid()
    where = xxhash.xxh3_64_hexdigest(f"{parent} {start_of(parent)} {run.resolve()}".encode())
    rings = named_memory_folder(RINGS, where, owns=rank_info.local_rank == 0)
    if rings is None:
        if rank_info.local_rank == 0:
            logger.warning("The run is not recorded: no folder could be made in /dev/shm. Give the host one.")
        return None
    generation = rings / str(_NUMBER)
    try:
        generation.mkdir(mode=0o700, exist_ok=True)
        ring_path(generation, rank_info.rank).unlink(missing_ok=True)  # of a process that was killed
    except OSError:
        return None
    if rank_info.rank == 0:
        _collect(rank_info, run, rings, stack, recipe)
    elif rank_info.local_rank == 0:
        _report(run, rings, stack)
    return open_ring(generation, rank_info.rank, logger.warning)


def _collect(rank_info: RankInfo, run: Path, rings: Path, stack: ExitStack, recipe: RunRecipe | None) -> None:
    """Collect what the ranks of all hosts record."""
    from weft.watch.collector import Collecting, unheard  # other ranks have no use for it
    from weft.watch.profile_run import OwnProfile

    secret = _secret(run) if rank_info.local_world_size < rank_info.world_size and rank_info.address else None
    listen = None
    if secret is not None and rank_info.address is not None:
        listen = rank_info.address.rpartition(":")[0], secret.key(_NOTE)
    ranks = rank_info.local_world_size
    judged = unheard if recipe is None else OwnProfile(RunFolder(run), recipe.profile)
    collecting = stack.enter_context(
        Collecting(lambda: run, rings=rings, removes_after=ranks, listen=listen, judged=judged)
    )
    if secret is not None:
        with suppress(OSError):
            write_whole(run / _NOTE, secret.sign(_NOTE, {"address": collecting.address_of(_NUMBER)}))


def _report(run: Path, rings: Path, stack: ExitStack) -> None:
    """Report what the ranks of this host record to the host of rank 0."""
    from weft.watch.host_recorder import report_rings

    secret = _secret(run)
    if secret is None:
        return

    def collector() -> str:
        with suppress(OSError):
            return (secret.open(_NOTE, (run / _NOTE).read_text()) or {}).get("address", "")
        return ""

    stack.enter_context(report_rings(rings, rings / str(_NUMBER), collector, secret.key(_NOTE)))


def _secret(run: Path) -> JobSecret | None:
    """Return the secret of a run whose folder the hosts share; None, with a warning, where it has none."""
    from weft.run.hosts.signed import JobSecret

    try:
        return JobSecret.of_folder(run)
    except LaunchError as problem:
        logger.warning("Ranks of other hosts than the first are not recorded: %s", problem)
        return None

"""Measure which way carries each collective best: on ranks started here, or on those of a job."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from weft.comm.algorithms import BUILT_IN, Arrangement, ChoiceTable, format_size, table_from_json, table_to_json
from weft.comm.device import BackendKind
from weft.comm.mesh import GroupView
from weft.comm.selector import SIZES, measure_table
from weft.config.cluster import Topology
from weft.errors import CollectiveError
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.launch.launcher import launch_function


def measure_choices(
    processes: int,
    *,
    place: Arrangement | None = None,
    topology: Topology | None = None,
    sizes: Sequence[int] = (),
    backend: BackendKind = "auto",
) -> ChoiceTable | None:
    """Measure on CPU ranks, and return the table; None on all ranks of a job but the first.

    Under torchrun or `weft launch` this process is one of the ranks: call it on all of them.  Otherwise `processes`
    ranks are started on this machine, and end with the call.

    Args:
        place: how the ranks lie on the links; by default as they find one another.
        topology: of the links between nodes.
        sizes: bytes of the whole tensor; by default 1 KiB to 64 MiB.
        backend: as a plan's `compute.backend`.  Of ranks that are to stand for several nodes it is Gloo always.

    Raises:
        CollectiveError: one rank only, or a place for another number of ranks.
        LaunchError: a rank could not start or died.
    """
    job = RankInfo.from_environment()
    world = processes if job is None else job.world_size
    if place is not None and place.members != world:
        raise CollectiveError(f"the cluster has {place.members} devices, and {world} ranks run: start one for each.")
    arguments: dict[str, Any] = {
        "place": None if place is None else [list(place.order), list(place.nodes), list(place.shape)],
        "topology": topology,
        "sizes": list(sizes) or list(SIZES),
        "backend": "gloo" if place is not None and len(place.nodes) > 1 else backend,
    }
    text = (
        launch_function("weft.run.probe:measure_choices_as_rank", arguments, world)[0]
        if job is None
        else measure_choices_as_rank(job, **arguments)
    )
    return None if text is None else table_from_json(text)


def measure_choices_as_rank(
    rank: RankInfo,
    *,
    place: list[list[int]] | None,
    topology: Topology | None,
    sizes: list[int],
    backend: BackendKind = "auto",
) -> str | None:
    """Measure on one rank; rank 0 returns the table as JSON."""
    arrangement: Arrangement | None = None
    if place is not None:
        order, nodes, (rows, columns) = place
        arrangement = Arrangement(order=tuple(order), nodes=tuple(nodes), shape=(rows, columns))
    with initialise_distributed("cpu", rank, backend=backend) as distributed:
        n = distributed.world_size
        view = GroupView(tuple(range(n)), distributed.rank, dist.group.WORLD if n > 1 else None)
        log: Callable[[str], None] | None = _say if distributed.rank == 0 else None
        table = measure_table(view, place=arrangement, topology=topology, sizes=sizes, tell=log)
    return table_to_json(table) if distributed.rank == 0 else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def worlds_of(rank_info: RankInfo) -> list[tuple[int, ...]]:
    """Return the ranks of the groups whose choices a probe measures: 2, 4, … of one node and all of it, then all of the
    job."""
    local = rank_info.local_world_size
    counts = [
        *(1 << power for power in range(1, local.bit_length()) if 1 << power < local),
        local,
        rank_info.world_size,
    ]
    return [tuple(range(count)) for count in dict.fromkeys(counts) if count > 1]


def measure_tables(rank_info: RankInfo, budget_seconds: float, log: Callable[[str], None]) -> list[str]:
    """Measure the choices of the job's groups (`worlds_of`), and return the tables of those that this rank is in, as
    JSON.  Call on all ranks of a job on CPUs; groups share the time equally.  They are made as trainings make them:
    over shared memory where all ranks are of one host."""
    worlds, tables = worlds_of(rank_info), list[str]()
    for ranks in worlds:
        group = dist.new_group(list(ranks))
        if rank_info.rank not in ranks:
            continue
        assert not isinstance(group, int), "torch gives a number only to ranks that are no members"
        view = GroupView(ranks, ranks.index(rank_info.rank), group)
        table = measure_table(view, budget_seconds=budget_seconds / len(worlds))
        tables.append(table_to_json(table))
        other = sum(row.choice not in BUILT_IN for row in table.rows)
        largest = format_size(max(row.size_bytes for row in table.rows))
        log(f"choices of {len(ranks)} ranks: up to {largest}, {other} of {len(table.rows)} for an algorithm of Weft's")
    return tables

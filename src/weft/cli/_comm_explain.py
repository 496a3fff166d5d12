"""`weft comm explain`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.comm.algorithms import Arrangement, ChoiceTable, Links, MethodCandidate, TableRow
    from weft.config.cluster import Topology

_MOST_RANKS = 64


def explain(
    *,
    processes: Annotated[int | None, Parameter(show_default=False)] = None,
    cluster: Annotated[str | None, Parameter(show_default=False)] = None,
    size: Annotated[tuple[str, ...], Parameter(negative=())] = (),
    measure: Annotated[bool, Parameter(negative=())] = False,
    backend: Literal["auto", "gloo"] = "auto",
) -> None:
    """Say which algorithm carries each collective of CPU ranks, and why: predicted beside measured seconds.

    Shows what was measured before of as many ranks; otherwise, or with --measure, starts them here, measures, and
    keeps the table, which algorithm = "measured" of plans takes from then on. Nothing else should run meanwhile. To
    measure several hosts: torchrun ... --no-python weft comm explain on all of them.

    Parameters
    ----------
    processes
        Ranks to start here; by default 2.
    cluster
        Instead of --processes: a cluster.toml or a short name, with one rank per device. Its nodes and its torus say
        how algorithms take the ranks.
    size
        Of the whole tensor, such as 64K. May be given again; by default 1K to 64M. Sizes between go by the nearest.
    measure
        Measure anew.
    backend
        auto: what trainings use, memory that one host's ranks share, or Gloo between hosts; it stands in the table as
        "backend". gloo: what plans with compute.backend = "gloo" use.
    """
    from weft.comm.algorithms import arrange, find_table, flat, keep_table, parse_size
    from weft.config.cluster import resolve_cluster
    from weft.run.launch import RankInfo

    if processes is not None and cluster is not None:
        raise CollectiveError("--processes goes without --cluster, which has one rank per device. Leave one out.")
    sizes = [parse_size(text) for text in size]
    place: Arrangement | None = None
    topology: Topology | None = None
    if cluster is not None:
        described = resolve_cluster(cluster)
        place = arrange("direct", described)
        topology = "torus" if any(tier.topology == "torus" for tier in described.links) else None
    ranks = place.members if place is not None else 2 if processes is None else processes
    job = RankInfo.from_environment()
    if job is None and not 2 <= ranks <= _MOST_RANKS:
        raise CollectiveError(f"{ranks} ranks cannot be started here: use 2 to {_MOST_RANKS}.")
    nodes = (place or flat(ranks)).nodes
    known: ChoiceTable | None = None
    if not (measure or sizes) and job is None:
        kinds = ("weft", "gloo") if backend == "auto" and len(nodes) == 1 else ("gloo",)
        known = next((table for kind in kinds if (table := find_table(ranks, nodes, kind)) is not None), None)
    if known is not None:
        print("\n".join(table_lines(known)))
        print("\nkept from an earlier measurement; --measure measures anew")
        return
    from weft.run.probe import measure_choices

    table = measure_choices(ranks, place=place, topology=topology, sizes=sorted(set(sizes)), backend=backend)
    if table is None:  # another rank of the job writes
        return
    print("\n".join(table_lines(table)))
    sys.stdout.flush()
    print(f'\nkept in {keep_table(table)}: what algorithm = "measured" takes for {table.members} such ranks')


def table_lines(table: ChoiceTable) -> Iterator[str]:
    """Yield the lines about a table: the links, and every way of each collective and size, its choice marked."""
    nodes = "1 node" if len(table.nodes) == 1 else f"nodes of {' '.join(map(str, table.nodes))} ranks"
    yield f"ranks     {table.members} on {nodes}, backend {table.backend}"
    yield f"links     {_links(table.links)}"
    for row in table.rows:
        yield ""
        yield from _row_lines(row)


def _links(links: Links) -> str:
    def line(latency: float, per_byte: float) -> str:
        speed = f"{1e-9 / per_byte:.2f} GB/s" if per_byte > 0 else "bandwidth beyond measure"
        return f"{latency * 1e6:.1f} µs a message, {speed}"

    across = line(*links.across)
    return across if links.inner_latency is None else f"{across} between nodes; {line(*links.inside)} inside"


def _row_lines(row: TableRow) -> Iterator[str]:
    from weft.comm.algorithms import format_size

    yield f"{row.collective} of {format_size(row.size_bytes)}: {row.choice}"
    yield f"    {'':2}{'way':<30}{'predicted':>12}{'measured':>12}"
    order = sorted(row.candidates, key=_by_time)
    for entry in order:
        mark = "→ " if entry.name == row.choice else "  "
        measured = entry.note if entry.measured_seconds is None else _time(entry.measured_seconds)
        gap = "  " if entry.measured_seconds is None else ""
        yield f"    {mark}{entry.name:<30}{_time(entry.predicted_seconds):>12}{gap}{measured:>12}"


def _by_time(candidate: MethodCandidate) -> tuple[bool, float]:
    measured = candidate.measured_seconds
    return measured is None, candidate.predicted_seconds if measured is None else measured


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"

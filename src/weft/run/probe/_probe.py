"""Measure this machine, or a job's nodes, and describe them as a cluster."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from weft.comm.algorithms import ChoiceTable, table_from_json
from weft.config.cluster import (
    Cluster,
    Devices,
    LinkTier,
    Node,
    table_links,
)
from weft.config.document import typed
from weft.errors import ClusterError
from weft.run.launch import RankInfo
from weft.run.launch.launcher import launch_function
from weft.run.probe._devices import DTYPES
from weft.run.probe._links import Reach, line_of
from weft.run.probe._rank import Findings, probe_rank

BUDGET_SECONDS = 150.0
"""Time for the timings.  With the choices of collectives and starting the ranks, a probe stays under five minutes."""
_ADD_BYTES = 12
"""Bytes per element of `add`: two reads and a write."""
_MOST_RANKS = 16


def probe(
    *,
    processes: int | None = None,
    budget_seconds: float = BUDGET_SECONDS,
    precisions: Sequence[str] = (),
    keep: Callable[[ChoiceTable], object] | None = None,
) -> Cluster | None:
    """Measure where this job runs, and return it as a cluster.

    Under torchrun or `weft launch` this process is one of the ranks: call it on all of them; rank 0 gets the cluster,
    the others None.  Otherwise ranks are started on this machine, and end with the call.

    Args:
        processes: ranks to start here; by default twice the cores where these are few, one per accelerator.
        budget_seconds: for the timings.
        precisions: of matrix products; by default those that the devices compute in.
        keep: takes each table of choices that was measured: on CPUs of 2, 4, … ranks, where the cluster is returned.

    Raises:
        ClusterError: a precision that is not known, or ranks that lie unevenly on the nodes.
        LaunchError: a rank could not start or died.
    """
    unknown = [name for name in precisions if name not in DTYPES]
    if unknown:
        raise ClusterError(f'precision "{unknown[0]}" cannot be measured. Use {", ".join(DTYPES)}.')
    here = Cluster.detect()
    node = here.nodes[0]
    arguments: dict[str, Any] = {
        "cores": node.cores,
        "memory_bytes": node.memory_bytes,
        "budget_seconds": budget_seconds,
        "precisions": list(precisions),
    }
    rank_info = RankInfo.from_environment()
    if rank_info is not None:
        findings = probe_rank(rank_info, **arguments, log=_say if rank_info.rank == 0 else _keep_quiet)
        return _handed_over(findings, node, keep) if rank_info.rank == 0 else None
    ranks = processes or _ranks_for(node)
    results = launch_function("weft.run.probe:measure_as_rank", arguments, ranks, threads_per_rank=node.cores)
    return _handed_over(typed(Findings, results[0]), node, keep)


def _handed_over(findings: Findings, node: Node, keep: Callable[[ChoiceTable], object] | None) -> Cluster:
    if keep is not None:
        for text in findings.tables:
            keep(table_from_json(text))
    return cluster_of(findings, node)


def measure_as_rank(rank_info: RankInfo, **arguments: Any) -> dict[str, Any] | None:
    """Measure on a rank that `probe` started; rank 0 returns the findings as plain tables."""
    findings = probe_rank(rank_info, **arguments, log=_say if rank_info.rank == 0 else _keep_quiet)
    return dataclasses.asdict(findings) if rank_info.rank == 0 else None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _keep_quiet(line: str) -> None:
    """Other ranks have the same figures."""


def _ranks_for(node: Node) -> int:
    if node.devices.kind != "cpu":
        return node.devices.count
    return max(2, min(_MOST_RANKS, node.cores if node.cores > 4 else 2 * node.cores))


def cluster_of(findings: Findings, node: Node) -> Cluster:
    """Return the cluster that a probe saw; `node` is this one, as detected."""
    devices = node.devices
    count = findings.cores if devices.kind == "cpu" else findings.ranks_per_node
    best = _best_flops(findings, count)
    peaks = {precision: max(speed, devices.peak_flops.get(precision, 0.0)) for precision, speed in best.items()}
    memory = devices.memory_bytes if devices.kind != "cpu" else findings.memory_bytes // findings.cores
    devices = replace(
        devices,
        count=count,
        memory_bytes=memory,
        peak_flops={**devices.peak_flops, **peaks},
        measured_flops=best,
        memory_bandwidth_bytes_per_second=_bandwidth(findings, count),
        measured=findings.measured,
    )
    whole = replace(
        node, count=findings.num_nodes, cores=findings.cores, memory_bytes=findings.memory_bytes, devices=devices
    )
    return Cluster(nodes=(whole,), links=_links(findings, devices))


def _busiest(findings: Findings, count: int) -> tuple[int, int]:
    """The setting that uses all devices by most ranks, none of which shares one."""
    fitting = [setting for setting in findings.measured.settings if setting[0] <= count]
    return max(fitting, key=lambda setting: (setting[0] * setting[1], setting[0]))


def _best_flops(findings: Findings, count: int) -> dict[str, float]:
    """Precision → FLOP/s of one device, while all work."""
    ranks, threads = _busiest(findings, count)
    used = ranks * threads if findings.device == "cpu" else ranks
    best: dict[str, float] = {}
    for row in findings.measured.matrix:
        if (row.ranks, row.threads) == (ranks, threads):
            speed = float(f"{row.flops_per_second * ranks / used:.4g}")
            best[row.precision] = max(speed, best.get(row.precision, 0.0))
    return best


def _bandwidth(findings: Findings, count: int) -> float:
    ranks, threads = _busiest(findings, count)
    used = ranks * threads if findings.device == "cpu" else ranks
    rows = [row for row in findings.measured.memory if (row.work, row.ranks, row.threads) == ("add", ranks, threads)]
    largest = max(rows, key=lambda row: row.elements)
    return float(f"{_ADD_BYTES * largest.elements / largest.seconds * ranks / used:.4g}")


def _links(findings: Findings, devices: Devices) -> tuple[LinkTier, ...]:
    usual = table_links(devices.kind, findings.num_nodes, devices.count)
    if not usual and findings.links.get("inside"):
        usual = (replace(table_links(devices.kind, 1, 2)[0]),)
    tiers: list[LinkTier] = []
    for tier in usual:
        reach: Reach = "between" if tier.devices > devices.count and findings.num_nodes > 1 else "inside"
        rows = findings.links.get(reach, [])
        if not rows:
            tiers.append(tier)
            continue
        latency, speed, spread = line_of(rows)
        tiers.append(
            replace(
                tier,
                latency_seconds=latency,
                bandwidth_bytes_per_second=float(f"{speed:.4g}"),
                alone_bytes_per_second=None,
                start_seconds=0.0,
                spread=spread,
                measured=tuple(rows),
            )
        )
    return tuple(tiers)

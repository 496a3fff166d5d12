"""The work of every rank of a probe."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from weft.config.cluster import CollectiveTime, Measured
from weft.errors import ClusterError
from weft.run.launch import RankInfo, initialise_distributed
from weft.run.probe._choices import measure_tables
from weft.run.probe._devices import DTYPES, Concurrency, DeviceBench, measure_devices, number_of_figures
from weft.run.probe._links import Reach, measure_links, number_of_times


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The findings of a probe; the same on every rank."""

    device: str
    """Type of torch device."""
    cores: int
    """Cores of the node that has fewest."""
    memory_bytes: int
    """The same."""
    num_nodes: int
    ranks_per_node: int
    measured: Measured
    links: dict[Reach, list[CollectiveTime]]
    tables: tuple[str, ...] = ()
    """Choices of collectives as JSON, on the first rank: see `weft.comm.algorithms.table_from_json`."""
    seconds: float


def probe_rank(
    rank_info: RankInfo,
    *,
    cores: int,
    memory_bytes: int,
    budget_seconds: float,
    precisions: Sequence[str],
    log: Callable[[str], None],
) -> Findings:
    """Measure this rank's share of the job.  Call on all ranks at once.

    Args:
        cores: of this node, for all its ranks.
        memory_bytes: of this node.
        budget_seconds: for everything but the choices of collectives, which may take 0.4 of it in addition.
        precisions: of matrix products; the device's own where empty.
        log: receives progress lines.
    """
    start = time.perf_counter()
    before = torch.get_num_threads()
    with initialise_distributed("auto", rank_info) as distributed:
        device = distributed.device
        _check_nodes(rank_info)
        cores, memory_bytes = _fewest(cores, memory_bytes)
        chosen = list(precisions) or _precisions(device)
        settings = settings_of(device, rank_info.local_world_size, cores)
        planned = len(settings) * number_of_figures(device, chosen)
        planned += number_of_times(rank_info, device) if rank_info.world_size > 1 else 0
        # What is measured is known beforehand, so each figure gets an equal share; 0.6, because preparing takes time,
        # too.
        seconds_each = max(0.02, min(0.3, 0.6 * budget_seconds / planned))
        parts: list[Measured] = []
        links: dict[Reach, list[CollectiveTime]] = {}
        for index, setting in enumerate(settings):
            if index == _BEFORE_LINKS and rank_info.world_size > 1:
                torch.set_num_threads(max(1, cores // rank_info.local_world_size))
                links = measure_links(rank_info, device, seconds_each, log)
            # The slowest rank's clock decides for all of them: a rank that stopped alone would leave the others
            # waiting.
            if index >= _BEFORE_LINKS and _elapsed(start) > budget_seconds:
                log(f"left out, for {budget_seconds:.0f} s are over: {', '.join(map(_name, settings[index:]))}")
                break
            parts.append(measure_devices(_bench(rank_info, device, setting, seconds_each), chosen))
            log(f"{_line(parts[-1], setting)} ({time.perf_counter() - start:.0f} s)")
        if len(settings) <= _BEFORE_LINKS and rank_info.world_size > 1:
            links = measure_links(rank_info, device, seconds_each, log)
        tables = _choices(rank_info, device, cores, _CHOICES_SHARE * budget_seconds, log)
        torch.set_num_threads(before)
        measured = _joined(parts)
        warning = unsteady(measured)
        if warning is not None:
            log(warning)
        return Findings(
            device=device.type,
            cores=cores,
            memory_bytes=memory_bytes,
            num_nodes=rank_info.world_size // rank_info.local_world_size,
            ranks_per_node=rank_info.local_world_size,
            measured=measured,
            links=links,
            tables=tables,
            seconds=time.perf_counter() - start,
        )


def _choices(
    rank_info: RankInfo, device: torch.device, cores: int, budget_seconds: float, log: Callable[[str], None]
) -> tuple[str, ...]:
    """Tables of choices, where Weft chooses: NCCL does so itself."""
    if device.type != "cpu" or rank_info.world_size == 1:
        return ()
    torch.set_num_threads(max(1, cores // rank_info.local_world_size))
    return tuple(measure_tables(rank_info, budget_seconds, log))


_CHOICES_SHARE = 0.4
"""Share of the budget that the choices of collectives take on top of it: with the start of the ranks five minutes in
all."""
_BEFORE_LINKS = 2
"""Settings that are measured before the links; the others, as long as there is time."""


_QUIET_SPREAD = 0.1


def unsteady(measured: Measured) -> str | None:
    """Return a warning where most figures vary so much that something else must have run."""
    spreads = [row.spread for row in (*measured.matrix, *measured.attention, *measured.memory, *measured.blocks)]
    middle = statistics.median(spreads)
    if middle <= _QUIET_SPREAD:
        return None
    return (
        f"half of the figures vary by more than {middle:.0%} between runs: something else used this machine. "
        "Measure again while it is quiet; plans made from these figures will be off by as much."
    )


def _elapsed(start: float) -> float:
    """Seconds of the slowest rank's clock, the same on all ranks."""
    elapsed = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return float(elapsed)


def settings_of(device: torch.device, local_ranks: int, cores: int) -> list[Concurrency]:
    """Ranks of a node and threads of each, those first that training uses most: a rank per core, one rank with all.

    Then 2, 4, … ranks with all cores shared out, and one rank with fewer threads.  On an accelerator a rank has a
    device of its own: all together, and one alone.
    """
    if device.type != "cpu":
        return list(dict.fromkeys([Concurrency(local_ranks, 1), Concurrency(1, 1)]))
    counts = [*_doublings(local_ranks), local_ranks]
    per_core = Concurrency(max(count for count in [1, *counts] if count <= cores), 1)
    first = [per_core._replace(threads=cores // per_core.ranks), Concurrency(1, cores)]
    together = [Concurrency(count, max(1, cores // count)) for count in counts]
    alone = [Concurrency(1, count) for count in _doublings(cores)]
    return list(dict.fromkeys([*first, *together, *alone]))


def _doublings(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def _bench(rank_info: RankInfo, device: torch.device, setting: Concurrency, seconds: float) -> DeviceBench:
    """Groups are created by all ranks alike."""
    working = [rank for rank in range(rank_info.world_size) if rank % rank_info.local_world_size < setting.ranks]
    group = dist.new_group(working, backend="gloo") if len(working) > 1 else None
    takes_part = rank_info.rank in working
    return DeviceBench(
        device=device,
        setting=setting,
        takes_part=takes_part,
        group=group if takes_part and not isinstance(group, int) else None,
        seconds=seconds,
    )


def _fewest(*numbers: int) -> list[int]:
    """The smallest of each among all ranks."""
    smallest = torch.tensor(numbers)
    dist.all_reduce(smallest, dist.ReduceOp.MIN)
    return smallest.tolist()


def _check_nodes(rank_info: RankInfo) -> None:
    if rank_info.world_size % rank_info.local_world_size:
        raise ClusterError(
            f"{rank_info.world_size} ranks on nodes of {rank_info.local_world_size}: weft probe measures nodes that"
            " have equally many ranks. Start as many on each."
        )


def _precisions(device: torch.device) -> list[str]:
    if device.type == "cpu":
        return ["fp32", "bf16"]
    return [name for name in ("fp32", "bf16", "fp16") if name in DTYPES]


def _joined(parts: Sequence[Measured]) -> Measured:
    return Measured(
        matrix=tuple(row for part in parts for row in part.matrix),
        attention=tuple(row for part in parts for row in part.attention),
        memory=tuple(row for part in parts for row in part.memory),
        blocks=tuple(row for part in parts for row in part.blocks),
        operator_seconds=min(part.operator_seconds for part in parts),
    )


def _name(setting: Concurrency) -> str:
    ranks, threads = setting
    return f"{ranks} rank{'s' if ranks > 1 else ''} x {threads} thread{'s' if threads > 1 else ''}"


def _line(part: Measured, setting: Concurrency) -> str:
    """Return a line on one setting: its best matrix products by precision, and its memory."""
    best: dict[str, float] = {}
    for row in part.matrix:
        best[row.precision] = max(best.get(row.precision, 0.0), row.flops_per_second)
    flops = ", ".join(f"{precision} {speed / 1e9:,.0f}" for precision, speed in best.items())
    largest = max((row for row in part.memory if row.work == "add"), key=lambda row: row.elements)
    moved = 12 * largest.elements / largest.seconds / 1e9
    return f"{_name(setting)}: {flops} GFLOP/s each, memory {moved:.1f} GB/s each"

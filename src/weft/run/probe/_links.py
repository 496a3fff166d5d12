"""Times collectives over the job's links, by kind, size, members, and number of groups at work at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from weft.comm.device import synchronize
from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_gather, start_all_reduce, start_reduce_scatter
from weft.config.cluster import Collective, CollectiveTime
from weft.run.launch import RankInfo
from weft.run.probe._timing import Timing, slowest, summarise

KINDS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
_CPU_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
_GPU_SIZES = (1 << 14, 1 << 18, 1 << 22, 1 << 26, 1 << 28)
_FEWEST, _MOST = 3, 200

Reach = Literal["inside", "between"]
"""Links of one node, or those between nodes."""


@dataclass(frozen=True, slots=True)
class LinkGroups:
    """Groups of ranks that work at the same time over the same kind of links."""

    reach: Reach
    groups: tuple[tuple[int, ...], ...]
    """Global ranks."""

    @property
    def members(self) -> int:
        return len(self.groups[0])


def peers_of(rank_info: RankInfo) -> list[LinkGroups]:
    """Return what to measure in a job: 2, 4, 8, … members inside a node and between nodes, one group and as many as
    there is room for."""
    local = rank_info.local_world_size
    nodes = rank_info.world_size // local
    groups: list[LinkGroups] = []
    # One group alone shows a link's own speed; all groups at once show what is left of it when a training's groups
    # share it.
    for members in _doublings(local):
        every = [
            tuple(range(node * local + first, node * local + first + members))
            for node in range(nodes)
            for first in range(0, local - members + 1, members)
        ]
        groups.append(LinkGroups("inside", tuple(every[:: local // members])))
        if local >= 2 * members:
            groups.append(LinkGroups("inside", tuple(every)))
    for members in _doublings(nodes):
        columns = [tuple(node * local + column for node in range(members)) for column in range(local)]
        groups.append(LinkGroups("between", tuple(columns[:1])))
        if local > 1:
            groups.append(LinkGroups("between", tuple(columns)))
    return groups


def _doublings(most: int) -> list[int]:
    """2, 4, 8, … and `most` itself."""
    sizes = [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]
    return sizes if most < 2 or most in sizes else [*sizes, most]


def number_of_times(rank_info: RankInfo, device: torch.device) -> int:
    """Return the number of timings of `measure_links`."""
    return len(peers_of(rank_info)) * len(KINDS) * len(_CPU_SIZES if device.type == "cpu" else _GPU_SIZES)


def measure_links(
    rank_info: RankInfo, device: torch.device, seconds: float, log: Callable[[str], None]
) -> dict[Reach, list[CollectiveTime]]:
    """Time every kind over every group and size, about `seconds` each.  Call on all ranks."""
    rows: dict[Reach, list[CollectiveTime]] = {"inside": [], "between": []}
    for peers in peers_of(rank_info):
        view = _view(peers, rank_info.rank)
        here = len(peers.groups) if peers.reach == "between" else len(peers.groups) * rank_info.local_world_size
        groups = here if peers.reach == "between" else max(1, here // rank_info.world_size)
        for kind in KINDS:
            rows[peers.reach] += _times(kind, peers.members, groups, view, device, seconds)
        best = min(row.seconds for row in rows[peers.reach][-len(KINDS) :])
        log(f"links {peers.reach} a node: {groups} x {peers.members} ranks, fastest {best * 1e6:,.0f} us")
    return rows


def _view(peers: LinkGroups, rank: int) -> GroupView | None:
    """This rank's group, or None.  Creating groups is a collective of all ranks."""
    mine: GroupView | None = None
    for ranks in peers.groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            assert not isinstance(group, int), "torch gives a number only to ranks that are no members"
            mine = GroupView(ranks, ranks.index(rank), group)
    return mine


def _times(
    kind: Collective, members: int, groups: int, view: GroupView | None, device: torch.device, seconds: float
) -> list[CollectiveTime]:
    timings: list[Timing] = []
    sizes = _CPU_SIZES if device.type == "cpu" else _GPU_SIZES
    for size in sizes:
        work = _work(kind, view, device, size) if view is not None else None
        # The number of runs follows from the slowest member's time, so that no rank leaves the loop before another.
        once = _time(work, device, warm=True) if work is not None else 0.0
        worst = slowest([Timing(once, 0.0)])[0].seconds
        count = max(_FEWEST, min(_MOST, int(seconds / max(worst, 1e-6))))
        if work is None or view is None:
            timings.append(Timing(0.0, 0.0))
            continue
        dist.barrier(group=view.group)
        timings.append(summarise([_time(work, device) for _ in range(count)]))
    return [
        CollectiveTime(
            kind=kind,
            members=members,
            groups=groups,
            size_bytes=size,
            seconds=float(f"{timing.seconds:.4g}"),
            spread=round(timing.spread, 3),
        )
        for size, timing in zip(sizes, slowest(timings), strict=True)
    ]


def _time(work: Callable[[], object], device: torch.device, *, warm: bool = False) -> float:
    """Seconds of one run; with `warm`, of the second one."""
    if warm:
        work()
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _work(kind: Collective, view: GroupView, device: torch.device, size_bytes: int) -> Callable[[], object]:
    """One collective as training does it, over a tensor of `size_bytes` in all."""
    elements = max(view.size, size_bytes // 4 // view.size * view.size)
    # Zeros: the sums of an all-reduce that is repeated in place would grow without bound.
    flat = torch.zeros(elements, device=device)
    part = elements // view.size
    regions = [(index * part, (index + 1) * part) for index in range(view.size)]
    assert view.group is not None, "groups of one member are not measured"
    if kind == "all_reduce":
        return lambda: start_all_reduce(flat, view)()
    if kind == "reduce_scatter":
        return lambda: start_reduce_scatter(flat, regions, view, even=True)()
    if kind == "all_gather":
        return lambda: start_all_gather(flat, regions, view, even=True)()
    if kind == "broadcast":
        return partial(dist.broadcast, flat, src=view.ranks[0], group=view.group)
    if kind == "all_to_all":
        return partial(dist.all_to_all_single, torch.empty_like(flat), flat, group=view.group)
    return _shift(flat, view)


def _shift(flat: torch.Tensor, view: GroupView) -> Callable[[], object]:
    """Every member sends to the next one, as neighbouring stages do."""
    received = torch.empty_like(flat)
    after = view.ranks[(view.index + 1) % view.size]
    before = view.ranks[view.index - 1]

    def work() -> None:
        requests = [
            dist.P2POp(dist.isend, flat, after, group=view.group),
            dist.P2POp(dist.irecv, received, before, group=view.group),
        ]
        for request in dist.batch_isend_irecv(requests):
            request.wait()

    return work


def line_of(rows: Sequence[CollectiveTime]) -> tuple[float, float, float]:
    """Return latency, bytes per second of one member while all send, and the bandwidth's spread.

    Of `send` rows: the smallest message is all latency; the largest says the bandwidth.
    """
    sends = [row for row in rows if row.kind == "send"]
    busiest = max(row.members * row.groups for row in sends)
    chosen = [row for row in sends if row.members * row.groups == busiest]
    small, large = min(chosen, key=lambda r: r.size_bytes), max(chosen, key=lambda r: r.size_bytes)
    # The latency is part of both times, so the difference is the bytes' own; at least a tenth, in case the small one is
    # odd.
    speed = large.size_bytes / max(large.seconds - small.seconds, 0.1 * large.seconds)
    return small.seconds, speed, min(0.9, max(large.spread, 0.01))

"""The fastest algorithm for each collective and size on a group's links: formulas prune, and measurement decides.

    table = measure_table(mesh["data"])       # the same on every rank
    keep_table(table)                         # on one of them: what "measured" takes from then on

The links are probed first, by a few messages between two ranks of a node and between the first ranks of two nodes.
Formulas then say what every algorithm would take, and all but a few are pruned (`weft.comm.algorithms.shortlist`).
Those are timed in turn, so that a disturbance meets all of them, and count by their slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm._chosen import ChosenCollectives as ChosenCollectives
from weft.comm._hosts import discover_nodes as discover_nodes
from weft.comm._node import NodeMemory as NodeMemory
from weft.comm._node import share_node_memory as share_node_memory
from weft.comm._share import share_table as share_table
from weft.comm.algorithms import (
    Arrangement,
    ChoiceTable,
    Links,
    MethodCandidate,
    TableRow,
    decide,
    fit_links,
    format_size,
    predict,
    shortlist,
)
from weft.comm.device import backend_of, sends_messages
from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait
from weft.comm.watched_group import messages_group
from weft.errors import CollectiveError

if TYPE_CHECKING:
    from weft.config.cluster import Collective, Topology

SIZES = tuple(1 << power for power in range(10, 27, 2))
"""Bytes of the whole tensor: 1 KiB to 64 MiB."""
COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather")
"""The collectives of gradients and weights."""
RUNS = 5
_FEWER_RUNS = 3
_MOST_RUNS = 20
_SHORT_SECONDS = 0.02
"""Seconds in which a short candidate is repeated; more runs then steady the median."""
_CLOSE = 1.5
"""Candidates within this factor of the fastest run against each other again."""
_CONTEST_SECONDS = 0.4
"""Seconds of all runs of one contest."""
_SLOW_SECONDS = 0.2
"""Seconds of the slowest candidate from which on three runs must do."""
_PROBE_BYTES = (1 << 10, 1 << 16, 1 << 20)
_PROBE_SECONDS = 0.03
"""Time for each size of a link's probe, so that both links together stay below 0.2 s."""
_PROBE_RUNS = 50
_TAG = (1 << 20) + 77


def measure_table(
    view: GroupView,
    *,
    place: Arrangement | None = None,
    topology: Topology | None = None,
    collectives: Sequence[Collective] = COLLECTIVES,
    sizes: Sequence[int] = SIZES,
    budget_seconds: float | None = None,
    tell: Callable[[str], None] | None = None,
) -> ChoiceTable:
    """Measure, and return the first rank's table.  Call on every rank of the group alike; nothing else should run.

    Args:
        place: how the ranks lie on the links; by default as they find one another.
        topology: of the links between nodes; see `weft.comm.algorithms.predict`.
        sizes: bytes of the whole tensor.
        budget_seconds: the shortest sizes are measured as long as the next one fits, but one at least.
        tell: receives a line of progress per collective and size.

    Raises:
        CollectiveError: the group has one rank, or its backend does not send CPU tensors.
    """
    if view.group is None:
        raise CollectiveError("a group of 1 rank has no collectives to choose for. Measure with 2 or more.")
    if not sends_messages(torch.device("cpu"), view.group):
        raise CollectiveError(
            f"collectives of the backend {dist.get_backend(view.group)} are not chosen here: on CUDA NCCL chooses. "
            "Measure on a group of Gloo or of weft."
        )
    place = place if place is not None else discover_nodes(view)
    links = probe_links(view, place)
    rows: list[TableRow] = []
    began = time.perf_counter()
    ordered = sorted(sizes)
    with ChosenCollectives(view, place=place, node=share_node_memory(view, place)) as chosen:
        own = {kind: _own_line(chosen, kind) for kind in collectives} if backend_of(view.group) == "weft" else {}
        for size, following in zip_longest(ordered, ordered[1:]):
            started = time.perf_counter()
            for collective in collectives:
                predicted = predict(collective, size, place, links, topology=topology, backend=own.get(collective))
                rows.append(_measured(chosen, collective, size, shortlist(predicted)))
                _tell(tell, f"{collective} of {format_size(size)}: {rows[-1].choice}")
            if following is None or budget_seconds is None:
                continue
            now = time.perf_counter()
            if _latest(now - began + (now - started) * following / size, view) > budget_seconds:
                _tell(tell, f"{format_size(following)} and more left out: {budget_seconds:.0f} s would not do")
                break
    rows.sort(key=lambda row: collectives.index(row.collective))
    table = ChoiceTable(
        members=view.size, nodes=place.nodes, backend=backend_of(view.group), links=links, rows=tuple(rows)
    )
    shared = share_table(table, view)
    assert shared is not None, "the first rank has a table"
    return shared


def _own_line(chosen: ChosenCollectives, collective: Collective) -> tuple[float, float]:
    """Seconds of a call and of a byte of what the group does itself, where no formula knows it: shared memory."""
    return fit_links([(size, seconds_of(chosen, collective, size, "backend")) for size in _PROBE_BYTES])


def _tell(tell: Callable[[str], None] | None, line: str) -> None:
    if tell is not None:
        tell(line)


def _latest(seconds: float, view: GroupView) -> float:
    """The largest of all ranks' figures, so that all decide alike."""
    return float(slowest_of([[seconds]], view))


def probe_links(view: GroupView, place: Arrangement) -> Links:
    """Return seconds of a message and of a byte between nodes and inside them, in at most about 0.2 s.

    One pair of ranks sends to and fro for each kind of link.  Call on every rank of the group; all get the same.
    """
    firsts = [sum(place.nodes[:index]) for index in range(len(place.nodes))]
    wide = next((index for index, count in enumerate(place.nodes) if count > 1), None)
    inner = None if wide is None else _pair(place, firsts[wide], firsts[wide] + 1)
    across = None if len(firsts) < 2 else _pair(place, firsts[0], firsts[1])
    times = {kind: _ping(view, pair) for kind, pair in (("inner", inner), ("across", across)) if pair is not None}
    if "across" not in times:
        latency, per_byte = times["inner"]
        return Links(latency=latency, per_byte=per_byte)
    latency, per_byte = times["across"]
    if "inner" not in times:
        return Links(latency=latency, per_byte=per_byte)
    inner_latency, inner_per_byte = times["inner"]
    return Links(latency=latency, per_byte=per_byte, inner_latency=inner_latency, inner_per_byte=inner_per_byte)


def _pair(place: Arrangement, first: int, second: int) -> tuple[int, int]:
    return place.order[first], place.order[second]


def _ping(view: GroupView, pair: tuple[int, int]) -> tuple[float, float]:
    """Half of the median time to and fro of three sizes between two members, as a line; the same on all ranks."""
    assert view.group is not None, "there are two ranks"
    gloo, halves = messages_group(view.group), torch.zeros(len(_PROBE_BYTES), dtype=torch.float64)
    dist.barrier(group=view.group)
    if view.index in pair:
        peer = pair[1] if view.index == pair[0] else pair[0]
        for index, size in enumerate(_PROBE_BYTES):
            halves[index] = _half_round(gloo, peer, size, leads=view.index == pair[0])
    dist.all_reduce(halves, dist.ReduceOp.MAX, group=view.group)
    return fit_links(list(zip(_PROBE_BYTES, halves.tolist(), strict=True)))


def _half_round(gloo: dist.ProcessGroup, peer: int, size_bytes: int, *, leads: bool) -> float:
    """Messages to and fro until the time is over, which the leading rank says with its next message."""
    message = torch.zeros(size_bytes, dtype=torch.uint8)
    times: list[float] = []
    end = time.perf_counter() + _PROBE_SECONDS
    while True:
        start = time.perf_counter()
        # The leader decides when to stop, and says so inside of its next message: clocks of two hosts do not agree.
        if leads:
            message[0] = len(times) >= 2 and (start > end or len(times) >= _PROBE_RUNS)
            gloo.send([message], peer, _TAG).wait()
            gloo.recv([message], peer, _TAG).wait()
        else:
            gloo.recv([message], peer, _TAG).wait()
            gloo.send([message], peer, _TAG).wait()
        times.append((time.perf_counter() - start) / 2)
        if int(message[0]):
            return statistics.median(times[1:]) if leads else 0.0


def _measured(
    chosen: ChosenCollectives, collective: Collective, size_bytes: int, listed: Sequence[MethodCandidate]
) -> TableRow:
    """Time those that were not pruned, in turn, and choose."""
    works = [work_of(chosen, collective, size_bytes, candidate.name) for candidate in listed if not candidate.note]
    times = iter(_slowest_medians(works, chosen.view))
    measured = tuple(
        candidate if candidate.note else replace(candidate, measured_seconds=next(times)) for candidate in listed
    )
    assert chosen.view.group is not None, "one rank has nothing to measure"
    is_own = collective == "all_reduce" or backend_of(chosen.view.group) == "weft"
    usual = "backend" if is_own else "exchange"  # what is done without a choice
    return TableRow(collective=collective, size_bytes=size_bytes, choice=decide(measured, usual), candidates=measured)


def work_of(chosen: ChosenCollectives, collective: Collective, size_bytes: int, name: str) -> Callable[[], Wait]:
    """Return a function that starts one collective by an algorithm, over fp32 zeros, which sums leave as they are."""
    n = chosen.view.size
    flat = torch.zeros(max(n, size_bytes // 4 // n * n), dtype=torch.float32)
    part = flat.numel() // n
    regions = [(index * part, (index + 1) * part) for index in range(n)]
    if collective == "all_reduce":
        return lambda: chosen.start_all_reduce(flat, by=name)
    if collective == "reduce_scatter":
        return lambda: chosen.start_reduce_scatter(flat, regions, even=True, by=name)
    return lambda: chosen.start_all_gather(flat, regions, even=True, by=name)


def _slowest_medians(works: Sequence[Callable[[], Wait]], view: GroupView) -> list[float]:
    """The median over runs of the slowest rank's seconds, of each work; the same on all ranks."""
    once = _slowest_run(works, view)
    if once < _SLOW_SECONDS:
        once = _slowest_run(works, view)  # the first run opened the connections, which is no part of a collective
    runs = _FEWER_RUNS if once >= _SLOW_SECONDS else max(RUNS, min(_MOST_RUNS, int(_SHORT_SECONDS / once)))
    # All candidates in turn within each run, so that a disturbance meets all of them and not one.
    times = slowest_of([[time_once(work, view) for work in works] for _ in range(runs)], view)
    return _contested(works, times, view)


def _contested(works: Sequence[Callable[[], Wait]], times: Tensor, view: GroupView) -> list[float]:
    """Return the medians of `times` (runs, works); candidates close to the fastest get more runs first."""
    medians = times.median(dim=0).values
    close = [index for index, median in enumerate(medians.tolist()) if median <= _CLOSE * float(medians.min())]
    more = min(_MOST_RUNS, int(_CONTEST_SECONDS / float(medians[close].sum())))
    if len(close) > 1 and more > 1:
        again = slowest_of([[time_once(works[index], view) for index in close] for _ in range(more)], view)
        medians[close] = torch.cat([times[:, close], again]).median(dim=0).values
    return [float(median) for median in medians]


def _slowest_run(works: Sequence[Callable[[], Wait]], view: GroupView) -> float:
    """Seconds of the slowest work on its slowest rank; all of them once."""
    return float(slowest_of([[time_once(work, view) for work in works]], view).max())


def slowest_of(seconds: list[list[float]], view: GroupView) -> Tensor:
    """Return, for each figure, that of the rank where it is largest: as a tensor of the same shape, on every rank of
    the group, all of which must call it."""
    table = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(table, dist.ReduceOp.MAX, group=view.group)
    return table


def time_once(work: Callable[[], Wait], view: GroupView) -> float:
    """Return the seconds of one run that all ranks of the group begin together.  Call it on all of them."""
    dist.barrier(group=view.group)
    start = time.perf_counter()
    work()()
    return time.perf_counter() - start


def seconds_of(chosen: ChosenCollectives, collective: Collective, size_bytes: int, name: str) -> float:
    """Return the seconds of a collective by one algorithm now, as `measure_table` takes them.  Call on every rank."""
    return _slowest_medians([work_of(chosen, collective, size_bytes, name)], chosen.view)[0]

"""Reductions and gathers of flat storages over the data ranks, started asynchronously, whatever the backend does
well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.device import all_gather_single, reduce_scatter_single, runs_on_gloo
from weft.comm.mesh import GroupView
from weft.comm.shared_memory import shared_memory_group
from weft.comm.trace_event import Operation, TraceEvent, num_bytes
from weft.comm.watched_group import messages_group, watch_of

_TAG = 0
"""The tag of all messages here: Gloo delivers those of one pair of ranks in their order."""

Wait = Callable[[], None]
"""Blocks until the operation it stands for has happened."""


def nothing_to_wait_for() -> None:
    """The wait of an operation over one rank."""


@dataclass(frozen=True, slots=True)
class WorksDone:
    """Several operations under way as one."""

    works: Sequence[dist.Work]

    @classmethod
    def of(cls, works: Sequence[dist.Work | None]) -> WorksDone:
        """Leave out operations of which this rank is no part."""
        return cls([work for work in works if work is not None])

    def __call__(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True, slots=True)
class _SeenWait:
    """The wait of a collective that was seen as a whole, whatever it consists of."""

    wait: Wait
    seen: TraceEvent

    def __call__(self) -> None:
        entered = self.seen.enter_wait()
        try:
            self.wait()
        finally:
            self.seen.exit_wait(entered)


def traced_as(operation: Operation, flat: Tensor | int, view: GroupView, start: Callable[[], Wait]) -> Wait:
    """Start a collective that consists of others, or that another stands in for, so that one is seen: `operation` on
    `flat`, or on so many bytes."""
    watch = watch_of(view.group)
    size_bytes = flat if isinstance(flat, int) else num_bytes(flat)
    seen = None if watch is None else watch.launch(operation, size_bytes)
    if watch is None or seen is None:
        return start()
    with watch.cover():
        return _SeenWait(start(), seen)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """A reduce-scatter by direct messages; the wait adds the others' parts to this rank's region, in rank order."""

    works: Sequence[dist.Work]
    mine: Tensor
    received: Sequence[Tensor]

    def __call__(self) -> None:
        for work in self.works:
            work.wait()
        for piece in self.received:
            self.mine.add_(piece)


def start_all_reduce(flat: Tensor, view: GroupView) -> Wait:
    """Sum `flat` in place over the group.  Call on every rank of the group, in one order."""
    if view.group is None:
        return nothing_to_wait_for
    work = dist.all_reduce(flat, group=view.group, async_op=True)
    return WorksDone.of([work])


def start_reduce_scatter(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView, *, even: bool) -> Wait:
    """Sum over the group so that afterwards `flat[regions[index]]` holds the sum; the rest of `flat` is undefined.

    On Gloo every rank sends each region straight to its owner, who adds them up.  That is half of what an all-reduce
    moves; Gloo's own reduce-scatter runs one all-reduce per rank.  24 MB of fp32 between 2 ranks: 16 ms and 4 ms of
    processor time by messages, 25 and 8 by `all_to_all_single`, 31 and 13 by an all-reduce (2 busy cores, 2026-11).
    Over shared memory regions of any size are one operation.
    """
    if view.group is None:
        return nothing_to_wait_for
    shared = shared_memory_group(view.group)
    if shared is not None:
        parts = [flat[start:stop] for start, stop in regions]
        return WorksDone([shared.reduce_scatter_regions(parts, parts[view.index])])
    if runs_on_gloo(flat.device, view.group):
        # Gloo all-reduces an accelerator's memory, but sends messages from the CPU's alone.
        if flat.device.type != "cpu":
            return start_all_reduce(flat, view)
        return start_exchange(flat, regions, view)
    if not even:  # NCCL scatters equal regions only
        return start_all_reduce(flat, view)
    start, stop = regions[view.index]
    work = reduce_scatter_single(flat[start:stop], flat, group=view.group, async_op=True)
    return WorksDone.of([work])


def start_exchange(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView) -> Wait:
    """Reduce-scatter by one message of Gloo from every rank to every other, whatever carries the group's own
    collectives.  Call on every rank of the group, in one order, with a tensor of the CPU."""
    return traced_as("reduce_scatter", flat, view, lambda: _exchange(flat, regions, view))


def _exchange(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView) -> Wait:
    if view.group is None:
        return nothing_to_wait_for
    gloo = messages_group(view.group)
    mine = flat[slice(*regions[view.index])]
    others = [index for index in range(view.size) if index != view.index]
    senders = others if mine.numel() else []
    # A buffer for each sender, so that additions go by rank and not by arrival: sums must not differ from run to run.
    received = [torch.empty_like(mine) for _ in senders]
    works = [gloo.recv([piece], index, _TAG) for index, piece in zip(senders, received, strict=True)]
    works += [
        gloo.send([flat[slice(*regions[index])]], index, _TAG)
        for index in others
        if regions[index][1] > regions[index][0]
    ]
    return _Exchange(works, mine, received)


def start_all_gather(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView, *, even: bool) -> Wait:
    """Fill `flat` with every rank's own region of it.  Call on every rank of the group, in one order.

    On Gloo by direct messages: between 2 ranks 4 and 24 MB of fp32 take 0.9 and 10.8 ms, against 3.1 and 17.5 by its
    all-gather and 1.3 and 8.5 by one broadcast per region (2 busy cores, 2026-11).
    """
    if view.group is None:
        return nothing_to_wait_for
    shared = shared_memory_group(view.group)
    if shared is not None:
        parts = [flat[start:stop] for start, stop in regions]
        return WorksDone([shared.all_gather_regions(parts[view.index], parts)])
    if flat.device.type == "cpu" and runs_on_gloo(flat.device, view.group):
        return start_handing_out(flat, regions, view)
    if even:
        start, stop = regions[view.index]
        work = all_gather_single(flat, flat[start:stop], group=view.group, async_op=True)
        return WorksDone.of([work])
    return traced_as("all_gather", flat, view, lambda: start_broadcasts(flat, regions, view))


def start_broadcasts(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView) -> Wait:
    """Fill `flat` by one broadcast per region that is not empty."""
    works = [
        dist.broadcast(flat[start:stop], src=view.ranks[owner], group=view.group, async_op=True)
        for owner, (start, stop) in enumerate(regions)
        if stop > start
    ]
    return WorksDone.of(works)


def start_handing_out(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView) -> Wait:
    """All-gather by one message of Gloo from every rank to every other; as `start_exchange`."""
    return traced_as("all_gather", flat, view, lambda: _hand_out(flat, regions, view))


def _hand_out(flat: Tensor, regions: Sequence[tuple[int, int]], view: GroupView) -> Wait:
    if view.group is None:
        return nothing_to_wait_for
    gloo = messages_group(view.group)
    mine = flat[slice(*regions[view.index])]
    others = [index for index in range(view.size) if index != view.index]
    works = [
        gloo.recv([flat[slice(*regions[index])]], index, _TAG)
        for index in others
        if regions[index][1] > regions[index][0]
    ]
    if mine.numel():
        works += [gloo.send([mine], index, _TAG) for index in others]
    return WorksDone(works)

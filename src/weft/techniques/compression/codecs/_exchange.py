"""Collectives that carry packed gradients, started asynchronously; like all of Weft's, in one order on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from weft.comm.device import runs_on_gloo
from weft.comm.mesh import GroupView
from weft.comm.reduce import Wait, WorksDone, nothing_to_wait_for, traced_as


def places_of(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Runs of these sizes, one behind the other."""
    places: list[tuple[int, int]] = []
    stop = 0
    for size in sizes:
        places.append((stop, stop + size))
        stop += size
    return places


def start_all_to_all(outgoing: Tensor, places: Sequence[tuple[int, int]], incoming: Tensor, view: GroupView) -> Wait:
    """Send member i the bytes `outgoing[places[i]]`; afterwards `incoming[i]` holds what it sent here.

    `incoming` is (members, bytes for this rank); of its own row nothing is promised.  On Gloo by messages, for the
    reason that `start_reduce_scatter` gives.  Call on every rank of the group.
    """
    if view.group is None:
        return nothing_to_wait_for
    if not (outgoing.device.type == "cpu" and runs_on_gloo(outgoing.device, view.group)):
        work = dist.all_to_all_single(
            incoming.view(-1),
            outgoing,
            output_split_sizes=[incoming.shape[1]] * view.size,
            input_split_sizes=[stop - start for start, stop in places],
            group=view.group,
            async_op=True,
        )
        return WorksDone.of([work])
    return traced_as("all_to_all", outgoing, view, lambda: _start_messages(outgoing, places, incoming, view))


def _start_messages(outgoing: Tensor, places: Sequence[tuple[int, int]], incoming: Tensor, view: GroupView) -> Wait:
    others = [index for index in range(view.size) if index != view.index]
    works = [dist.irecv(incoming[i], view.ranks[i], group=view.group) for i in others if incoming.shape[1]]
    works += [
        dist.isend(outgoing[slice(*places[i])], view.ranks[i], group=view.group)
        for i in others
        if places[i][1] > places[i][0]
    ]
    return WorksDone.of(works)

"""Rows travel to the ranks that have their experts, and what these make of them travels back.

Every rank of the group has as many experts, those of rank r following those of rank r − 1, so that rows sorted by
expert are sorted by rank.  First a rank tells every other how many rows come for each of its experts; then the rows
themselves go by one uneven all-to-all.  Gradients take the same ways in the other direction.

A rank to which no row comes gets none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm.device import runs_on_gloo
from weft.comm.mesh import GroupView
from weft.model.reference.mixture import arrange, combine, spread
from weft.techniques.expert.journey import Compute, Journey, arrive, leave
from weft.techniques.expert.row_counts import rows_of_expert


@dataclass(frozen=True, slots=True)
class Route:
    """The numbers of rows that one call exchanges, and the order of the rows after the exchange."""

    view: GroupView
    sent: list[int]
    """Rows to each member."""
    received: list[int]
    """Rows from each member."""
    counts: Tensor
    """int64, (own experts,): rows for each of this rank's experts."""
    by_expert: Tensor
    """int64, (rows received,): index, in the order of arrival, of each row in the order of experts."""
    by_rank: Tensor
    """int64, (rows received,): the inverse permutation of `by_expert`."""

    @property
    def num_taken(self) -> int:
        """Rows that come to this rank."""
        return sum(self.received)


def find_route(counts: Tensor, num_rows: int, view: GroupView) -> Route:
    """Tell the group how many rows come, and return their route.  Collective: one exchange of `counts`.

    `counts` are int64, (experts,): how many of this rank's `num_rows` rows each expert of the whole model gets.  Where
    numbers are not real (a dry run), every rank has as many rows as this one, and experts get equally many.
    """
    assert view.group is not None, "a group of one member exchanges nothing"
    own = counts.numel() // view.size
    transport_device = torch.device("cpu") if runs_on_gloo(counts.device, view.group) else counts.device
    arrived = counts.new_empty(counts.numel(), device=transport_device)
    # Counts first: the exchange of rows is uneven, and every rank must know how many come before it can post buffers.
    dist.all_to_all_single(arrived, counts.contiguous().to(transport_device), group=view.group)
    is_real = type(counts) is Tensor and not counts.is_meta
    to_all = counts.tolist() if is_real else [rows_of_expert(num_rows, counts.numel(), e) for e in range(len(counts))]
    mine = to_all[view.index * own : (view.index + 1) * own]
    from_all = arrived.tolist() if is_real else mine * view.size
    # Rows arrive rank by rank, and within a rank expert by expert: (ranks, own experts) runs.  A stable sort by expert
    # keeps the order of ranks within an expert, so sums over rows do not depend on arrival.
    runs = torch.tensor(from_all, device=counts.device)
    expert_of = torch.arange(own, device=counts.device).repeat(view.size)
    by_expert = expert_of.repeat_interleave(runs, output_size=sum(from_all)).argsort(stable=True)
    return Route(
        view=view,
        sent=[sum(to_all[at : at + own]) for at in range(0, len(to_all), own)],
        received=[sum(from_all[at : at + own]) for at in range(0, len(from_all), own)],
        counts=runs.view(view.size, own).sum(0),
        by_expert=by_expert,
        by_rank=by_expert.argsort(),
    )


@final
class RowJourney(Journey):
    """One way of rows along a route."""

    def __init__(self, route: Route, *, is_outward: bool) -> None:
        super().__init__(is_outward=is_outward)
        self.route = route

    def start(self, leaving: Tensor, *, is_outward: bool) -> tuple[Tensor, Callable[[], Tensor]]:
        """See `Journey`: (rows, features) go, and those that come are of other ranks."""
        view, route = self.route.view, self.route
        assert view.group is not None, "a group of one member exchanges nothing"
        send_counts, receive_counts = (route.sent, route.received) if is_outward else (route.received, route.sent)
        arriving = leaving.new_empty((sum(receive_counts), *leaving.shape[1:]))
        is_by_way = runs_on_gloo(leaving.device, view.group) and leaving.device.type != "cpu"
        sent = leaving.cpu() if is_by_way else leaving.contiguous()
        buffer = torch.empty_like(arriving, device="cpu") if is_by_way else arriving
        work = dist.all_to_all_single(buffer, sent, receive_counts, send_counts, group=view.group, async_op=True)

        def wait(sent: Tensor = sent) -> Tensor:  # the default keeps the sent rows alive until they have left
            if work is not None:
                work.wait()
            return arriving.copy_(buffer) if is_by_way else arriving

        return arriving, wait

    def sort(self, arrived: Tensor) -> Tensor:
        """See `Journey`: from rank by rank to expert by expert, and within one by rank."""
        return arrived.index_select(0, self.route.by_expert)

    def unsort(self, rows: Tensor) -> Tensor:
        """See `Journey`."""
        return rows.index_select(0, self.route.by_rank)


@final
class AllToAllDispatcher:
    """A copy of a token goes to each of its experts, by all-to-all, and what that makes of it comes back."""

    def __init__(self, view: GroupView, num_experts: int, note: Callable[[int], None]) -> None:
        """`num_experts`: those of all ranks together.  `note` hears how many rows came."""
        self._view, self._num_experts, self._note = view, num_experts, note

    def mix(
        self,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        compute: Compute,
        meanwhile: Callable[[], Tensor | None],
    ) -> tuple[Tensor, Tensor | None]:
        """See `Dispatcher`."""
        order, places, counts = arrange(chosen, self._num_experts)
        route = find_route(counts, chosen.numel(), self._view)
        self._note(route.num_taken)
        outward, back = RowJourney(route, is_outward=True), RowJourney(route, is_outward=False)
        # (tokens, hidden) → (tokens · top_k, hidden), sorted by expert; the shared expert computes while they travel.
        leaving = leave(spread(tokens, order, places), outward)
        beside = meanwhile()
        made = compute(arrive(leaving, outward), route.counts)
        return combine(arrive(leave(made, back), back), weights, order, places).to(tokens.dtype), beside

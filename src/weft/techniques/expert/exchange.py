"""Rows travel to the ranks that have their experts, and what these make of them travels back.

Every rank of the group has as many experts, those of rank r following those of rank r − 1, so that rows sorted by
expert are sorted by rank.  First a rank tells every other how many rows come for each of its experts; then the rows
themselves go by one uneven all-to-all.  Gradients take the same ways in the other direction.

An exchange is begun (`leave`) and ended (`arrive`), forward and backward: what is computed in between hides it.  Call
on every rank of the group in the same order, also on one without a row; a rank to which no row comes gets none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.comm import GroupView, runs_on_gloo
from weft.techniques.expert.shares import rows_of_expert


@dataclass(frozen=True, slots=True)
class Route:
    """Where the rows of one call go, and in which order they are once they are there."""

    view: GroupView
    given: list[int]
    """Rows to each member."""
    taken: list[int]
    """Rows from each member."""
    counts: Tensor
    """int64, (own experts,): rows for each of this rank's experts."""
    by_expert: Tensor
    """int64, (rows taken,): which of the rows as they come, by rank, stands where once they are sorted by expert."""
    by_rank: Tensor
    """Its inverse."""

    @property
    def num_taken(self) -> int:
        """Rows that come to this rank."""
        return sum(self.taken)


def find_route(counts: Tensor, num_rows: int, view: GroupView) -> Route:
    """Tell the group how many rows come, and return their route.  Collective: one exchange of `counts`.

    `counts` are int64, (experts,): how many of this rank's `num_rows` rows each expert of the whole model gets.  Where
    numbers are not real (a dry run), every rank has as many rows as this one, and experts get equally many.
    """
    assert view.group is not None, "a group of one member exchanges nothing"
    own = counts.numel() // view.size
    wire = torch.device("cpu") if runs_on_gloo(counts.device, view.group) else counts.device
    arrived = counts.new_empty(counts.numel(), device=wire)
    dist.all_to_all_single(arrived, counts.contiguous().to(wire), group=view.group)
    is_real = type(counts) is Tensor and not counts.is_meta
    to_all = counts.tolist() if is_real else [rows_of_expert(num_rows, counts.numel(), e) for e in range(len(counts))]
    mine = to_all[view.index * own : (view.index + 1) * own]
    from_all = arrived.tolist() if is_real else mine * view.size
    runs = torch.tensor(from_all, device=counts.device)
    expert_of = torch.arange(own, device=counts.device).repeat(view.size)
    by_expert = expert_of.repeat_interleave(runs, output_size=sum(from_all)).argsort(stable=True)
    return Route(
        view=view,
        given=[sum(to_all[at : at + own]) for at in range(0, len(to_all), own)],
        taken=[sum(from_all[at : at + own]) for at in range(0, len(from_all), own)],
        counts=runs.view(view.size, own).sum(0),
        by_expert=by_expert,
        by_rank=by_expert.argsort(),
    )


@final
@dataclass(slots=True)
class Journey:
    """One way of rows along a route: `is_outward` to the experts, else back."""

    route: Route
    is_outward: bool
    _wait: Callable[[], Tensor] | None = field(default=None)

    def begin(self, leaving: Tensor, *, is_outward: bool) -> Tensor:
        """Start to send (rows, features); return what will hold the rows that come, which `end` returns."""
        view, route = self.route.view, self.route
        assert self._wait is None, "an exchange was begun before the last one had ended"
        assert view.group is not None, "a group of one member exchanges nothing"
        given, taken = (route.given, route.taken) if is_outward else (route.taken, route.given)
        arriving = leaving.new_empty((sum(taken), *leaving.shape[1:]))
        is_by_way = runs_on_gloo(leaving.device, view.group) and leaving.device.type != "cpu"
        sent = leaving.cpu() if is_by_way else leaving.contiguous()
        buffer = torch.empty_like(arriving, device="cpu") if is_by_way else arriving
        work = dist.all_to_all_single(buffer, sent, taken, given, group=view.group, async_op=True)

        def wait(sent: Tensor = sent) -> Tensor:  # what leaves must stay until it has left
            if work is not None:
                work.wait()
            return arriving.copy_(buffer) if is_by_way else arriving

        self._wait = wait
        return arriving

    def end(self) -> Tensor:
        """Wait for the rows, and return them."""
        assert self._wait is not None, "an exchange was ended that had not begun"
        wait, self._wait = self._wait, None
        return wait()


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        leaving = rows if journey.is_outward else rows.index_select(0, journey.route.by_rank)
        return journey.begin(leaving, is_outward=journey.is_outward)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        journey: Journey = ctx.journey
        said = journey.end()
        return said if journey.is_outward else said.index_select(0, journey.route.by_expert), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, arriving: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        journey.end()
        if journey.is_outward:
            return arriving.index_select(0, journey.route.by_expert)
        return torch.ops.aten._unsafe_view(arriving, arriving.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        journey: Journey = ctx.journey
        leaving = grads[0].index_select(0, journey.route.by_rank) if journey.is_outward else grads[0]
        journey.begin(leaving, is_outward=not journey.is_outward)
        # What is under way has another shape than what autograd asks for: the other node takes it from the journey.
        return grads[0].new_zeros(()).expand_as(leaving), None


def leave(rows: Tensor, journey: Journey) -> Tensor:
    """Send rows, (rows, features), on their journey; return what `arrive` takes, and nothing else may read."""
    return _Leave.apply(rows, journey)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def arrive(arriving: Tensor, journey: Journey) -> Tensor:
    """Return the rows that came: outward sorted by expert, and within one by rank; back as they had left."""
    return _Arrive.apply(arriving, journey)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

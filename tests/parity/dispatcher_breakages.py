"""Pieces of the ways between tokens and experts of other ranks, broken on purpose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from weft.techniques.expert import exchange, gathered, journey

Patch = tuple[Any, str, Any]


def _rows_as_they_came() -> list[Patch]:
    """Rows are taken to be sorted by expert, and are by the rank that sent them."""
    route_of = exchange.find_route

    def unsorted(*of: Any) -> Any:
        route = route_of(*of)
        as_they_came = torch.arange(route.num_taken)
        return replace(route, by_expert=as_they_came, by_rank=as_they_came)

    return [(exchange, "find_route", unsorted)]


def _gradients_of_rows_stay() -> list[Patch]:
    """What experts elsewhere say of a rank's rows is lost: the counts are right, the numbers zero."""

    def nothing(ctx: Any, *grads: Tensor) -> Any:
        said = ctx.journey.end()
        return torch.zeros_like(said) if ctx.journey.is_outward else ctx.journey.sort(said), None

    return [(journey._Leave, "backward", staticmethod(nothing))]


def _weights_of_the_choices_before() -> list[Patch]:
    """What comes back is weighted as if a token's choices stood in the other order."""
    combine = exchange.combine

    def turned(rows: Tensor, weights: Tensor, *of: Any) -> Tensor:
        return combine(rows, weights.flip(1), *of)

    return [(exchange, "combine", turned)]


def _sums_of_own_experts_alone() -> list[Patch]:
    """Of gathered tokens a rank keeps what its own experts make of them."""

    def unsummed(self: Any, every: Tensor) -> Any:
        own = every.chunk(self._view.size)[self._view.index].clone()
        return own, lambda: own

    return [(gathered.TokenJourney, "_sum", unsummed)]


def _gathered_weights_by_rank() -> list[Patch]:
    """What choices count is heard of from a rank's own experts alone."""
    gather = gathered.gather_samples

    def alone(x: Tensor, view: Any, dim: int) -> Tensor:
        every = gather(x.detach(), view, dim)
        mine = slice(view.index * len(x), (view.index + 1) * len(x))
        return torch.cat([every[: mine.start], x, every[mine.stop :]])

    return [(gathered, "gather_samples", alone)]


PATCHES: Mapping[str, Callable[[], list[Patch]]] = {
    "rows as they came": _rows_as_they_came,
    "weights of the choices before": _weights_of_the_choices_before,
    "gradients of rows stay": _gradients_of_rows_stay,
    "sums of own experts alone": _sums_of_own_experts_alone,
    "gathered weights by rank": _gathered_weights_by_rank,
}

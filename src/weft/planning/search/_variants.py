"""Choices of a split besides its sizes: schemes, and how the axes lie on the hardware."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations, product
from typing import NamedTuple

from weft.config.cluster import Cluster
from weft.config.plan import AXES, Axis
from weft.planning.price import CostModel, check_layout
from weft.planning.search._space import Space, divisors
from weft.techniques.cost_terms import Layout

_INNER: tuple[Axis, ...] = ("context", "tensor")


def variants(cost_model: CostModel, space: Space, layout: Layout) -> Iterator[Layout]:
    """Yield a layout with every choice that changes what its blocks cost: sequence parallelism and the schemes."""
    has_tensor, has_context = layout.tensor > 1, layout.context > 1
    for parallel, scheme, way, exchange in product(
        space.sequence_parallels if has_tensor else (False,),
        space.tensor_schemes if has_tensor else space.tensor_schemes[:1],
        space.context_schemes if has_context else (layout.context_scheme,),
        space.expert_exchanges if layout.expert > 1 else (layout.expert_exchange,),
    ):
        variant = replace(
            layout,
            sequence_parallel=parallel,
            tensor_scheme=scheme,
            context_scheme=way,
            expert_exchange=exchange,
        )
        if not (has_tensor or has_context) or not check_layout(cost_model.profile, cost_model.cluster, variant):
            yield variant


def has_even_islands(cluster: Cluster) -> bool:
    """Whether fewer ranks never lie across more islands than more ranks do: 2 of 6 lie across two islands of 3."""
    return not any(tier.devices & (tier.devices - 1) for tier in cluster.links[:-1])


class StageVariant(NamedTuple):
    """One stage of a layout in one order of its axes."""

    layout: Layout
    inside: int
    """Data ranks that lie inside another axis, rounded down to a power of two; 0: whatever their number."""
    lent: int
    """Ranks that the expert axis borrows from those that shard; 0: there are no experts."""


def arrangements(cost_model: CostModel, space: Space, layout: Layout, *, most_data: int) -> Iterator[StageVariant]:
    """Yield one stage of a layout in every order of its tensor, context and data axes.

    Where a stage's ranks lie among those of others changes no figure for the better, so what these layouts cost is the
    least of all orders.

    Args:
        most_data: the most data ranks that a split with these axes has.
    """
    lents = [n for n in divisors(layout.expert) if layout.context % (layout.expert // n) == 0 and n <= most_data]
    for order in _orders(space, layout, most_data):
        outside = order[: order.index("shard")]
        is_inside = most_data > 1 and any(getattr(layout, axis) > 1 for axis in outside if axis in _INNER)
        for lent in lents if layout.expert > 1 else (0,):
            sizes = _sizes(cost_model, space, most_data) if is_inside and lent in (0, layout.expert) else (0,)
            for inside in sizes:
                yield StageVariant(_one_stage(cost_model, layout, order, inside, lent, most_data), inside, lent)


def _orders(space: Space, layout: Layout, most_data: int) -> Iterator[tuple[Axis, ...]]:
    data: tuple[Axis, ...] = ("replicate", "shard")
    inner: list[tuple[Axis, ...]] = [(axis,) for axis in _INNER if getattr(layout, axis) > 1]
    large = [data, *inner] if most_data > 1 else inner
    if space.orders is not None:
        yield from space.orders
        return
    yield from (_completed(chosen) for chosen in permutations(large))


def _sizes(cost_model: CostModel, space: Space, most: int) -> list[int]:
    """Powers of two from 2 on; beyond the largest island all are alike.  A single data rank lies outside of the others,
    unless the order is given."""
    island = max((tier.devices for tier in cost_model.cluster.links[:-1]), default=1)
    least = 1 if space.orders is None else 0
    return [1 << power for power in range(least, max(1, min(most, island).bit_length() - 1) + 1)]


def _one_stage(
    cost_model: CostModel, layout: Layout, order: tuple[Axis, ...], inside: int, lent: int, most_data: int
) -> Layout:
    if (
        not cost_model.cluster.has_accelerators
    ):  # a group has one split, of which all is known but who lends ranks to experts
        data = layout.data
        shard = data if lent == layout.expert else lent or layout.shard
        return replace(layout, order=order, shard=shard, replicate=data // shard) if data % shard == 0 else layout
    shard = inside or (min(2, most_data) if has_even_islands(cost_model.cluster) else 1)
    if lent:
        shard = lent if lent < layout.expert else -(-shard // lent) * lent
    return replace(layout, pipeline=1, replicate=1, shard=shard, order=order)


def _completed(chosen: Sequence[tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """All axes, the chosen ones innermost; experts inside the ranks that they borrow."""
    inner: list[Axis] = [axis for axes in chosen for axis in axes]
    outer: list[Axis] = [axis for axis in AXES if axis not in inner and axis != "expert"]
    order: list[Axis] = [*outer, *inner]
    order.insert(max(order.index("replicate"), order.index("shard")) + 1, "expert")
    return tuple(order)

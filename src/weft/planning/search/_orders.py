"""Orders of the axes on the hardware: every one that lays some group on other links than another order does."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

from weft.config.plan import AXES, Axis
from weft.techniques.cost_terms import Layout

_RANKED: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")
"""Axes with ranks of their own, outermost first; `expert` borrows and stands before context."""

Signature = tuple[tuple[Axis, tuple[int, ...]], ...]
"""How many ranks of a group lie in one island of each tier, for each axis larger than 1."""


def distinct_orders(layout: Layout, tiers: tuple[int, ...]) -> Iterator[tuple[Axis, ...]]:
    """Yield orders of the axes, the layout's own first, one for each way in which groups can lie on the tiers.

    Args:
        tiers: devices of an island of each tier of links, innermost first.
    """
    large: list[Axis] = [axis for axis in _RANKED if getattr(layout, axis) > 1]
    seen: set[Signature] = set()
    own: tuple[Axis, ...] = tuple(axis for axis in layout.order if axis in large)
    for order in (own, *permutations(large)):
        # Orders in which every group has as many ranks on each tier cost the same: one of them is enough.
        signature = _signature(layout, order, tiers)
        if signature not in seen:
            seen.add(signature)
            yield _complete(order)


def outermost(order: tuple[Axis, ...], axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Return an order with some axes put before all others."""
    return (*(axis for axis in order if axis in axes), *(axis for axis in order if axis not in axes))


def _signature(layout: Layout, order: tuple[Axis, ...], tiers: tuple[int, ...]) -> Signature:
    stride = 1
    signature: list[tuple[Axis, tuple[int, ...]]] = []
    # The last axis is the fastest: its neighbours are neighbouring devices.
    for axis in reversed(order):
        size = int(getattr(layout, axis))
        signature.append((axis, tuple(_ranks_together(stride, size, island) for island in tiers)))
        stride *= size
    return tuple(sorted(signature))


def _ranks_together(stride: int, size: int, island: int) -> int:
    """Most ranks of a group, `stride` devices apart, that lie in one island of `island` devices."""
    return min(size, max(1, island // stride))


def _complete(order: tuple[Axis, ...]) -> tuple[Axis, ...]:
    """Put axes of size 1 outermost, where they change nothing, and `expert` inside the ranks that it borrows."""
    named: list[Axis] = [*(axis for axis in _RANKED if axis not in order), *order]
    named.insert(max(named.index("replicate"), named.index("shard")) + 1, "expert")
    assert sorted(named) == sorted(AXES)
    return tuple(named)

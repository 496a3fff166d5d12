"""The bucket of a finalist: what a closed form says, and neighbours of it as long as the price falls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.config.plan import DataParallelPlan
from weft.planning.price import CostModel
from weft.planning.search._space import Space
from weft.techniques.buckets.sizes import LARGEST_BUCKET, SMALLEST_BUCKET, next_bucket
from weft.techniques.cost_terms import Layout

USUAL_BUCKET_BYTES = DataParallelPlan().bucket_bytes
"""Bucket size with which estimates are made."""
_STEPS = (4, 1)
"""Steps of the ladder of `next_bucket`: twice and half, then the sizes between."""


class PricedLayout(NamedTuple):
    """A layout with its price."""

    score: float
    layout: Layout


def sized(cost_model: CostModel, space: Space, layout: Layout, *, most: int = LARGEST_BUCKET) -> Layout:
    """Return a layout with the bucket of the closed form, where the space leaves it open, and at most `most`."""
    bucket = cost_model.bucket(layout, low=_least(space)) if space.bucket_bytes is None else None
    return layout if bucket is None else replace(layout, bucket_bytes=max(min(bucket, most), _least(space)))


def with_best_bucket(
    cost_model: CostModel, space: Space, start: PricedLayout, price: Callable[[Layout], PricedLayout | None]
) -> PricedLayout:
    """Return the best bucket for a priced layout: from the closed form's, up and down as long as that is better."""
    if space.bucket_bytes is not None or cost_model.bucket(start.layout, low=_least(space)) is None:
        return start
    best = better(start, price(sized(cost_model, space, start.layout))) or start
    for steps in (sign * step for step in _STEPS for sign in (1, -1)):
        while True:
            size = next_bucket(best.layout.bucket_bytes, steps)
            if not _least(space) <= size <= LARGEST_BUCKET:
                break
            candidate = better(best, price(replace(best.layout, bucket_bytes=size)))
            if candidate is None or candidate is best:
                break
            best = candidate
    return best


def _least(space: Space) -> int:
    return max(SMALLEST_BUCKET, *(space.first_bucket_bytes or (0,)))


def better(one: PricedLayout | None, other: PricedLayout | None) -> PricedLayout | None:
    """Return the lower score; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.score < one.score else one

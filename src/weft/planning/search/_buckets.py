"""The bucket of a finalist: what a closed form says, and neighbours of it as long as the price falls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from weft.config.plan import DataParallelPlan
from weft.planning.price import Pricer
from weft.planning.search._space import Space
from weft.techniques.buckets.sizes import LARGEST_BUCKET, SMALLEST_BUCKET, next_bucket
from weft.techniques.cost_terms import Layout

USUAL_BUCKET_BYTES = DataParallelPlan().bucket_bytes
"""Bucket size with which estimates are made."""
_STEPS = (4, 1)
"""Steps of the ladder of `next_bucket`: twice and half, then the sizes between."""


class Priced(NamedTuple):
    """A layout with its price."""

    score: float
    layout: Layout


def sized(pricer: Pricer, space: Space, layout: Layout, *, most: int = LARGEST_BUCKET) -> Layout:
    """Return a layout with the bucket of the closed form, where the space leaves it open, and at most `most`."""
    wanted = pricer.bucket(layout, low=_least(space)) if space.bucket_bytes is None else None
    return layout if wanted is None else replace(layout, bucket_bytes=max(min(wanted, most), _least(space)))


def with_best_bucket(pricer: Pricer, space: Space, start: Priced, price: Callable[[Layout], Priced | None]) -> Priced:
    """Return the best bucket for a priced layout: from the closed form's, up and down as long as that is better."""
    if space.bucket_bytes is not None or pricer.bucket(start.layout, low=_least(space)) is None:
        return start
    best = better(start, price(sized(pricer, space, start.layout))) or start
    for steps in (sign * step for step in _STEPS for sign in (1, -1)):
        while True:
            size = next_bucket(best.layout.bucket_bytes, steps)
            if not _least(space) <= size <= LARGEST_BUCKET:
                break
            found = better(best, price(replace(best.layout, bucket_bytes=size)))
            if found is None or found is best:
                break
            best = found
    return best


def _least(space: Space) -> int:
    return max(SMALLEST_BUCKET, *(space.first_bucket_bytes or (0,)))


def better(one: Priced | None, other: Priced | None) -> Priced | None:
    """Return the lower score; the first of equals."""
    if one is None or other is None:
        return one or other
    return other if other.score < one.score else one

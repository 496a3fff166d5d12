"""`--next`: what would help most beyond the best plan: a larger batch, other links, more memory, another permission."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import get_args

from weft.config.cluster import Cluster
from weft.config.plan import Plan
from weft.config.recipe import Precision
from weft.formatting import format_percent
from weft.planning.explain._text import layout_line
from weft.planning.price import CostModel
from weft.planning.search import SearchResult, Space, search
from weft.techniques.cost_terms import Layout

_WORTH = 0.002
"""Gains below are within what rounding to whole microbatches does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuggestedChange:
    """Something that is not the planner's to decide, and what it would bring."""

    what: str
    tokens_ratio: float
    """Tokens per second with it over those of the best plan."""
    layout: Layout

    @property
    def line(self) -> str:
        gain = self.tokens_ratio - 1
        if gain < _WORTH:
            return f"{self.what} would not help"
        return f"{self.what}: {format_percent(gain * 100)} more tokens per second"


def next_changes(result: SearchResult, cost_model: CostModel) -> list[SuggestedChange]:
    """Return changes of the recipe and of the cluster by what they would bring, best first; empty where nothing fits.

    A changed batch or link is priced under the best plan's layout; more memory or another permission is searched again.
    """
    if not result.best:
        return []
    best = result.best[0].layout
    changes = [*_batch(result, cost_model, best), *_links(result, cost_model, best), *_searched(result, cost_model)]
    return sorted(changes, key=lambda change: -change.tokens_ratio)


def _batch(result: SearchResult, cost_model: CostModel, best: Layout) -> Iterator[SuggestedChange]:
    doubled = replace(best, microbatches=2 * best.microbatches)
    before = cost_model.predict(best, exact=True).step_seconds
    ratio = 2 * before / cost_model.predict(doubled, exact=True).step_seconds
    what = f"a global batch of {2 * result.global_batch_size:,} samples"
    yield SuggestedChange(what=what, tokens_ratio=ratio, layout=doubled)


def _links(result: SearchResult, cost_model: CostModel, best: Layout) -> Iterator[SuggestedChange]:
    before = cost_model.predict(best, exact=True).step_seconds
    for index, tier in enumerate(result.cluster.links):
        alone = tier.alone_bytes_per_second
        faster = replace(
            tier,
            bandwidth_bytes_per_second=2 * tier.bandwidth_bytes_per_second,
            alone_bytes_per_second=None if alone is None else 2 * alone,
            measured=(),
        )
        links = (*result.cluster.links[:index], faster, *result.cluster.links[index + 1 :])
        other = CostModel(
            result.profile, replace(result.cluster, links=links), cost_model.framework, cost_model.calibration
        )
        ratio = before / other.predict(best, exact=True).step_seconds
        yield SuggestedChange(what=f"twice the bandwidth of {tier.name}", tokens_ratio=ratio, layout=best)


def _searched(result: SearchResult, cost_model: CostModel) -> Iterator[SuggestedChange]:
    more = result.cluster.with_memory(1.5)
    yield from _search_again(result, cost_model, "half as much memory again per device", cluster=more)
    precisions = result.space.precisions
    if not {"bf16", "fp16", "fp8"} & set(precisions) and _has_peak(result.cluster, "bf16"):
        space = replace(result.space, precisions=(*precisions, "bf16"), refuses=_permitting(result.space))
        yield from _search_again(result, cost_model, 'permit.precision with "bf16"', space=space)


def _permitting(space: Space) -> Callable[[Plan], str] | None:
    """Return the problem of a plan that needs a precision that is not permitted: the same plan is asked about in a
    permitted one."""
    refuses = space.refuses
    permitted = next((argument for argument in get_args(Precision) if argument in space.precisions), None)
    if refuses is None or permitted is None:
        return refuses
    return lambda plan: refuses(replace(plan, compute=replace(plan.compute, precision=permitted)))


def _search_again(
    result: SearchResult, cost_model: CostModel, what: str, **changed: object
) -> Iterator[SuggestedChange]:
    asked = {"cluster": result.cluster, "space": result.space, **changed}
    cluster, space = asked["cluster"], asked["space"]
    assert isinstance(cluster, Cluster)
    result_there = search(
        result.profile,
        cluster,
        global_batch_size=result.global_batch_size,
        objective=result.objective,
        space=space,  # pyright: ignore[reportArgumentType]  it is the result's own, or one made from it
        framework=cost_model.framework,
        calibration=cost_model.calibration,
        top=1,
    )
    if result_there.best:
        ratio = result_there.best[0].tokens_per_second / result.best[0].tokens_per_second
        words = f"{what} ({layout_line(result_there.best[0].layout)})" if ratio - 1 >= _WORTH else what
        yield SuggestedChange(what=words, tokens_ratio=ratio, layout=result_there.best[0].layout)


def _has_peak(cluster: Cluster, precision: str) -> bool:
    return all(precision in node.devices.peak_flops for node in cluster.nodes)

"""Search within what another system can do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from weft.errors import PlanError
from weft.interop.systems._emit import job_of, node_size
from weft.interop.systems._system import System
from weft.model.profile import ModelSizes
from weft.planning.search import Candidate, Counts, SearchResult, Space
from weft.techniques.cost_terms import Layout

_AXES = ("pipeline", "tensor", "context", "expert")
_KEPT: tuple[tuple[str, ...], ...] = (_AXES, ("pipeline", "tensor"), ("tensor",), ())
"""Sets of axes that the nearest plan keeps from a given one; tried from the largest to the smallest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NearestPlans:
    """The best plans that a system can run."""

    result: SearchResult
    """Plans that the system can run, best first."""
    kept: tuple[str, ...] = ()
    """Axes of the given layout that they keep; empty where none was given, or none can be kept."""


def search_within(
    system: System,
    sizes: ModelSizes,
    space: Space,
    search: Callable[[Space], SearchResult],
    *,
    near: Layout | None = None,
) -> NearestPlans:
    """Return the best plans that a system can run, or those nearest to a layout: as many axes kept as can be.

    Args:
        space: what may be chosen; the system narrows it.
        search: returns the best plans of a space.

    Raises:
        PlanError: the system cannot train the model, or none of its plans fits.
    """
    lacks = list(dict.fromkeys(system.lacks(sizes)))
    if lacks:
        listed = "\n".join(f"- {lack}" for lack in lacks)
        raise PlanError(
            f"{system.facts.title} has no words for {sizes.name}:\n{listed}\nUse another system, or --eject."
        )
    # A user who names a plan wants one like it: as many of its axes as the system can keep, fewer only where none fits.
    for kept in _KEPT if near is not None else ((),):
        results = list(_results(system, sizes, space, search, near, kept))
        if any(result.best for result in results):
            return NearestPlans(result=_joined(results), kept=kept)
    raise PlanError(
        f"{system.facts.title} has no plan for {sizes.name} on this cluster that fits into memory and keeps the"
        " settings that were given. Use more devices, another global batch, or fewer --set."
    )


def _results(
    system: System,
    sizes: ModelSizes,
    space: Space,
    search: Callable[[Space], SearchResult],
    near: Layout | None,
    kept: Sequence[str],
) -> Iterator[SearchResult]:
    for part in system.spaces(sizes, space):
        narrowed = _keeping(part, near, kept)
        if narrowed is None:
            continue
        result = search(narrowed)
        size = node_size(result.cluster)
        runs = [
            candidate
            for candidate in result.best
            if not any(system.refusals(job_of(result, candidate, sizes))) and _fills_nodes(candidate, size)
        ]
        yield replace(result, best=tuple(runs))


def _fills_nodes(candidate: Candidate, node: int) -> bool:
    world = candidate.layout.world_size
    return world <= node or world % node == 0


def _keeping(space: Space, near: Layout | None, kept: Sequence[str]) -> Space | None:
    """The part of a space with some axes of a layout; None where it has not got them."""
    if near is None:
        return space
    for name in kept:
        size, field = getattr(near, name), f"{name}s"
        if size not in getattr(space, field):
            return None
        space = replace(space, **{field: (size,)})
    return space


def _joined(results: Sequence[SearchResult]) -> SearchResult:
    best: dict[Layout, Candidate] = {}
    for candidate in sorted((option for result in results for option in result.best), key=lambda option: option.score):
        best.setdefault(candidate.layout, candidate)
    return replace(results[0], best=tuple(best.values()), counts=_summed([result.counts for result in results]))


def _summed(counts: Sequence[Counts]) -> Counts:
    names = [field.name for field in fields(Counts) if field.name not in ("invalid", "refused")]
    return Counts(
        invalid=_by_cause(count.invalid for count in counts),
        refused=_by_cause(count.refused for count in counts),
        **{name: sum(getattr(count, name) for count in counts) for name in names},
    )


def _by_cause(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for table in counts:
        for cause, count in table.items():
            sums[cause] = sums.get(cause, 0) + count
    return sums

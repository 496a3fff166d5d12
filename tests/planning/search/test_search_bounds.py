"""No bound is above what it bounds, and a search finds what loops over all layouts of a space find."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from brute_force import best_by_brute_force, score_of
from drawn_spaces import CORES, SPECS, WIDE, Drawn, drawn

from weft.planning.search import Space, search
from weft.planning.search._bounds import Floats
from weft.planning.search._finalists import Finalists
from weft.planning.search._frontier import Frontier
from weft.planning.search._rows import LayoutRows
from weft.planning.search._search import SearchState
from weft.planning.search._space import without_offload
from weft.planning.search._splits import enumerate_splits
from weft.techniques.cost_terms import WEFT, Layout
from weft.techniques.zero.cost import reduces_once

SAME = (
    "pipeline", "data", "context", "tensor", "expert", "schedule", "chunks", "microbatch_size", "precision",
    "sequence_parallel", "tensor_scheme", "context_scheme", "expert_exchange",
)  # fmt: skip


class Row(NamedTuple):
    bound: float
    least_shard: int
    shard: int


class Unlimited(Finalists):
    """Prices nothing, so that everything is bounded."""

    @property
    def limit(self) -> float:
        return math.inf

    def explore(self, row: Layout, least_shard: int) -> None:
        pass


class Recording(Frontier):
    """Keeps all rows, each with the highest bound on the way to it: whatever that is above hides the row."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.space, self.bound, self.rows = space, -math.inf, dict[tuple[object, ...], list[Row]]()

    def push(self, bound: float, look: Callable[[Finalists], None]) -> None:
        highest = max(bound, self.bound)

        def here(finalists: Finalists) -> None:
            before, self.bound = self.bound, highest
            look(finalists)
            self.bound = before

        super().push(bound, here)

    def push_rows(self, bounds: Floats, look: Any) -> None:
        assert (np.diff(bounds) >= 0).all()
        table, bases = look.args
        self._keep(np.maximum(bounds, self.bound), table, bases)

    def _keep(self, bounds: Floats, table: LayoutRows, bases: tuple[Layout, ...]) -> None:
        for place, bound in enumerate(bounds):
            layout = table.layout(place, bases[int(table.case[place])], self.space)
            row = Row(float(bound), int(table.least_shard[place]), layout.shard)
            self.rows.setdefault(key_of(layout), []).append(row)


def key_of(layout: Layout) -> tuple[object, ...]:
    """What all layouts of a row have in common; where nothing is shared out, all ways of sharding are one."""
    same = tuple(getattr(layout, name) for name in SAME)
    if layout.data * layout.context == 1:
        return same
    several = layout.microbatches > 1 or layout.pipeline > 1
    once = layout.uneven or reduces_once(layout, WEFT)  # shares that differ leave whole gradients either way
    if layout.zero == 2 and layout.pipeline > 1 and layout.reduce_every == "auto":
        return *same, 1, False  # gradients stay whole, as under ZeRO-1
    return *same, layout.zero, layout.zero >= 2 and several and once


def all_rows(case: Drawn) -> dict[tuple[object, ...], list[Row]]:
    """Every row of a case's space, with the bounds of each, by what its layouts have in common."""
    space = case.space if case.cluster.has_accelerators else without_offload(case.space)
    state = SearchState(
        cost_model=case.cost_model, space=space, objective=case.objective, global_batch_size=case.batch, optimizer=None
    )
    devices = case.cluster.num_devices
    splits, _ = enumerate_splits(space, devices=devices, global_batch_size=case.batch)
    frontier, finalists = Recording(space), Unlimited(case.cost_model, space, case.objective, state.acceptance)
    for precision in space.precisions:
        state._begin(frontier, splits, state._base(precision))  # pyright: ignore[reportPrivateUsage]
    frontier.run(finalists)
    return frontier.rows


def above(case: Drawn) -> list[tuple[float, float, Layout]]:
    """Layouts that fit and are priced below all bounds of their rows: (bound, price, layout).  Splits that others
    outdo, which have no rows, are left to the test of what a search finds."""
    rows, found = all_rows(case), list[tuple[float, float, Layout]]()
    cluster = case.cluster
    splits, _ = enumerate_splits(case.space, devices=cluster.num_devices, global_batch_size=case.batch)
    there = set(
        zip(splits.pipeline, splits.tensor, splits.context, splits.expert, splits.data, splits.size, strict=True)
    )
    for layout in case.layouts:
        sizes = (layout.pipeline, layout.tensor, layout.context, layout.expert, layout.data, layout.microbatch_size)
        if sizes not in there:
            continue
        score = score_of(case.cost_model, layout, case.objective)
        held = [row.bound for row in rows.get(key_of(layout), ()) if row.least_shard <= layout.shard <= row.shard]
        if min(held, default=math.inf) > score * (1 + 1e-9) and case.cost_model.predict(layout).fits:
            found.append((min(held, default=math.inf), score, layout))
    return found


def searched(case: Drawn) -> float:
    """The score of the plan that a search of a case's space finds; infinite where none fits."""
    result = search(
        case.profile, case.cluster, global_batch_size=case.batch, space=case.space, cost_model=case.cost_model,
        calibration=case.cost_model.calibration, objective=case.objective, top=1,
    )  # fmt: skip
    return result.best[0].score if result.best else math.inf


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.parametrize("specs", [SPECS, CORES, WIDE], ids=["few", "cores", "wide"])
def test_no_bound_is_above_a_layout_that_fits(specs: tuple[str, ...], seed: int) -> None:
    """Were one, the search would pass over that layout without a word."""
    case = drawn(f"bounds {seed}", specs=specs, most=600)
    assert not above(case), str(case)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("specs", [SPECS, CORES], ids=["accelerators", "cores"])
def test_a_search_finds_the_best_of_all_layouts(specs: tuple[str, ...], seed: int) -> None:
    """Or a better one: its buckets may be smaller than those that are listed."""
    case = drawn(f"best {seed}", specs=specs, most=600)
    best = best_by_brute_force(case.cost_model, case.layouts, case.objective)
    assert searched(case) == pytest.approx(best.score, rel=1e-9), (str(case), best.layout)

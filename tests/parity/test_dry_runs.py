"""What every rank of a cell is predicted to send is what its dry run sends: drawn cells in `make test`, all of them in
`make parity`.  Ranks with equal programs are one: of these the first takes its step, and of every cell its neighbours'
collectives are compared with the first rank's.
"""

from __future__ import annotations

from collections.abc import Callable

import cells
import matrix
import pytest
from cells import Cell
from parity_run import with_precision

from weft.config.recipe import ModelRecipe, Recipe
from weft.model.blueprint import Blueprint
from weft.model.build import build_model
from weft.verify.dry_run import dry_run_world, trace_sends
from weft.verify.program import occasions_of, program_of

Build = Callable[[Recipe], Blueprint]
CELLS = tuple(cell for cell in matrix.FULL if cell.world > 1)


def shown(cell: Cell) -> frozenset[str]:
    """What a cell is drawn for: its model and techniques one by one, not in pairs."""
    return matrix.techniques(cell) | {cell.model, cell.plan.pipeline_parallel.schedule}


DRAWN = matrix.covering(CELLS, shown)
REST = tuple(cell for cell in CELLS if cell not in DRAWN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return cells.models(tmp_path_factory.mktemp("models"))


def unlike_ranks(recipe: Recipe, cell: Cell, build: Build = build_model) -> tuple[int, ...]:
    """The first of all ranks that send the same."""
    outline, found = trace_sends(build(recipe)), dict[frozenset[object], int]()
    occasions = occasions_of(recipe, cell.plan, 0, is_first=True, some_unused=True)
    for rank in range(cell.world):
        traffic = program_of(recipe, cell.plan, outline, rank, cuts_anywhere=False).traffic(*occasions)
        found.setdefault(frozenset(traffic.items()), rank)
    return tuple(found.values())


def check(cell: Cell, models: dict[str, ModelRecipe], precision: str = "fp64", build: Build = build_model) -> None:
    recipe, plan = cells.recipe_of(models[cell.model], precision), with_precision(cell.plan, precision)
    report = dry_run_world(recipe, plan, lambda: build(recipe), unlike_ranks(recipe, cell, build))
    assert report.problems == ()
    for rank in report.asked:
        assert rank.issued
        assert rank.unpredicted == ()
        assert rank.unlike_predicted == (), f"rank {rank.rank}"


@pytest.mark.parametrize("cell", DRAWN, ids=str)
def test_a_drawn_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models)


@pytest.mark.parity
@pytest.mark.parametrize("cell", REST, ids=str)
def test_every_dry_run_sends_what_is_predicted(
    models: dict[str, ModelRecipe], cell: Cell, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("--parity-backend") != "gloo":
        pytest.skip("a dry run sends by no backend: once is enough")
    check(cell, models)

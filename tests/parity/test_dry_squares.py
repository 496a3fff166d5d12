"""What ranks of a square are predicted to send is what their dry runs send, for families that looking at a model shows:
norms, products and tables are recognised in a dry run, too, whose tensors have no values.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import looked_grids
import pytest
import two_stacks
import whole_grids
import wide_grids
from cells import Cell
from test_dry_runs import check

from weft.analysis.blueprint import build_blueprint
from weft.config.recipe import ModelRecipe, Recipe
from weft.model.blueprint import Blueprint

GROUPS = {"looked": looked_grids, "wide": wide_grids, "whole": whole_grids, "two_stacks": two_stacks}
DRAWN = ("wide", "gemma2")
"""Its norms have a formula of their own."""


def _cells() -> Iterator[tuple[str, Cell]]:
    for group, grids in GROUPS.items():
        for cell in (*grids.ALL, *getattr(grids, "COMBINED", ())):
            yield group, cell


CELLS = tuple(_cells())
SHORT = tuple((group, cell) for group, cell in CELLS if (group, cell.model) == DRAWN)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, ModelRecipe]]:
    return {group: grids.models(tmp_path_factory.mktemp(group)) for group, grids in GROUPS.items()}


def compare(models: Mapping[str, dict[str, ModelRecipe]], group: str, cell: Cell) -> None:
    looked: list[Blueprint] = []

    def build(recipe: Recipe) -> Blueprint:
        """A look takes seconds, and several ranks are asked."""
        if not looked:
            looked.append(build_blueprint(recipe, cell.plan))
        return copy.deepcopy(looked[0])

    check(cell, models[group], "fp32", build=build)


@pytest.mark.parametrize(("group", "cell"), SHORT, ids=str)
def test_a_dry_run_sends_what_is_predicted(models: dict[str, dict[str, ModelRecipe]], group: str, cell: Cell) -> None:
    compare(models, group, cell)


@pytest.mark.parity
@pytest.mark.parametrize(("group", "cell"), CELLS, ids=str)
def test_every_dry_run_sends_what_is_predicted(
    models: dict[str, dict[str, ModelRecipe]], group: str, cell: Cell
) -> None:
    compare(models, group, cell)

"""Small nets over squares of tensor ranks, against one process: what looking at them allows must be right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import wide_nets
from cells import Cell, plan
from parity_run import Matrix, Result, joined, look_at, run_rank
from pool import RankPool
from predicted import unlike_predicted

from weft.config.plan import Plan
from weft.config.recipe import ModelRecipe, Recipe
from weft.model.build import build_model
from weft.verify.dry_run import outline_of

STEPS = 3


@dataclass
class Nets(Matrix):
    """A factory's models, which no plan is checked for: what their modules are called makes them looked at."""

    def run(self, recipe: Recipe, plan: Plan, *, breakage: str | None = None, nudge: int = 0) -> Result:
        arguments = (recipe, plan, self.steps, breakage, nudge)
        trials = self.ranks.run(plan.mesh.world_size, run_rank, *arguments, timeout=240.0, backend=self.backend)
        result = joined(trials, plan)
        if plan.mesh.world_size > 1:
            blueprint = build_model(recipe)
            look_at(blueprint, plan)
            result.unpredicted = tuple(unlike_predicted(recipe, plan, blueprint, outline_of(blueprint), trials))
        return result


@pytest.fixture(scope="module")
def nets(ranks: RankPool) -> Nets:
    models = {name: ModelRecipe(factory="wide_nets:build", arguments=each) for name, each in wide_nets.NETS.items()}
    return Nets(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("settings", [{"inside": "normed and rolled"}, {"outside": "position"}])
def test_what_no_rule_covers_is_refused(settings: dict[str, str]) -> None:
    blueprint = wide_nets.build(**settings)
    look_at(blueprint, plan(tensor=4, grid="2d"))
    assert blueprint.no_grid != ""


@pytest.mark.parametrize(
    ("odd", "wholes"),
    [("Padded", None), ("Limited", ("up",)), ("Narrow", ("up",)), ("LimitedNorm", ("norms.0", "norms.1", "norms.2"))],
)
def test_forwards_of_which_random_numbers_show_too_little_are_not_taken_for_others(
    odd: str, wholes: tuple[str, ...] | None
) -> None:
    """A row computes them whole, or ranks form no square."""
    blueprint = wide_nets.build()
    net, kind = blueprint.module, getattr(wide_nets, odd)
    if odd == "Padded":
        net.embed = kind(wide_nets.VOCABULARY, wide_nets.WIDTH)
    elif odd == "LimitedNorm":
        net.norms = torch.nn.ModuleList(kind() for _ in range(3))
    else:
        net.up = kind(wide_nets.WIDTH, 32)
    look_at(blueprint, plan(tensor=4, grid="2d"))
    assert (blueprint.no_grid == "") == (wholes is not None)
    assert wholes is None or blueprint.features["wholes"] == wholes


@pytest.mark.parametrize("name", wide_nets.NETS)
def test_a_small_net_equals_one_process(nets: Nets, name: str) -> None:
    assert nets.verdict(Cell(name, plan(tensor=4, grid="2d"))).failures("fp64") == []

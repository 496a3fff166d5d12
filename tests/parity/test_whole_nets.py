"""Modules that ranks of a row compute whole, in small nets: those that treat samples apart equal one process."""

from __future__ import annotations

import pytest
import whole_nets
from cells import Cell, plan
from parity_run import look_at
from pool import RankPool
from test_wide_nets import STEPS, Nets

from weft.config.recipe import ModelRecipe

SQUARE = plan(tensor=4, grid="2d")


@pytest.fixture(scope="module")
def nets(ranks: RankPool) -> Nets:
    models = {name: ModelRecipe(factory="whole_nets:build", arguments=each) for name, each in whole_nets.NETS.items()}
    return Nets(ranks, models, steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("name", whole_nets.NETS)
def test_the_smallest_module_is_computed_whole(name: str) -> None:
    blueprint = whole_nets.build(**whole_nets.NETS[name])
    look_at(blueprint, SQUARE)
    assert blueprint.no_grid == ""
    expected = {"mixture": ("mixer.experts",), "heads": ()}  # of products a row is given all results
    assert blueprint.features.get("wholes", ()) == expected.get(name, ("mixer",))


@pytest.mark.parametrize("name", whole_nets.REFUSED)
def test_what_lets_samples_meet_is_refused(name: str) -> None:
    blueprint = whole_nets.build(name)
    look_at(blueprint, SQUARE)
    assert blueprint.no_grid != ""
    assert whole_nets.REFUSED[name][1] in blueprint.no_grid


@pytest.mark.parametrize(
    ("kind", "call"),
    [
        ("with what it got", "writes the second"), ("some of it", "writes a view"), ("kept", "writes what is kept"),
        ("twice the same", "writes the second"),
    ],
)  # fmt: skip
def test_what_others_write_into_is_refused_where_it_would_be_a_copy(kind: str, call: str) -> None:
    blueprint = whole_nets.build(kind, call)
    look_at(blueprint, SQUARE)
    assert "a module that would be computed whole" in blueprint.no_grid


@pytest.mark.parametrize("change", ["hooked", "own"])
def test_backwards_that_may_be_no_sums_are_refused(change: str) -> None:
    """Ranks of a row would clamp parts of a gradient."""
    blueprint = whole_nets.build("turned", shared=change)
    look_at(blueprint, SQUARE)
    assert "what ranks have parts of" in blueprint.no_grid


def test_a_weight_that_is_split_elsewhere_is_refused() -> None:
    blueprint = whole_nets.build("turned", call="and a layer", shared="split")
    look_at(blueprint, SQUARE)
    assert "one parameter, which ranks would cut in two ways" in blueprint.no_grid


@pytest.mark.parametrize("name", whole_nets.NETS)
def test_a_small_net_equals_one_process(nets: Nets, name: str) -> None:
    assert nets.verdict(Cell(name, SQUARE)).failures("fp64") == []

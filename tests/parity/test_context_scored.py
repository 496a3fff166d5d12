"""Ranks that share the sequence of models whose scores are capped, or share their softmax with sinks; and of models
that Weft lets call the attention interface."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cells import Cell, plan, recipe_of
from cells import models as every_model
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import ContextParallelPlan
from weft.config.recipe import ModelRecipe
from weft.errors import PlanError

IN_PAIRS = replace(
    plan(context=4, scheme="usp"), context_parallel=ContextParallelPlan(scheme="usp", ulysses=2)
)  # fmt: skip
CELLS = (
    Cell("capped", plan(context=2)),
    Cell("capped", plan(context=4, scheme="all_gather", recompute="selective")),
    Cell("capped", plan(context=2, scheme="ulysses")),
    Cell("capped_dropping", IN_PAIRS),
    Cell("capped_dropping", plan(context=3, recompute="full")),
    Cell("capped_dropping", plan(context=2, tensor=2)),
    Cell("capped_isolated", plan(context=2)),
    Cell("capped_isolated", plan(context=4, scheme="ulysses")),
    Cell("capped", plan(context=2, shard=2, zero=3, micro=3)),
    Cell("sinks", plan(context=2)),
    Cell("sinks", plan(context=4, scheme="all_gather", recompute="full")),
    Cell("sinks", plan(context=2, scheme="ulysses", recompute="selective")),
    Cell("sinks", IN_PAIRS),
    Cell("sinks_dropping", plan(context=2)),
    Cell("sinks_dropping", plan(context=4, scheme="ulysses")),
    Cell("sinks", plan(context=3, scheme="all_gather")),
    Cell("sinks", plan(context=2, tensor=2)),
    Cell("sinks", plan(context=2, shard=2, zero=3, micro=3)),
    Cell("sinks", plan(context=2, replicate=2, zero=1)),
    Cell("xglm_dropping", plan(context=2)),
    Cell("xglm_dropping", plan(context=4, scheme="all_gather", recompute="full")),
    Cell("xglm_dropping", plan(context=2, scheme="ulysses")),
    Cell("xglm_dropping", IN_PAIRS),
    Cell("xglm_dropping", plan(context=2, tensor=2)),
    Cell("xglm_dropping", plan(context=2, shard=2, zero=3, micro=3, recompute="selective")),
    Cell("bloom_dropping", plan(context=2)),
    Cell("bloom", plan(context=4, scheme="all_gather")),
    Cell("bloom_dropping", plan(context=2, scheme="ulysses", recompute="full")),
    Cell("bloom_dropping", IN_PAIRS),
    Cell("bloom_dropping", plan(context=2, tensor=2)),
    Cell("bloom", plan(context=2, shard=2, zero=3, micro=3, recompute="selective")),
    Cell("bloom", plan(context=3, zero=1)),
    Cell("layoutlm", plan(context=2)),
    Cell("layoutlm", plan(context=2, tensor=2)),
    Cell("layoutlm", plan(context=2, shard=2, zero=3, micro=3, scheme="ulysses")),
)
LONG = (
    Cell("capped_dropping", plan(context=2)),
    Cell("sinks_dropping", plan(context=2, shard=2, zero=1, micro=3)),
    Cell("sinks", plan(context=4, scheme="ulysses", micro=6)),
    Cell("xglm_dropping", plan(context=2)),
    Cell("bloom_dropping", plan(context=2, shard=2, zero=1, micro=3)),
)
"""Twenty steps, and what a dry run predicts of them."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=3, backend="cpu:weft")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelRecipe]:
    return every_model(tmp_path_factory.mktemp("dry"))


@pytest.fixture(scope="module")
def long(ranks: RankPool, models: dict[str, ModelRecipe], pytestconfig: pytest.Config) -> Matrix:
    return Matrix(ranks, models, backend=str(pytestconfig.getoption("--parity-backend")))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("cell", LONG, ids=str)
def test_a_dry_run_sends_what_is_predicted(models: dict[str, ModelRecipe], cell: Cell) -> None:
    check(cell, models, "fp32", partial(build_blueprint, plan=cell.plan))


@pytest.mark.parity
@pytest.mark.parametrize("cell", LONG, ids=str)
def test_twenty_steps_equal_one_process(long: Matrix, cell: Cell) -> None:
    assert long.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize(
    ("breakage", "model", "scheme"),
    [
        ("window of a call lost", "capped", "ring"),
        ("dropout of a call lost", "xglm_dropping", "ring"),
        ("slope of a cap lost", "capped", "ring"),
        ("cap of a rank's own keys", "capped", "ring"),
        ("sinks beside the keys of each rank", "sinks", "ring"),
        ("sinks of the first heads", "sinks", "ulysses"),
        ("gradient of sinks by share", "sinks", "all_gather"),
        ("slopes of a rank's own places", "bloom", "ring"),
        ("slopes of the first heads", "bloom", "ulysses"),
    ],
)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str, scheme: str) -> None:
    failures = parity.verdict(Cell(model, plan(context=2, scheme=scheme)), breakage=breakage).failures("fp64")
    assert any("gradient" in failure for failure in failures), failures


@pytest.mark.parametrize("model", ["capped", "sinks", "bloom"])
def test_compiled_blocks_are_refused(parity: Matrix, model: str) -> None:
    with pytest.raises(PlanError, match="which blocks that are compiled do not share"):
        parity.run(recipe_of(parity.models[model], "fp64"), plan(context=2, compiled=True))

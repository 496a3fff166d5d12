"""Ranks that share the sequence of models that write their attention out, against one process."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from cells import Cell, plan
from cells import models as every_model
from parity_run import Matrix
from pool import RankPool
from test_dry_runs import check

from weft.analysis.blueprint import build_blueprint
from weft.config.plan import ContextParallelPlan, Plan
from weft.config.recipe import ModelRecipe
from weft.errors import PlanError
from weft.model.description import facts_of
from weft.techniques.check import check_plan

IN_PAIRS = replace(
    plan(context=4, scheme="usp"), context_parallel=ContextParallelPlan(scheme="usp", ulysses=2)
)  # fmt: skip
CELLS = (
    Cell("openai_dropping", plan(context=2)),
    Cell("megatron_decoder", plan(context=2)),
    Cell("openai", plan(context=4, scheme="all_gather")),
    Cell("megatron_decoder", plan(context=4, scheme="all_gather", recompute="selective")),
    Cell("openai_dropping", plan(context=2, scheme="ulysses")),
    Cell("openai_dropping", plan(context=2, tensor=2)),
    Cell("openai_dropping", IN_PAIRS),
    Cell("megatron_decoder", plan(context=2, shard=2, zero=3, micro=3)),
    Cell("megatron_masked", plan(context=2, recompute="full")),
    Cell("megatron_masked", plan(context=4, micro=6)),
    Cell("rembert", plan(context=3, scheme="all_gather")),
    Cell("rembert", plan(context=2, tensor=2, zero=1)),
    Cell("japanese", plan(context=2, scheme="ulysses")),
    Cell("japanese_dropping", plan(context=4, recompute="full")),
    Cell("japanese_dropping", plan(context=2, replicate=2)),
    Cell("japanese_isolated", plan(context=2)),
    Cell("japanese_isolated", plan(context=4, scheme="all_gather")),
    Cell("xglm_dropping", plan(context=2)),
    Cell("xglm_dropping", plan(context=4, scheme="all_gather", recompute="full")),
    Cell("xglm_dropping", plan(context=2, scheme="ulysses")),
    Cell("xglm_dropping", IN_PAIRS),
    Cell("xglm_dropping", plan(context=2, tensor=2)),
    Cell("xglm_dropping", plan(context=2, shard=2, zero=3, micro=3, recompute="selective")),
    Cell("xglm_rarely", plan(context=3)),
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
    Cell("xglm_dropping", plan(context=2)),
    Cell("bloom_dropping", plan(context=2, shard=2, zero=1, micro=3)),
    Cell("bloom_dropping", plan(context=4, micro=6)),
)
"""Twenty steps, and what a dry run predicts of them."""
IN_FP32 = (
    Cell("neo_dropping", plan(context=2)),
    Cell("neo", plan(context=2, scheme="ulysses", recompute="full")),
    Cell("neo_window", plan(context=2)),
    Cell("neo_window", plan(context=4, scheme="all_gather")),
    Cell("neo_wide", plan(context=2, scheme="ulysses")),
    Cell("neo_wide", plan(context=4)),
)
"""Models that make scores in fp32, whatever they train in."""


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


@pytest.mark.parametrize("cell", IN_FP32, ids=str)
def test_equals_one_process_in_fp32(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell, "fp32").failures("fp32") == []


@pytest.mark.parametrize(
    ("breakage", "model"),
    [
        ("scale of written attention lost", "openai"),
        ("dropout of written attention lost", "megatron_masked"),
        ("merged as means", "megatron_decoder"),
        ("bias of a rank's own places", "bloom"),
        ("bias of the first heads", "bloom"),
        ("dropped pairs of a rank's own places", "xglm_dropping"),
    ],
)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str) -> None:
    scheme = "ulysses" if breakage == "bias of the first heads" else "ring"
    failures = parity.verdict(Cell(model, plan(context=2, scheme=scheme)), breakage=breakage).failures("fp64")
    assert any("gradient" in failure for failure in failures), failures


def test_a_window_that_is_lost_is_seen(parity: Matrix) -> None:
    cell = Cell("neo_window", plan(context=2))
    failures = parity.verdict(cell, "fp32", breakage="window of written attention lost").failures("fp32")
    assert any("loss" in failure for failure in failures), failures


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        (plan(context=2, compiled=True), "it writes its attention out, which a compiler does not read"),
        (plan(context=2, pipeline=2), "it writes its attention out, and its masks cross stages"),
    ],
)
def test_what_reading_cannot_have_is_refused(parity: Matrix, chosen: Plan, why: str) -> None:
    recipe = parity.recipe("megatron_decoder", "fp64")
    facts = replace(facts_of(recipe), writes_attention=True)
    with pytest.raises(PlanError, match=why):
        check_plan(chosen, recipe, facts)

"""Ranks that share the sequence of models that write their attention out, against one process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cells import Cell, plan
from parity_run import Matrix

from pool import RankPool
from weft.description import facts_of
from weft.errors import PlanError
from weft.plan import ContextParallelPlan, Plan, check_plan

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
)
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


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("cell", IN_FP32, ids=str)
def test_equals_one_process_in_fp32(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell, "fp32").failures("fp32") == []


@pytest.mark.parametrize(
    ("breakage", "model"),
    [
        ("scale of written attention lost", "openai"),
        ("dropout of written attention lost", "megatron_masked"),
        ("merged as means", "megatron_decoder"),
    ],
)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str) -> None:
    failures = parity.verdict(Cell(model, plan(context=2)), breakage=breakage).failures("fp64")
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

"""Ranks that share the sequence of models whose attention sees a window, against one process."""

from __future__ import annotations

import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

CELLS = (
    Cell("mistral_narrow", plan(context=2)),
    Cell("mistral_narrow", plan(context=4, scheme="all_gather", recompute="selective")),
    Cell("mistral_narrow", plan(context=2, scheme="ulysses")),
    Cell("mistral_wide", plan(context=4, micro=3)),
    Cell("mistral_wide", plan(context=3, scheme="all_gather")),
    Cell("mistral_wide", plan(context=2, shard=2, zero=3, recompute="full")),
    Cell("mistral_self", plan(context=2)),
    Cell("mistral_self", plan(context=2, scheme="all_gather")),
    Cell("mistral_dropping", plan(context=2)),
    Cell("mistral_dropping", plan(context=2, scheme="ulysses")),
    Cell("mistral_isolated", plan(context=2)),
    Cell("mistral_isolated", plan(context=2, scheme="ulysses")),
    Cell("mistral_isolated", plan(context=4, scheme="all_gather")),
    Cell("gemma_isolated", plan(context=2)),
    Cell("gemma_isolated", plan(context=4, scheme="ulysses", recompute="selective")),
    Cell("qwen_window", plan(context=2, tensor=2)),
    Cell("gemma_window", plan(context=4)),
    Cell("mistral_wide", plan(context=4, scheme="usp")),
    Cell("mistral_dropping", plan(context=4, scheme="usp")),
)
"""Windows that are smaller and larger than a rank's runs; the model of which only some layers have one."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=3, backend="cpu:weft")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("model", ["mistral_narrow", "mistral_wide"])
def test_a_window_that_is_one_too_wide_is_seen(parity: Matrix, model: str) -> None:
    failures = parity.verdict(Cell(model, plan(context=2)), breakage="window one too wide").failures("fp64")
    assert any("loss" in failure for failure in failures), failures

"""Mixtures of experts under plans, against one process; `make parity` has all cells."""

from __future__ import annotations

from typing import Any

import pytest
from cells import Cell, decoder, plan
from parity_run import Matrix

from pool import RankPool

STEPS = 3


def mixture(**changes: Any):
    sizes: dict[str, Any] = {"num_experts": 6, "top_k": 2, "expert_ffn_size": 20}
    return decoder(**(sizes | changes))


MODELS = {
    "mixture": mixture(),
    "mixture_dropout": mixture(dropout=0.1, shared_experts=1, first_dense_layers=1, num_kv_heads=2),
    "mixture_sigmoid": mixture(router="sigmoid", top_k=3, shared_experts=2, tie_embeddings=False),
    "mixture_sparse": mixture(num_experts=16, top_k=1, normalise=False),
}
QUICK = (
    Cell("mixture", plan(shard=2, zero=1, shares=(4, 2))),
    Cell("mixture_dropout", plan(shard=2, zero=3, micro=3, recompute="selective")),
    Cell("mixture_sparse", plan(replicate=2, micro=6)),
    Cell("mixture_sigmoid", plan(pipeline=2, micro=3)),
    Cell("mixture_dropout", plan(tensor=2, micro=6)),
    Cell("mixture_dropout", plan(tensor=2, sequence=True, recompute="full")),
    Cell("mixture_sigmoid", plan(tensor=2, sequence=True, pipeline=2, micro=4)),
)


@pytest.fixture(scope="module")
def parity(ranks: RankPool) -> Matrix:
    return Matrix(ranks, MODELS, steps=STEPS)


@pytest.mark.parametrize("cell", QUICK, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []

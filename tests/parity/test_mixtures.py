"""Mixtures of experts under plans, against one process; `make parity` has all cells."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cells import Cell, decoder, plan
from parity_run import Matrix
from pool import RankPool

from weft.config.recipe import ModelRecipe
from weft.errors import PlanError

STEPS = 3


def mixture(**changes: Any):
    sizes: dict[str, Any] = {"num_experts": 6, "top_k": 2, "expert_ffn_size": 20}
    return decoder(**(sizes | changes))


MODELS = {
    "mixture": mixture(),
    "mixture_dropout": mixture(dropout=0.1, shared_experts=1, first_dense_layers=1, num_kv_heads=2),
    "mixture_sigmoid": mixture(router="sigmoid", top_k=3, shared_experts=2, tie_embeddings=False),
    "mixture_balanced": mixture(balance_loss_weight=0.5, z_loss_weight=0.1, dropout=0.1),
    "mixture_sigmoid_balanced": mixture(router="sigmoid", balance_loss_weight=0.5, tie_embeddings=False),
    "mixture_biased": mixture(router="sigmoid", balance_rate=0.05, dropout=0.1),
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
BALANCED = (
    Cell("mixture_balanced", plan(replicate=2, micro=6)),
    Cell("mixture_balanced", plan(shard=2, zero=3, micro=3, recompute="full")),
    Cell("mixture_balanced", plan(tensor=2, sequence=True, micro=4, recompute="selective")),
    Cell("mixture_sigmoid_balanced", plan(shard=2, zero=2, shares=(4, 2))),
    Cell("mixture_sigmoid_balanced", plan(shard=2, tensor=2, zero=1, micro=3)),
)
BIASED = (
    Cell("mixture_biased", plan(pipeline=2, schedule="interleaved_zero_bubble", chunks=2, recompute="full")),
    Cell("mixture_biased", plan(shard=2, zero=3, shares=(4, 2))),
    Cell("mixture_biased", plan(tensor=2, sequence=True, micro=4, recompute="selective")),
    Cell("mixture_biased", plan(replicate=2, pipeline=2, micro=3)),
)


BREAKAGES = (
    ("auxiliary loss by rank", Cell("mixture_balanced", plan(replicate=2, micro=6)), "gradient"),
    ("choices by rank", Cell("mixture_biased", plan(replicate=2, micro=6)), "final"),
    ("part of the choices' weights", Cell("mixture", plan(tensor=2, micro=12)), "router.weight"),
    ("router counted by ranks", Cell("mixture", plan(tensor=2, sequence=True, micro=12)), "gradient"),
    ("swapped experts", Cell("mixture", plan(shard=2, zero=1, micro=6)), "gradient"),
)
"""Piece of Weft that is broken, the cell that shows it, and where."""
OF_TRANSFORMERS = (
    Cell("mixtral_balanced", plan(shard=2, zero=1, micro=3)),
    Cell("mixtral_balanced", plan(tensor=2, sequence=True, micro=4, recompute="full")),
    Cell("qwen3_moe_balanced", plan(shard=2, tensor=2, zero=3, micro=3)),
)
HF_SIZES: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64,
    "max_position_embeddings": 64, "num_local_experts": 6, "num_experts_per_tok": 2, "output_router_logits": True,
    "router_aux_loss_coef": 0.5, "moe_intermediate_size": 20, "intermediate_size": 20, "head_dim": 8,
}  # fmt: skip
ARCHITECTURES = {"mixtral": "MixtralForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    folder, models = tmp_path_factory.mktemp("mixtures"), dict(MODELS)
    for kind, architecture in ARCHITECTURES.items():
        file = folder / f"{kind}.json"
        file.write_text(json.dumps(HF_SIZES | {"model_type": kind, "architectures": [architecture]}))
        models[f"{kind}_balanced"] = ModelRecipe(hf=str(file), sequence_length=11)
    return Matrix(ranks, models, steps=STEPS)


@pytest.mark.parametrize("cell", QUICK + BALANCED + BIASED + OF_TRANSFORMERS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


EVERY = (
    plan(replicate=2, micro=2),
    *(plan(shard=2, zero=zero, micro=micro) for zero, micro in ((1, 6), (2, 1), (3, 3))),
    plan(micro=1),
    plan(tensor=2, micro=6),
    plan(tensor=2, sequence=True, micro=4),
    plan(shard=2, tensor=2, zero=3, micro=3),
    plan(shard=2, shares=(4, 2), zero=2),
    plan(recompute="full", micro=4),
    plan(recompute="selective", micro=4),
)
STAGED = (
    plan(pipeline=2, micro=4),
    plan(pipeline=2, schedule="interleaved_zero_bubble", chunks=2, recompute="selective"),
    plan(pipeline=2, schedule="zbv", chunks=2),
    plan(shard=2, pipeline=2, zero=3, micro=2),
    plan(tensor=2, sequence=True, pipeline=2, micro=4),
    plan(replicate=2, tensor=2, pipeline=2, micro=3),
)
FULL = (
    *(Cell(model, chosen) for model in MODELS for chosen in EVERY),
    *(Cell(model, chosen) for model in MODELS if "balanced" not in model for chosen in STAGED),
)


@pytest.mark.parity
@pytest.mark.parametrize("cell", FULL, ids=str)
def test_every_cell_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


def test_a_pipeline_is_refused_where_a_loss_sees_the_batch(parity: Matrix):
    for model in ("mixture_balanced", "mixtral_balanced"):
        with pytest.raises(PlanError, match="cannot cut this model into stages: its loss has auxiliary terms"):
            parity.verdict(Cell(model, plan(pipeline=2)))


def test_compilation_is_refused_by_name(parity: Matrix):
    with pytest.raises(PlanError, match="has not been proven with mixtures of experts"):
        parity.verdict(Cell("mixture", plan(shard=2, compiled=True)))


def test_equals_one_process_in_fp32(parity: Matrix):
    assert parity.verdict(Cell("mixture_dropout", plan(shard=2, zero=2)), "fp32").failures("fp32") == []


@pytest.mark.parametrize(("breakage", "cell", "seen_in"), BREAKAGES, ids=[name for name, _, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, cell: Cell, seen_in: str):
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures

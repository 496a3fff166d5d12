"""Ranks that share a sequence, against one process; `make parity` has all cells of `matrix.context`."""

from __future__ import annotations

import cells
import pytest
from cells import Cell, plan
from parity_run import Matrix
from pool import RankPool

from weft.errors import PlanError

STEPS = 3
CELLS = (
    Cell("isolated", plan(context=4, scheme="all_gather", recompute="selective")),
    Cell("decoder_dropout", plan(context=2, tensor=2, sequence=True, recompute="full")),
    Cell("hf_gpt2_plain", plan(context=2, shard=2, zero=3, micro=3)),
    Cell("encoder_plain", plan(context=2, pipeline=2, zero=1)),
    Cell("decoder_grouped", plan(context=3, micro=6)),
    Cell("hf_gpt2", plan(context=2, tensor=2)),
    Cell("encoder", plan(context=2, scheme="ulysses", recompute="full")),
    Cell("hf_bert", plan(context=3, scheme="all_gather")),
    Cell("decoder_grouped", plan(context=4, scheme="ulysses", recompute="selective")),
    Cell("lora", plan(context=2)),
    Cell("dora", plan(context=2, tensor=2, micro=6)),
    Cell("decoder_dropout", plan(context=4, scheme="usp")),
    Cell("decoder_grouped", plan(context=4, scheme="usp", recompute="selective")),
    Cell("isolated", plan(context=4, scheme="usp")),
    Cell("hf_bert", plan(context=4, scheme="usp", micro=3)),
    Cell("decoder", plan(context=4, scheme="usp", tensor=2)),
    Cell("torch_encoder", plan(context=2)),
    Cell("torch_encoder", plan(context=3, scheme="all_gather", recompute="full")),
    Cell("torch_encoder", plan(context=2, scheme="ulysses", shard=2, zero=3, micro=3)),
)
BREAKAGES = (
    ("merged as means", "decoder", "gradient"),
    ("positions from zero", "decoder", "gradient"),
    ("no sum over context", "decoder", "gradient"),
    ("keys without gradients from others", "decoder", "gradient"),
    ("seen by share", "decoder", "loss"),
    ("dropout by rank", "decoder_dropout", "gradient"),
)
"""Piece of Weft that is broken, the model that shows it, and where."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


def test_equals_one_process_in_fp32(parity: Matrix):
    assert parity.verdict(Cell("decoder_dropout", plan(context=4)), "fp32").failures("fp32") == []


@pytest.mark.parametrize(("breakage", "model", "seen_in"), BREAKAGES, ids=[name for name, _, _ in BREAKAGES])
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, model: str, seen_in: str):
    failures = parity.verdict(Cell(model, plan(context=2)), breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


def test_tokens_of_neighbours_out_of_order_are_seen(parity: Matrix) -> None:
    cell = Cell("decoder", plan(context=4, scheme="usp"))
    failures = parity.verdict(cell, breakage="neighbours out of order").failures("fp64")
    assert any("loss" in failure for failure in failures), failures


REFUSED = {
    "mlp": "samples of a mlp are no sequences",
    "convnet": "samples of a convnet are no sequences",
    "own": "its samples are no sequences",
    "mixing": "mix is an nn.Conv1d, which does not work token by token",
    "written": "attention makes a tensor of tokens × tokens by bmm",
}
"""Model → why its ranks share no sequence."""


@pytest.mark.parametrize("model", REFUSED)
def test_what_mixes_tokens_otherwise_is_refused_by_name(parity: Matrix, model: str):
    micro = 12 if model == "convnet" else 2
    with pytest.raises(PlanError, match=REFUSED[model]):
        parity.run(cells.recipe_of(parity.models[model], "fp64"), plan(context=2, micro=micro))

"""Plans whose weights, states or activations wait on a disk, against one process that keeps everything."""

from __future__ import annotations

from dataclasses import replace

import cells
import pytest
from cells import Cell
from parity_run import Matrix
from pool import RankPool

from weft.techniques.offload.settings import Offload

STEPS = 6


def offloaded(model: str, what: Offload = "optimizer", **settings: object) -> Cell:
    plan = cells.plan(**settings)  # type: ignore[arg-type]
    return Cell(model, replace(plan, memory=replace(plan.memory, offload=what, offload_to="disk")))


CELLS = [
    offloaded("decoder", replicate=2, zero=0),
    offloaded("decoder_untied", shard=2, zero=1, shares=(4, 2)),
    offloaded("decoder", replicate=2, zero=2),
    offloaded("decoder_dropout", shard=2, zero=3),
    offloaded("decoder", tensor=2, sequence=True, pipeline=2, micro=2),
    offloaded("decoder_dropout", "activations", shard=2, zero=3, micro=3),
    offloaded("decoder_untied", "activations", shard=2, zero=1, shares=(4, 2), recompute="selective"),
    offloaded("decoder_dropout", "activations", tensor=2, sequence=True, pipeline=2, micro=2),
    offloaded("decoder", "activations", pipeline=2, schedule="interleaved_1f1b", chunks=2, recompute="full"),
    offloaded("decoder_dropout", "activations", context=2, replicate=2, zero=2, micro=3),
    offloaded("hf_gpt2", "activations", replicate=2, zero=1, recompute="selective"),
    offloaded("hf_llama", "activations", shard=2, zero=3, micro=3, recompute="full"),
    offloaded("isolated", "activations", micro=4),
    offloaded("lora", "activations", replicate=2, zero=1),
    offloaded("encoder", "optimizer+activations", tensor=2, replicate=2, zero=1, micro=3),
    offloaded("decoder", "optimizer+activations", pipeline=2, shard=2, zero=3, micro=2),
    offloaded("decoder_dropout", "parameters", shard=2, zero=3, micro=3),
    offloaded("decoder_untied", "parameters", shard=2, tensor=2, zero=3, sequence=True),
    offloaded("hf_llama", "parameters+activations", shard=2, zero=3, micro=3, recompute="selective"),
    offloaded("decoder", "parameters+activations", shard=2, replicate=2, zero=3, micro=3),
    offloaded("decoder_dropout", "parameters", context=2, shard=2, zero=3, micro=3),
    offloaded("lora", "parameters", shard=2, zero=3, micro=3),
    offloaded("mlp", "parameters", shard=2, zero=3),
]


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS, backend="cpu:weft")


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_equals_one_process(parity: Matrix, cell: Cell) -> None:
    assert parity.verdict(cell).failures("fp64") == []


@pytest.mark.parametrize("model", ["decoder", "decoder_dropout"])
def test_places_that_are_given_twice_are_seen(parity: Matrix, model: str) -> None:
    cell = offloaded(model, "activations", micro=4)
    assert parity.verdict(cell, breakage="one place for all").failures("fp64") != []

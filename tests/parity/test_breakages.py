"""The test of the tests: with a piece of Weft broken, the parity comparison must fail, and say where.

Native traps of torch are let in on purpose too, wherever Weft's own code is all that keeps them out.  Three cannot be
let in, because Weft does not run the code that has them:

- DDP stays silent where weight gradients are taken by `autograd.grad`, as torch's split backward does: Weft reduces its
  own buckets, which the schedule's last weight pass starts, and its weight pass goes through the accumulation nodes.
  `test_ddp_says_nothing_in_a_split_backward` shows the native behaviour, and Weft's pass under the same hooks.
- `parallelize_module` unties the embedding from the head without a word: Weft cuts parameters itself, and refuses a tie
  whose two ends are cut differently (`tests/techniques/tensor/test_refusals.py`).
- `clip_grad_norm_` over parameters on different meshes: the norm is one sum over flat shards.
"""

from __future__ import annotations

import pytest
import torch
from averaging import run_averaged, validation_curve
from breakages import split_backward_under_ddp
from cells import Cell, plan
from parity_run import Matrix, with_precision
from pool import RankPool

from weft.verify.numerics import one_process

STEPS = 4
"""After the third, a wrong clip norm or divisor is in losses, norms and weights."""


@pytest.fixture(scope="module")
def parity(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix.create(ranks, tmp_path_factory.mktemp("models"), steps=STEPS)


BREAKAGES = (
    ("dropped all-reduce", Cell("decoder", plan(replicate=2)), "gradient"),
    ("last bucket not reduced", Cell("decoder", plan(shard=2, zero=1)), "gradient"),
    ("no sum over model axes", Cell("decoder", plan(tensor=2, sequence=True)), "norm"),
    ("no sum over model axes", Cell("decoder", plan(pipeline=2)), "gradient of gradient/embedding"),
    (
        "untied on one rank",
        Cell("decoder", plan(pipeline=2, schedule="zbv", chunks=2)),
        "gradient of gradient/embedding",
    ),
    ("mean of means", Cell("decoder", plan(replicate=2)), "loss differs"),
    ("mean of means", Cell("decoder", plan(micro=4)), "loss differs"),
    ("dropout by rank", Cell("decoder_dropout", plan(replicate=2)), "gradient"),
    ("dropout by rank", Cell("decoder_dropout", plan(pipeline=2)), "gradient"),
    ("norm counts copies", Cell("decoder", plan(tensor=2)), "norm differs"),
    ("norm counts copies", Cell("decoder", plan(pipeline=2)), "norm differs"),
)


@pytest.mark.parametrize(
    ("breakage", "cell", "seen_in"), BREAKAGES, ids=[f"{name}-{cell}" for name, cell, _ in BREAKAGES]
)
def test_a_broken_piece_is_seen(parity: Matrix, breakage: str, cell: Cell, seen_in: str):
    failures = parity.verdict(cell, breakage=breakage).failures("fp64")
    assert any(seen_in in failure for failure in failures), failures


@pytest.mark.parametrize("cell", dict.fromkeys(cell for _, cell, _ in BREAKAGES), ids=str)
def test_the_same_cell_mended_is_equal(parity: Matrix, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []


def failed(parity: Matrix, cell: Cell, breakage: str) -> str:
    """What the comparison says, or the error that came instead; empty when nothing was noticed."""
    try:
        return "; ".join(parity.verdict(cell, breakage=breakage).failures("fp64"))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


TRAPS = (
    ("tie inside fully_shard", Cell("decoder", plan(shard=2, zero=3, pipeline=2, schedule="zbv", chunks=2, micro=1))),
    ("sizes differ", Cell("own", plan(shard=2, zero=3))),
    ("heads not localised", Cell("hf_gpt2", plan(tensor=2))),
    ("heads not localised", Cell("global_heads", plan(tensor=2))),
)


@pytest.mark.parametrize(("trap", "cell"), TRAPS, ids=[f"{trap}-{cell}" for trap, cell in TRAPS])
def test_a_native_trap_let_in_is_seen(parity: Matrix, trap: str, cell: Cell):
    assert parity.verdict(cell).failures("fp64") == []
    assert failed(parity, cell, trap)


@pytest.mark.parametrize("breakage", [None, "stale weights"])
def test_weights_gathered_for_an_evaluation_do_not_go_stale(parity: Matrix, breakage: str | None):
    recipe = parity.recipe("decoder", "fp64", average_decay=0.5)
    sharded = with_precision(plan(shard=2, zero=3), "fp64")
    whole = with_precision(one_process(plan()), "fp64")
    wanted = validation_curve(parity.ranks.run(1, run_averaged, recipe, whole, STEPS))
    found = validation_curve(parity.ranks.run(2, run_averaged, recipe, sharded, STEPS, breakage))
    equal = found == pytest.approx(wanted, rel=1e-10)
    assert equal == (breakage is None), (wanted, found)


def test_ddp_says_nothing_in_a_split_backward(ranks: RankPool):
    first, second = ranks.run(2, split_backward_under_ddp)
    assert not torch.equal(first["native"], second["native"])  # each rank keeps its own, and no word is said
    torch.testing.assert_close(first["weft"], second["weft"])
    torch.testing.assert_close(first["weft"], (first["native"] + second["native"]) / 2)

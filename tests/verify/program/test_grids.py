"""What ranks of a grid receive for the products of a block is what the formulas say, byte for byte.

Of a product of M×K by K×N elements each rank of a square of side q receives 3·(q−1)/q²·(M·K + K·N) of them; with d
layers M·K/d instead of M·K, and once per step 2·(d−1)/d·K·N/q² for gradients; of a cube
(q−1)/q³·(3·M·K + 3·K·N + 2·M·N), where what was gathered is gathered once more (2·M·K and 2·K·N where it is kept).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weft.config.plan import MemoryPlan, MeshPlan, MicrobatchPlan, Plan, TensorParallelPlan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.build import build_model
from weft.model.description import facts_of
from weft.techniques.check import check_plan
from weft.techniques.send_trace import RankSend
from weft.techniques.tensor.cost import received_elements
from weft.techniques.tensor.settings import TensorScheme
from weft.verify.dry_run import trace_sends
from weft.verify.program import program_of

HIDDEN, FFN, LENGTH, SAMPLES, BYTES = 32, 64, 11, 8, 4
BLOCK = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN))
"""(N, K) of a block's products: queries, keys and values read one activation, and so do gate and up."""
GRIDS: tuple[tuple[TensorScheme, int, int, int], ...] = (
    ("2d", 4, 2, 1),
    ("2d", 16, 4, 1),
    ("2.5d", 8, 2, 2),
    ("3d", 8, 2, 2),
)
"""Scheme, ranks, side and depth."""


def formula(scheme: TensorScheme, side: int, depth: int, n: int, k: int) -> float:
    """Elements that a rank receives for a product in forward and backward, without the sum over depth."""
    m = SAMPLES * LENGTH
    if scheme == "3d":
        return (side - 1) / side**3 * (3 * m * k + 3 * k * n + 2 * m * n)
    return 3 * (side - 1) / side**2 * (m * k / depth + k * n)


def plan_of(scheme: TensorScheme, ranks: int) -> Plan:
    return Plan(
        mesh=MeshPlan(tensor=ranks),
        tensor_parallel=TensorParallelPlan(scheme=scheme),
        microbatch=MicrobatchPlan(size=SAMPLES),
        memory=MemoryPlan(fused_loss=scheme != "3d"),
    )


def recipe_of() -> Recipe:
    shape = DecoderShape(
        num_layers=2, hidden_size=HIDDEN, num_heads=4, num_kv_heads=4, ffn_size=FFN, vocabulary_size=64,
        sequence_length=LENGTH,
    )  # fmt: skip
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        batch=BatchRecipe(global_batch_size=SAMPLES),
        run=RunRecipe(steps=1),
        permit=PermitRecipe(precision=("fp32",)),
    )


def of_block(sends: Iterator[RankSend]) -> float:
    """Bytes that a rank receives around the products of the first block."""
    names = ("query", "key", "value", "output", "gate", "up", "down")
    return sum(
        send.size_bytes * send.count for send in sends if "blocks.0." in send.reason and send.reason.endswith(names)
    )


@pytest.mark.parametrize(("scheme", "ranks", "side", "depth"), GRIDS)
def test_bytes_are_those_of_the_formulas(scheme: TensorScheme, ranks: int, side: int, depth: int) -> None:
    recipe, plan = recipe_of(), plan_of(scheme, ranks)
    check_plan(plan, recipe, facts_of(recipe))
    program = program_of(recipe, plan, trace_sends(build_model(recipe)), rank=ranks - 1)
    sent = of_block(iter(program.sends)) * (side - 1) / side
    assert sent == BYTES * sum(formula(scheme, side, depth, n, k) for n, k in BLOCK)


def test_layers_sum_gradients_of_weights_once_per_step() -> None:
    recipe, plan = recipe_of(), plan_of("2.5d", 8)
    program = program_of(recipe, plan, trace_sends(build_model(recipe)))
    weights = 2 * sum(n * k for n, k in BLOCK) + 64 * HIDDEN  # of two blocks and the table
    (summed,) = (send for send in program.sends if send.axis == "tensor_depth")
    assert (summed.operation, summed.count, summed.size_bytes) == ("all_reduce", 1, BYTES * weights / 4)


@pytest.mark.parametrize(("scheme", "ranks", "side", "depth"), GRIDS)
def test_prices_are_of_the_same_volume(scheme: TensorScheme, ranks: int, side: int, depth: int) -> None:
    for n, k in BLOCK:
        layers = 2 * (depth - 1) / depth * k * n / side**2 if scheme == "2.5d" else 0
        expected = formula(scheme, side, depth, n, k) + layers
        assert received_elements(scheme, ranks, SAMPLES * LENGTH, n, k) == pytest.approx(expected)

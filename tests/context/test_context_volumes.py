"""What ranks that share a sequence are predicted to send is what formulas say, for every scheme."""

from __future__ import annotations

import pytest

from weft.models import build_model
from weft.plan import ContextParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.program import program_of
from weft.recipe import BatchRecipe, DecoderShape, ModelRecipe, Recipe, RunRecipe
from weft.rehearse import outline_of

LAYERS, HEADS, KV_HEADS, SIZE, LENGTH, SAMPLES = 3, 8, 4, 4, 64, 2
RECIPE = Recipe(
    model=ModelRecipe(
        reference="decoder",
        shape=DecoderShape(
            num_layers=LAYERS, hidden_size=HEADS * SIZE, num_heads=HEADS, num_kv_heads=KV_HEADS, vocabulary_size=32,
            sequence_length=LENGTH,
        ),
    ),
    batch=BatchRecipe(global_batch_size=SAMPLES),
    run=RunRecipe(steps=1),
)  # fmt: skip


def sent(scheme: str, ranks: int, tensor: int, rank: int) -> dict[str, int]:
    """Bytes by operation of one microbatch over the context axis."""
    plan = Plan(
        mesh=MeshPlan(context=ranks, tensor=tensor),
        context_parallel=ContextParallelPlan(scheme=scheme),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=SAMPLES),
    )
    found: dict[str, int] = {}
    for send in program_of(RECIPE, plan, OUTLINE, rank).sends:
        if send.axis == "context":
            found[send.operation] = found.get(send.operation, 0) + send.count * send.size_bytes
    return found


OUTLINE = outline_of(build_model(RECIPE))


@pytest.mark.parametrize(("ranks", "tensor"), [(2, 1), (4, 1), (2, 2), (8, 1)])
def test_bytes_are_those_of_the_formulas(ranks: int, tensor: int):
    element, tokens = 4, SAMPLES * LENGTH // ranks
    keys = tokens * KV_HEADS // tensor * 2 * SIZE * element
    queries = tokens * HEADS // tensor * 2 * SIZE * element
    for rank in (0, ranks * tensor - 1):
        passed = LAYERS * 3 * (ranks - 1) * keys
        assert sent("ring", ranks, tensor, rank) == {"send": passed, "receive": passed}
        whole = LAYERS * ranks * keys
        assert sent("all_gather", ranks, tensor, rank) == {"all_gather": 2 * whole, "reduce_scatter": whole}
        copied = keys * max(1, ranks * tensor // KV_HEADS)
        assert sent("ulysses", ranks, tensor, rank) == {"all_to_all": LAYERS * 2 * (copied + queries)}

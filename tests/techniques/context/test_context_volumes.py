"""What ranks that share a sequence are predicted to send is what formulas say, for every scheme."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.plan import ContextParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, Recipe, RunRecipe
from weft.model.build import build_model
from weft.techniques.send_trace import Outline
from weft.verify.dry_run import trace_sends
from weft.verify.program import program_of

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


def sent(scheme: str, ranks: int, tensor: int, rank: int, *, exchanging: int = 0, window: int = 0) -> dict[str, int]:
    """Bytes by operation of one microbatch over the context axis and its parts."""
    plan = Plan(
        mesh=MeshPlan(context=ranks, tensor=tensor),
        context_parallel=ContextParallelPlan(scheme=scheme, ulysses=exchanging),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=SAMPLES),
    )
    found: dict[str, int] = {}
    for send in program_of(RECIPE, plan, _seen_through(window), rank).sends:
        if send.axis.startswith("context"):
            found[send.operation] = found.get(send.operation, 0) + send.count * send.size_bytes
    return found


OUTLINE = trace_sends(build_model(RECIPE))


def _seen_through(window: int) -> Outline:
    calls = tuple(replace(call, window=window or None) if call.kind == "attention" else call for call in OUTLINE.calls)
    return replace(OUTLINE, calls=calls)


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


@pytest.mark.parametrize(("ranks", "exchanging", "tensor"), [(4, 2, 1), (8, 4, 1), (8, 2, 2), (8, 0, 1)])
def test_bytes_of_heads_exchanged_inside_of_rings(ranks: int, exchanging: int, tensor: int) -> None:
    """What groups of neighbours exchange, of keys and of queries there and back; and what goes round between groups."""
    element, tokens, among = 4, SAMPLES * LENGTH // ranks, exchanging or 4
    keys = tokens * KV_HEADS // tensor * 2 * SIZE * element
    queries = tokens * HEADS // tensor * 2 * SIZE * element
    passed = LAYERS * 3 * (ranks // among - 1) * keys
    for rank in (0, ranks * tensor - 1):
        found = sent("usp", ranks, tensor, rank, exchanging=exchanging)
        assert found == {"all_to_all": LAYERS * 2 * (keys + queries), "send": passed, "receive": passed}


@pytest.mark.parametrize(("scheme", "window", "shown"), [("ring", 5, 4), ("ring", 1, 0), ("all_gather", 5, 4)])
def test_only_what_later_runs_see_through_a_window_is_sent(scheme: str, window: int, shown: int) -> None:
    ranks, keys = 4, SAMPLES * KV_HEADS * 2 * SIZE * 4
    found = sent(scheme, ranks, 1, 1, window=window)
    each = LAYERS * 2 * shown * keys
    if not shown:
        assert found == {}
    elif scheme == "ring":
        assert found == {"send": 3 * (ranks - 1) * each, "receive": 3 * (ranks - 1) * each}
    else:
        assert found == {"all_gather": 2 * ranks * each, "reduce_scatter": ranks * each}
    assert sent(scheme, ranks, 1, 1, window=LENGTH) == sent(scheme, ranks, 1, 1)

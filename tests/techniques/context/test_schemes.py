"""Every scheme, with windows, documents, dropped probabilities and grouped heads, is attention of one process."""

from __future__ import annotations

import pytest
import torch
from threaded_ranks import Post, attend_in_threads, attend_whole, deliver, scheme_of
from torch import Tensor

from weft.model.attention.call import MaskPattern, ScoreMod, attend
from weft.techniques.context import visibility
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.token_runs import Shown
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.keyed_dropout import KeyedDropout

SCALE, SAMPLES, SIZE = 0.4, 2, 4
SCHEMES = (
    ("ring", 3, 0), ("ring", 4, 0), ("all_gather", 3, 0), ("ulysses", 2, 0), ("ulysses", 4, 0), ("usp", 4, 2),
    ("usp", 8, 2), ("usp", 8, 4),
)  # fmt: skip


def operands(length: int, heads: int, kv_heads: int) -> tuple[list[Tensor], Tensor]:
    draw = torch.Generator().manual_seed(length + heads)
    query, key, value, gradient = (
        torch.randn(SAMPLES, number, length, SIZE, generator=draw, dtype=torch.float64)
        for number in (heads, kv_heads, kv_heads, heads)
    )
    return [query, key, value], gradient


@pytest.mark.parametrize("isolated", [False, True], ids=["one document", "documents"])
@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize(("scheme", "ranks", "exchanging"), SCHEMES)
def test_equals_one_process(
    scheme: str,
    ranks: int,
    exchanging: int,
    window: int | None,
    isolated: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(visibility, "_FEWEST_QUERIES", 2)
    monkeypatch.setattr(visibility, "_MOST_MASKED", 60)  # several chunks of the queries that have documents
    deliver(monkeypatch, Post())
    length = 21
    given, gradient = operands(length, 4, 2)
    documents = (torch.arange(length) // torch.tensor([[5], [7]])) if isolated else None
    leaves = [each.clone().requires_grad_() for each in given]
    wanted = attend_whole(leaves, SCALE, window, documents)
    wanted.backward(gradient)
    attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
    form = AttentionForm(pattern=MaskPattern(causal=True, window=window), scale=SCALE)
    mixed, gradients = attend_in_threads(given, gradient, form, documents, attends)
    torch.testing.assert_close(mixed, wanted.detach())
    for leaf, found in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (8, 2), (12, 3)])
@pytest.mark.parametrize(("scheme", "ranks", "exchanging"), SCHEMES)
def test_drops_what_one_process_drops(
    scheme: str, ranks: int, exchanging: int, heads: int, kv_heads: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    deliver(monkeypatch, Post())
    length = 19
    given, gradient = operands(length, heads, kv_heads)
    leaves = [each.clone().requires_grad_() for each in given]
    context = StepContext()
    dropout = KeyedDropout(0.4, "attention", context)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=length)
    with context.entered(state):
        query, key, value = leaves
        wanted = attend(query, key, value, MaskPattern(causal=causal), ScoreMod(scale=SCALE), dropout=dropout)
        wanted.backward(gradient)
        state.calls.restart()
        dropped = DroppedAttention.of(dropout, heads, length)
    form = AttentionForm(pattern=MaskPattern(causal=causal), scale=SCALE, dropped=dropped)
    attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
    mixed, gradients = attend_in_threads(given, gradient, form, None, attends)
    torch.testing.assert_close(mixed, wanted.detach())
    for leaf, found in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize(("ranks", "exchanging"), [(4, 2), (8, 2), (8, 4)])
def test_rings_of_neighbours_send_what_the_formula_says(
    ranks: int, exchanging: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In elements: heads among neighbours there and back, and keys and their gradients between groups."""
    post, length, heads, kv_heads = Post(), 64, 8, 4
    deliver(monkeypatch, post)
    given, gradient = operands(length, heads, kv_heads)
    attends = [scheme_of("usp", rank, ranks, exchanging) for rank in range(ranks)]
    attend_in_threads(
        given, gradient, AttentionForm(pattern=MaskPattern(causal=True, window=window), scale=SCALE), None, attends
    )
    tokens, groups = length // ranks, ranks // exchanging
    swapped = (
        2 * SAMPLES * tokens * (heads * SIZE + kv_heads * 2 * SIZE + heads * SIZE) * (exchanging - 1) // exchanging
    )
    shown = Shown(length, groups, window, exchanging).tokens(0)
    passed = 3 * (groups - 1) * SAMPLES * shown * kv_heads // exchanging * 2 * SIZE
    assert dict(post.num_elements) == dict.fromkeys(range(ranks), swapped + passed)

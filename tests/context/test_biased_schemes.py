"""Every scheme adds to its scores what one process adds, and drops by functions what one process drops."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from threaded_ranks import Post, attend_in_threads, deliver, scheme_of
from torch import Tensor

from weft.comm import GroupView
from weft.models.biased import attend_biased
from weft.parallel import MicrobatchState, StepContext
from weft.parallel.draws import DrawLayout, Draws, keyed
from weft.parallel.randomness import KeyedDropout
from weft.parallel.token_draws import PairDraw, claimed
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.shares import runs_of

SCALE, SAMPLES, SIZE, LENGTH, HEADS = 0.4, 2, 4, 19, 4
SCHEMES = (
    ("ring", 3, 0), ("ring", 4, 0), ("all_gather", 3, 0), ("ulysses", 2, 0), ("ulysses", 4, 0), ("usp", 4, 2),
    ("usp", 8, 2), ("usp", 8, 4),
)  # fmt: skip
SHAPES = {"keys of heads": (HEADS, 1, LENGTH), "pairs": (1, LENGTH, LENGTH), "pairs of heads": (HEADS, LENGTH, LENGTH)}


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


SEEN = ((True, None), (False, None), (True, 5))
CASES = [(*scheme, shape, *seen) for scheme, shape, seen in Random(1).sample(list(product(SCHEMES, SHAPES, SEEN)), 24)]


@pytest.mark.parametrize(("scheme", "ranks", "exchanging", "shape", "causal", "window"), CASES)
def test_adds_what_one_process_adds(
    scheme: str,
    ranks: int,
    exchanging: int,
    shape: str,
    causal: bool,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliver(monkeypatch, Post())
    given = [drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2)]
    bias, gradient = 3.0 * drawn(*SHAPES[shape]), drawn(SAMPLES, HEADS, LENGTH, SIZE)
    query, key, value = (each.clone().requires_grad_() for each in given)
    context = StepContext()
    dropout = KeyedDropout(0.4, "attention", context)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state):
        wanted = attend_biased(query, key, value, bias, dropout, causal=causal, window=window, scale=SCALE)
        wanted.backward(gradient)
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)
    form = AttentionForm(causal=causal, scale=SCALE, window=window, bias=bias, dropped=dropped)
    attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
    mixed, gradients = attend_in_threads(given, gradient, form, None, attends)
    torch.testing.assert_close(mixed, wanted.detach())
    for leaf, found in zip((query, key, value), gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [None, 6])
def test_written_out_it_is_the_same(causal: bool, window: int | None) -> None:
    query, key, value = (drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2))
    bias = drawn(HEADS, 1, LENGTH)
    scores = query @ key.repeat_interleave(2, 1).mT * SCALE + bias
    if causal or window:
        seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().triu(1 - (window or LENGTH))
        scores = scores.masked_fill(~seen, -torch.inf)
    wanted = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    is_causal = causal or window is not None
    found = attend_biased(query, key, value, bias, None, causal=is_causal, window=window, scale=SCALE)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("form", ["flat", "sample"])
@pytest.mark.parametrize("rate", [0.3, 0.0023])
def test_every_part_of_what_a_function_drops_is_that_of_the_whole(rate: float, form: str) -> None:
    context, view = StepContext(), GroupView((0,), 0, None)
    whole = (HEADS, LENGTH, LENGTH) if form == "flat" else (1, HEADS, LENGTH, LENGTH)
    lead = (SAMPLES * HEADS,) if form == "flat" else (SAMPLES, HEADS)
    layout = DrawLayout(place=form, dim=0, whole=whole, pairs=True)  # type: ignore[arg-type]
    draws = Draws(layouts={("attention", "bernoulli_", 0): [layout]})
    ones = torch.ones(*lead, LENGTH, LENGTH, dtype=torch.float64)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state):
        kept = keyed(lambda: F.dropout(ones, rate), "attention", draws, view, context)()
        draw = keyed(lambda: claimed(rate, context, view), "attention", draws, view, context)().draw
    assert 0 < int((kept == 0).sum()) < kept.numel()
    kept = kept.view(SAMPLES, HEADS, LENGTH, LENGTH)
    assert isinstance(draw, PairDraw)
    dropped = DroppedAttention.by_function(draw, rate, HEADS, LENGTH)
    for rank in range(3):
        queries = torch.cat([torch.arange(*run) for run in runs_of(LENGTH, 3, rank)])
        for source in range(3):
            runs = runs_of(LENGTH, 3, source)
            keys = torch.cat([torch.arange(*run) for run in runs])
            part = dropped.kept((1, 3), queries, runs).double() * dropped.scale
            assert torch.equal(part, kept[:, 1:3][:, :, queries][..., keys])

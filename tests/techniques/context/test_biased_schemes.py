"""Every scheme adds to its scores what one process adds, and drops by functions what one process drops."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from threaded_ranks import Post, attend_in_threads, deliver, scheme_of
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.model.attention.scored import attend_scored
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.shares import runs_of
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.draws import DrawLayout, Draws, keyed
from weft.techniques.randomness.keyed_dropout import KeyedDropout
from weft.techniques.randomness.quiet import quiet
from weft.techniques.randomness.token_draws import PairDraw, claimed

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
        wanted = attend_scored(query, key, value, bias, dropout, causal=causal, window=window, scale=SCALE)
        wanted.backward(gradient)
        state.calls.restart()
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)
    form = AttentionForm(causal=causal, scale=SCALE, window=window, bias=bias, dropped=dropped)
    attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
    mixed, gradients = attend_in_threads(given, gradient, form, None, attends)
    torch.testing.assert_close(mixed, wanted.detach())
    for leaf, found in zip((query, key, value), gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)


MORE = {"cap": (0.7, False), "sinks": (None, True), "both": (30.0, True)}
"""A cap of scores, and whether there are sinks."""


@pytest.mark.parametrize(
    ("scheme", "ranks", "exchanging", "causal", "window", "more"),
    [
        (*scheme, *seen, more)
        for scheme, seen, more in Random(2).sample(list(product(SCHEMES, SEEN, MORE)), 18)
    ],
)  # fmt: skip
def test_bends_scores_and_has_sinks_as_one_process(
    scheme: str,
    ranks: int,
    exchanging: int,
    causal: bool,
    window: int | None,
    more: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    deliver(monkeypatch, Post())
    given = [3.0 * drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2)]
    (softcap, has_sinks), bias = MORE[more], drawn(HEADS, LENGTH, LENGTH) if more == "both" else None
    sinks = drawn(HEADS).requires_grad_() if has_sinks else None
    isolated = (ranks + bool(window)) % 2 == 0
    documents = torch.tensor([[*[0] * 7, *[1] * 12], [*[0] * 19]]) if isolated else None
    gradient = drawn(SAMPLES, HEADS, LENGTH, SIZE)
    query, key, value = (each.clone().requires_grad_() for each in given)
    wanted = written_out(query, key, value, bias, softcap, sinks, causal=causal, window=window, documents=documents)
    wanted.backward(gradient)
    own = None if sinks is None else sinks.detach().clone().requires_grad_()
    form = AttentionForm(causal=causal, scale=SCALE, window=window, bias=bias, softcap=softcap, sinks=own)
    attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
    mixed, gradients = attend_in_threads(given, gradient, form, documents, attends)
    torch.testing.assert_close(mixed, wanted.detach())
    for leaf, found in zip((query, key, value), gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)
    if sinks is not None and own is not None:  # to which every rank has added its own queries' share
        torch.testing.assert_close(own.grad, sinks.grad)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    softcap: float | None,
    sinks: Tensor | None,
    *,
    causal: bool,
    window: int | None,
    documents: Tensor | None,
) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).mT * SCALE
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores if bias is None else scores + bias
    seen = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    if causal:
        seen = seen.tril().triu(1 - (window or LENGTH))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(SAMPLES, -1, LENGTH, 1)], -1)
    return scores.softmax(-1)[..., :LENGTH] @ value.repeat_interleave(groups, 1)


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("window", [None, 6])
def test_drops_beside_sinks_as_one_process(more: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(monkeypatch, Post())
    given = [drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2)]
    softcap, has_sinks = MORE[more]
    sinks = drawn(HEADS).requires_grad_() if has_sinks else None
    gradient = drawn(SAMPLES, HEADS, LENGTH, SIZE)
    query, key, value = (each.clone().requires_grad_() for each in given)
    context = StepContext()
    dropout = KeyedDropout(0.4, "attention", context)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state):
        wanted = attend_scored(
            query, key, value, None, dropout, causal=True, window=window, scale=SCALE, softcap=softcap, sinks=sinks
        )  # fmt: skip
        wanted.backward(gradient)
        state.calls.restart()
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)
    own = None if sinks is None else sinks.detach().clone().requires_grad_()
    form = AttentionForm(causal=True, scale=SCALE, window=window, softcap=softcap, sinks=own, dropped=dropped)
    for scheme, ranks, exchanging in SCHEMES[:6]:
        attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
        mixed, gradients = attend_in_threads(given, gradient, form, None, attends)
        torch.testing.assert_close(mixed, wanted.detach())
        for leaf, found in zip((query, key, value), gradients, strict=True):
            torch.testing.assert_close(found, leaf.grad)
        if sinks is not None and own is not None:
            torch.testing.assert_close(own.grad, sinks.grad)
            own.grad = None


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
    found = attend_scored(query, key, value, bias, None, causal=is_causal, window=window, scale=SCALE)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("form", ["flat", "sample"])
@pytest.mark.parametrize("rate", [0.3, 0.0023])
def test_every_part_of_what_a_function_drops_is_that_of_the_whole(rate: float, form: str) -> None:
    context, view = StepContext(), GroupView((0,), 0, None)
    whole = (HEADS, LENGTH, LENGTH) if form == "flat" else (1, HEADS, LENGTH, LENGTH)
    lead = (SAMPLES * HEADS,) if form == "flat" else (SAMPLES, HEADS)
    layout = DrawLayout(place=form, dim=0, whole=whole)  # type: ignore[arg-type]
    draws = Draws(layouts={("attention", "bernoulli_", 0): [layout]}, length=LENGTH)
    ones = torch.ones(*lead, LENGTH, LENGTH, dtype=torch.float64)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state):
        kept = keyed(lambda: F.dropout(ones, rate), "attention", draws, view, context)()
        state.calls.restart()
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


def test_a_proof_drops_nothing_of_shared_attention() -> None:
    """Plain PyTorch, with which it is compared, draws other numbers; the keys are noted all the same."""
    context, view = StepContext(), GroupView((0,), 0, None)
    layout = DrawLayout(place="sample", dim=0, whole=(1, HEADS, LENGTH, LENGTH))
    draws = Draws(layouts={("attention", "bernoulli_", 0): [layout]}, length=LENGTH)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state), quiet([], context) as ledger:
        draw = keyed(lambda: claimed(0.4, context, view), "attention", draws, view, context)().draw
        assert isinstance(draw, PairDraw)
        dropped = DroppedAttention.by_function(draw, 0.4, HEADS, LENGTH)
        assert dropped.kept((0, HEADS), torch.arange(LENGTH), [(0, LENGTH)]).all()
        assert dropped.scale == pytest.approx(1 / 0.6)  # as the operators of a dropout by a function have it
        assert DroppedAttention.of(KeyedDropout(0.4, "attention.dropout", context), HEADS, LENGTH) is None
        assert not ledger.repeated
        state.calls.restart()
        DroppedAttention.of(KeyedDropout(0.4, "attention.dropout", context), HEADS, LENGTH)
    assert ledger.repeated == {"attention.dropout\0" + "0"}

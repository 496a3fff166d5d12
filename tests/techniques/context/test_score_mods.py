"""Every scheme does to scores what one process does: caps, slopes and sinks, with windows, documents and dropout."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from threaded_ranks import Post, attend_in_threads, deliver, scheme_of
from torch import Tensor

from weft.model.attention.call import MaskPattern, ScoreMod, attend
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.form import AttentionForm
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.keyed_dropout import KeyedDropout
from weft.techniques.randomness.quiet import quiet

SCALE, SAMPLES, SIZE, LENGTH, HEADS = 0.4, 2, 4, 19, 4
SCHEMES = (
    ("ring", 3, 0), ("ring", 4, 0), ("all_gather", 3, 0), ("ulysses", 2, 0), ("ulysses", 4, 0), ("usp", 4, 2),
    ("usp", 8, 2), ("usp", 8, 4),
)  # fmt: skip


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)


SEEN = ((True, None), (False, None), (True, 5))
MORE = {
    "cap": (0.7, False, False), "sinks": (None, True, False), "slopes": (None, False, True), "all": (30.0, True, True),
}  # fmt: skip
"""A cap of scores, and whether there are sinks and slopes."""


@pytest.mark.parametrize(
    ("scheme", "ranks", "exchanging", "causal", "window", "more"),
    [
        (*scheme, *seen, more)
        for scheme, seen, more in Random(2).sample(list(product(SCHEMES, SEEN, MORE)), 30)
    ],
)  # fmt: skip
def test_changes_scores_as_one_process(
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
    softcap, has_sinks, has_slopes = MORE[more]
    slopes = drawn(HEADS).abs() if has_slopes else None
    sinks = drawn(HEADS).requires_grad_() if has_sinks else None
    isolated = (ranks + bool(window)) % 2 == 0
    documents = torch.tensor([[*[0] * 7, *[1] * 12], [*[0] * 19]]) if isolated else None
    gradient = drawn(SAMPLES, HEADS, LENGTH, SIZE)
    query, key, value = (each.clone().requires_grad_() for each in given)
    wanted = written_out(query, key, value, slopes, softcap, sinks, causal=causal, window=window, documents=documents)
    wanted.backward(gradient)
    own = None if sinks is None else sinks.detach().clone().requires_grad_()
    mod = ScoreMod(softcap=softcap, slopes=slopes, sinks=own)
    form = AttentionForm(pattern=MaskPattern(causal=causal, window=window), mod=mod, scale=SCALE)
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
    slopes: Tensor | None,
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
    scores = scores if slopes is None else scores + slopes[:, None, None] * torch.arange(LENGTH)
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
def test_drops_beside_it_as_one_process(more: str, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    deliver(monkeypatch, Post())
    given = [drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2)]
    softcap, has_sinks, has_slopes = MORE[more]
    slopes = drawn(HEADS).abs() if has_slopes else None
    sinks = drawn(HEADS).requires_grad_() if has_sinks else None
    gradient = drawn(SAMPLES, HEADS, LENGTH, SIZE)
    query, key, value = (each.clone().requires_grad_() for each in given)
    context = StepContext()
    dropout = KeyedDropout(0.4, "attention", context)
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state):
        mod = ScoreMod(scale=SCALE, softcap=softcap, slopes=slopes, sinks=sinks)
        wanted = attend(query, key, value, MaskPattern(causal=True, window=window), mod, dropout=dropout)
        wanted.backward(gradient)
        state.calls.restart()
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)
    own = None if sinks is None else sinks.detach().clone().requires_grad_()
    pattern = MaskPattern(causal=True, window=window)
    form = AttentionForm(pattern=pattern, mod=replace(mod, sinks=own), scale=SCALE, dropped=dropped)
    for scheme, ranks, exchanging in SCHEMES[:6]:
        attends = [scheme_of(scheme, rank, ranks, exchanging) for rank in range(ranks)]
        mixed, gradients = attend_in_threads(given, gradient, form, None, attends)
        torch.testing.assert_close(mixed, wanted.detach())
        for leaf, found in zip((query, key, value), gradients, strict=True):
            torch.testing.assert_close(found, leaf.grad)
        if sinks is not None and own is not None:
            torch.testing.assert_close(own.grad, sinks.grad)
            own.grad = None


@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize(("causal", "window"), SEEN)
def test_one_process_is_what_is_written_out(causal: bool, window: int | None, more: str) -> None:
    query, key, value = (drawn(SAMPLES, heads, LENGTH, SIZE) for heads in (HEADS, 2, 2))
    softcap, has_sinks, has_slopes = MORE[more]
    slopes, sinks = (drawn(HEADS).abs() if has_slopes else None), (drawn(HEADS) if has_sinks else None)
    wanted = written_out(query, key, value, slopes, softcap, sinks, causal=causal, window=window, documents=None)
    mod = ScoreMod(scale=SCALE, softcap=softcap, slopes=slopes, sinks=sinks)
    found = attend(query, key, value, MaskPattern(causal=causal, window=window), mod)
    torch.testing.assert_close(found, wanted)


def test_a_proof_drops_nothing_of_shared_attention() -> None:
    """Plain PyTorch, with which it is compared, draws other numbers; the keys are noted all the same."""
    context = StepContext()
    state = MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9]), sequence_length=LENGTH)
    with context.entered(state), quiet([], context) as ledger:
        assert DroppedAttention.of(KeyedDropout(0.4, "attention.dropout", context), HEADS, LENGTH) is None
        assert not ledger.repeated
        state.calls.restart()
        DroppedAttention.of(KeyedDropout(0.4, "attention.dropout", context), HEADS, LENGTH)
    assert ledger.repeated == {"attention.dropout\0" + "0"}

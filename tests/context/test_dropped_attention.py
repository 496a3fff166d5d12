"""A rank that has some of the queries, and sees the keys of one rank at a time, drops what one process drops."""

from __future__ import annotations

import pytest
import torch
from simulated_ranks import shared_among
from torch import nn

from weft.models.dropping import attend_dropping
from weft.parallel import MicrobatchState, StepContext
from weft.parallel.randomness import KeyedDropout
from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.form import AttentionForm
from weft.techniques.context.shares import runs_of

LENGTH, HEADS, SAMPLES = 13, 4, 3
RANKS = 3


def state() -> MicrobatchState:
    return MicrobatchState(step=5, seed=7, sample_ids=torch.tensor([4, 9, 2]), sequence_length=LENGTH)


@pytest.mark.parametrize("probability", [0.1, 0.5, 1.0])
def test_every_part_of_the_mask_is_that_of_the_whole(probability: float) -> None:
    context = StepContext()
    dropout = KeyedDropout(probability, "attention", context)
    with context.entered(state()):
        whole, scale = dropout.mask(torch.empty(SAMPLES, HEADS, LENGTH, LENGTH))
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)
    assert dropped is not None
    assert dropped.scale == scale
    for rank in range(RANKS):
        queries = torch.cat([torch.arange(*run) for run in runs_of(LENGTH, RANKS, rank)])
        for source in range(RANKS):
            runs = runs_of(LENGTH, RANKS, source)
            keys = torch.cat([torch.arange(*run) for run in runs])
            part = dropped.kept((1, 3), queries, runs)
            assert torch.equal(part, whole[:, 1:3][:, :, queries][..., keys])


@pytest.mark.parametrize("module", ["evaluated", "zero"])
def test_what_drops_nothing_costs_nothing(module: str) -> None:
    dropout = KeyedDropout(0.0 if module == "zero" else 0.3, "attention", StepContext())
    dropout.train(module != "evaluated")
    assert DroppedAttention.of(dropout, HEADS, LENGTH) is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_in_parts_is_that_of_one_process(causal: bool, kv_heads: int) -> None:
    draw = torch.Generator().manual_seed(1)
    query, key, value, gradient = (
        torch.randn(SAMPLES, heads, LENGTH, 6, generator=draw, dtype=torch.float64)
        for heads in (HEADS, kv_heads, kv_heads, HEADS)
    )
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    context = StepContext()
    dropout: nn.Module = KeyedDropout(0.4, "attention", context)
    with context.entered(state()):
        one = attend_dropping(*leaves, None, dropout, causal=causal)
        one.backward(gradient)
        dropped = DroppedAttention.of(dropout, HEADS, LENGTH)  # type: ignore[arg-type]
    assert dropped is not None
    form = AttentionForm(causal=causal, scale=6**-0.5, dropped=dropped)
    mixed, gradients = shared_among(RANKS, (query, key, value), gradient, form)
    torch.testing.assert_close(mixed, one)
    for leaf, found in zip(leaves, gradients, strict=True):
        torch.testing.assert_close(found, leaf.grad)

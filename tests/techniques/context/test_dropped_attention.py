"""A rank that has some of the queries, and sees the keys of one rank at a time, drops what one process drops."""

from __future__ import annotations

import pytest
import torch

from weft.techniques.context.dropped import DroppedAttention
from weft.techniques.context.token_runs import runs_of
from weft.techniques.core import MicrobatchState, StepContext
from weft.techniques.randomness.keyed_dropout import KeyedDropout

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
    with context.entered(state()):
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

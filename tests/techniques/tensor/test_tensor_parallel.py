"""Tensor and sequence parallelism equal one process."""

from __future__ import annotations

from functools import partial

import pytest
import small

import parity


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize(
    "make",
    [
        partial(small.decoder, 9, 0.0, True),
        partial(small.decoder, 9, 0.2, False),
        partial(small.encoder, 7, 0.1),
        partial(small.fused, 5, 0.2),
        partial(small.fused, 3, 0.0),
    ],
    ids=["decoder-tied", "decoder-dropout", "encoder", "fused-dropout", "fused-shorter-than-group"],
)
def test_gradients_equal_one_process(ranks, make, world, sequence):
    for loss, gradients in ranks.run(world, parity.compare, make, parity.plan_of(world, sequence)):
        assert loss <= 1e-12
        assert gradients <= 1e-10


def test_gradients_equal_one_process_without_the_fused_loss(ranks):
    plan = parity.plan_of(2, sequence=True, fused=False)
    for loss, gradients in ranks.run(2, parity.compare, partial(small.fused, 5, 0.2), plan):
        assert loss <= 1e-12
        assert gradients <= 1e-10


def test_gradients_equal_one_process_in_fp32(ranks):
    plan = parity.plan_of(2, sequence=True, precision="fp32")
    for loss, gradients in ranks.run(2, parity.compare, partial(small.decoder, 9, 0.2), plan):
        assert loss <= 1e-6
        assert gradients <= 1e-5

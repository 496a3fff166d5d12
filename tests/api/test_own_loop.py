"""Loops that keep their own forward, loss and optimizer.step(): equal to plain PyTorch's under every plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from own_loops import (
    PLANS,
    Loop,
    accumulating,
    adversaries,
    autoencoder,
    classifier,
    distilled,
    plainly,
    recurrent,
    taken_ahead,
    under,
)
from pool import RankPool


def assert_alike(found: Any, expected: Any) -> None:
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-10, atol=1e-12)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-10)


def check(ranks: RankPool, name: str, loop: Loop) -> None:
    expected = ranks.run(1, plainly, loop)[0]
    plan = PLANS[name]
    for found in ranks.run(plan.mesh.world_size, under, plan, loop):
        assert_alike(found, expected)


@pytest.mark.parametrize("name", PLANS)
def test_a_classifier(ranks: RankPool, name: str) -> None:
    check(ranks, name, classifier)


@pytest.mark.parametrize("order", ["before", "between"])
def test_zero_grad_may_stand_anywhere(ranks: RankPool, order: str) -> None:
    for name in ("data", "zero-2", "zero-3"):
        check(ranks, name, partial(classifier, order=order))


@pytest.mark.parametrize("name", ["data", "zero-1", "zero-3", "hybrid"])
@pytest.mark.parametrize("loop", [accumulating, recurrent, adversaries, distilled], ids=lambda loop: loop.__name__)
def test_a_loop_of_another_kind(ranks: RankPool, loop: Loop, name: str) -> None:
    check(ranks, name, loop)


@pytest.mark.parametrize("name", ["data", "data of 4", "zero-3"])
def test_batches_may_be_taken_before_the_first_is_trained_on(ranks: RankPool, name: str) -> None:
    check(ranks, name, taken_ahead)


@pytest.mark.parametrize("name", ["data", "data of 4", "zero-3"])
def test_what_a_model_draws_is_drawn_for_its_samples(ranks: RankPool, name: str) -> None:
    """The draws are keyed, so they are those of another session, and not plain PyTorch's."""
    (expected,) = ranks.run(1, under, PLANS["alone"], autoencoder)
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], autoencoder):
        assert_alike(found, expected)


@pytest.mark.parametrize("name", ["data", "zero-2", "zero-3"])
def test_batch_norms_see_the_whole_batch(ranks: RankPool, name: str) -> None:
    check(ranks, name, partial(classifier, norm=True))
    check(ranks, name, partial(adversaries, norm=True))


@pytest.mark.parametrize("loop", [accumulating, adversaries, distilled], ids=lambda loop: loop.__name__)
def test_tensor_ranks_take_the_same_steps(ranks: RankPool, loop: Loop) -> None:
    check(ranks, "tensor", loop)

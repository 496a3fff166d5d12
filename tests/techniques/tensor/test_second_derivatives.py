"""Collectives differentiated twice: a penalty on the gradient of a layer that ranks share is the whole layer's."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pool import RankPool
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.techniques.core.autograd import (
    copy_to_group,
    gather_features,
    gather_samples,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_sequence,
)
from weft.techniques.fused_loss.vocabulary import vocabulary_cross_entropy

LENGTH, WIDTH, INNER = 5, 6, 8


def operands() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = (2, LENGTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH)
    x, up, down = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return x, up, down


def penalty(x: Tensor, out: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
    return slope.square().sum() + out.sum()


def whole(how: str) -> tuple[Tensor, Tensor]:
    x, up, down = (each.requires_grad_() for each in operands())
    mixed = torch.tanh(x @ up)
    out = mixed @ down if how != "features" else mixed
    return torch.autograd.grad(penalty(x, out), (x, up) if how == "features" else (up, down))  # type: ignore[return-value]


def shared(how: str) -> tuple[Tensor, Tensor]:
    """The same by two ranks, each of which has half of the inner features."""
    rank = dist.get_rank()
    view = GroupView((0, 1), rank, dist.group.WORLD)
    x, up, down = operands()
    half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
    x, up, down = (each.requires_grad_() for each in (x, up[:, half].clone(), down[half].clone()))
    if how == "columns":
        out = reduce_from_group(torch.tanh(copy_to_group(x, view) @ up) @ down, view)
    elif how == "features":
        out = gather_features(torch.tanh(copy_to_group(x, view) @ up), view)
        by_x, by_up = torch.autograd.grad(penalty(x, out), (x, up))
        return by_x, by_up
    else:
        inside = gather_sequence(scatter_sequence(x, view), view, LENGTH, sum_grad=True)
        made = reduce_scatter_sequence(torch.tanh(inside @ up) @ down, view)
        out = gather_sequence(made, view, LENGTH, sum_grad=False)
    return torch.autograd.grad(penalty(x, out), (up, down))  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["columns", "features", "sequence"])
def test_a_penalty_on_gradients_is_that_of_one_process(ranks: RankPool, how: str) -> None:
    first, second = whole(how)
    for rank, (mine, other) in enumerate(ranks.run(2, shared, how)):
        half = slice(rank * INNER // 2, (rank + 1) * INNER // 2)
        if how == "features":
            torch.testing.assert_close(mine, first, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(other, second[:, half], rtol=1e-10, atol=1e-12)
        else:
            torch.testing.assert_close(mine, first[:, half], rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(other, second[half], rtol=1e-10, atol=1e-12)


def gathered() -> Tensor:
    """A loss of all ranks' samples, of which each rank counts for its share."""
    rank = dist.get_rank()
    view = GroupView((0, 1), rank, dist.group.WORLD)
    x, up, _ = operands()
    mine, up = x[rank : rank + 1].clone().requires_grad_(), up.requires_grad_()
    every = gather_samples(torch.tanh(mine @ up), view, 0)
    (slope,) = torch.autograd.grad(every.sum(0).pow(3).sum() / 2, mine, create_graph=True)
    (by_up,) = torch.autograd.grad(slope.square().sum(), up)
    dist.all_reduce(by_up)
    return by_up


def test_gathered_samples_are_differentiated_twice(ranks: RankPool) -> None:
    x, up, _ = (each.requires_grad_() for each in operands())
    (slope,) = torch.autograd.grad(torch.tanh(x @ up).sum(0).pow(3).sum(), x, create_graph=True)
    (wanted,) = torch.autograd.grad(slope.square().sum(), up)
    for found in ranks.run(2, gathered):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


def test_what_has_no_second_derivative_says_so() -> None:
    """The vocabulary loss keeps its gradient by the logits, whose own gradient was left out."""
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn((LENGTH, WIDTH), generator=draw, dtype=torch.float64).requires_grad_()
    labels, alone = torch.tensor([0, 3, 5, 1, 2]), GroupView((0,), 0, None)
    (wanted,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), logits)
    (found,) = torch.autograd.grad(vocabulary_cross_entropy(logits, labels, alone), logits)
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
    with pytest.raises(PlanError, match=r"the loss of logits .* has no second derivative.*Use plan\.mesh\.tensor = 1"):
        torch.autograd.grad(vocabulary_cross_entropy(logits, labels, alone), logits, create_graph=True)

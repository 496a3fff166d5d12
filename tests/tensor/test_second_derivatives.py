"""Collectives differentiated twice: a penalty on the gradient of a layer that ranks share is the whole layer's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from pool import RankPool
from weft.comm import GroupView
from weft.errors import PlanError
from weft.models.derivatives import once
from weft.parallel.autograd import (
    copy_to_group,
    gather_features,
    gather_samples,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_sequence,
)

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


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @once("this product", "Use another one.")
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2


def test_what_has_no_second_derivative_says_so() -> None:
    x = torch.ones(2, requires_grad=True)
    _Doubled.apply(x).sum().backward()  # type: ignore[attr-defined]
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    with pytest.raises(PlanError, match=r"this product has no second derivative.*Use another one"):
        torch.autograd.grad(_Doubled.apply(x).sum(), x, create_graph=True)  # type: ignore[attr-defined]

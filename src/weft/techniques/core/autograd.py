"""Collectives with gradients.  Each names what it does forward and, after the word `grad`, backward.

All of them must be called on every rank of the view, forward and backward, in the same order; where the view has one
member callers leave them out.  Source of the conjugate pairs: Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053,
and Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198 (along the sequence).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from weft.comm.collectives import all_gather_shards, all_reduce, reduce_scatter_shards, shard_of
from weft.comm.mesh import GroupView
from weft.model.derivatives import is_differentiated

# torch's stubs leave Function.apply untyped; the functions below are the typed way in.  A backward that is
# differentiated itself is made of the functions here, whose gradients are those of one another; else it is the bare
# collective, which costs no node and which compilers follow.


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView) -> Tensor:
        ctx.view = view
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if is_differentiated():
            return reduce_from_group(grads[0], ctx.view), None
        # Autograd may share the gradient with others: reduce a copy.
        return all_reduce(grads[0].clone(memory_format=torch.contiguous_format), ctx.view), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView) -> Tensor:
        ctx.view = view
        # Not in place: selective recomputation may hold `x`, and would sum it twice.
        return all_reduce(x.clone(memory_format=torch.contiguous_format), view)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return copy_to_group(grads[0], ctx.view) if is_differentiated() else grads[0], None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, blocks: int) -> Tensor:
        ctx.view, ctx.blocks = view, blocks
        width = x.shape[-1] // blocks
        parts = x.unflatten(-1, (blocks, width))
        return all_gather_shards(parts, view, x.dim(), width * view.size).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        if is_differentiated():
            return cast(Tensor, _CutFeatures.apply(grads[0], ctx.view, ctx.blocks)), None, None
        return _features_of(grads[0], ctx.view, ctx.blocks), None, None


class _CutFeatures(torch.autograd.Function):
    """This rank's features of what all ranks hold alike, block by block; grad: gathered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, blocks: int) -> Tensor:
        ctx.view, ctx.blocks = view, blocks
        return _features_of(x, view, blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return gather_features(grads[0], ctx.view, ctx.blocks), None, None


def _features_of(x: Tensor, view: GroupView, blocks: int) -> Tensor:
    parts = x.unflatten(-1, (blocks, x.shape[-1] // blocks))
    return shard_of(parts, view, parts.dim() - 1).flatten(-2)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, dim: int, length: int, sum_grad: bool) -> Tensor:
        ctx.view, ctx.dim, ctx.sum_grad = view, dim, sum_grad
        return all_gather_shards(x, view, dim, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        if is_differentiated():
            cut = _ReduceScatter if ctx.sum_grad else _Scatter
            return cast(Tensor, cut.apply(grads[0], ctx.view, ctx.dim)), None, None, None, None
        own = (reduce_scatter_shards if ctx.sum_grad else shard_of)(grads[0], ctx.view, ctx.dim)
        return own, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, dim: int) -> Tensor:
        ctx.view, ctx.dim, ctx.length = view, dim, x.shape[dim]
        return reduce_scatter_shards(x, view, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(ctx, grads[0], sum_grad=True), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, dim: int) -> Tensor:
        ctx.view, ctx.dim, ctx.length = view, dim, x.shape[dim]
        return shard_of(x, view, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(ctx, grads[0], sum_grad=False), None, None


def _gathered(ctx: Any, gradient: Tensor, *, sum_grad: bool) -> Tensor:
    if is_differentiated():
        return cast(Tensor, _Gather.apply(gradient, ctx.view, ctx.dim, ctx.length, sum_grad))
    return all_gather_shards(gradient, ctx.view, ctx.dim, ctx.length)


def copy_to_group(x: Tensor, view: GroupView) -> Tensor:
    """Return `x`; grad: sum over the group (each rank used `x` for its own share of what follows)."""
    return _Copy.apply(x, view)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def reduce_from_group(x: Tensor, view: GroupView) -> Tensor:
    """Return the sum of `x` over the group; grad: unchanged."""
    return _Reduce.apply(x, view)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def gather_features(x: Tensor, view: GroupView, blocks: int = 1) -> Tensor:
    """Return (…, features) from the group's (…, features / members), block by block; grad: this rank's own features."""
    return _GatherFeatures.apply(x, view, blocks)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def gather_sequence(x: Tensor, view: GroupView, length: int, *, sum_grad: bool) -> Tensor:
    """Return (batch, length, …) from the group's shards along dim 1.

    grad: this rank's shard of the sum over the group (`sum_grad`: each rank used the whole for its own share of what
    follows), or of its own gradient (all ranks compute the same from the whole).
    """
    return _Gather.apply(x, view, 1, length, sum_grad)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def gather_samples(x: Tensor, view: GroupView, dim: int) -> Tensor:
    """Return the members' samples behind each other along `dim`, of which each has equally many.

    grad: this rank's samples of the sum over the group (what each rank makes of the whole counts for its share).
    """
    length = x.shape[dim] * view.size
    return _Gather.apply(x, view, dim, length, True)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def reduce_scatter_sequence(x: Tensor, view: GroupView) -> Tensor:
    """Return this rank's shard along dim 1 of the sum over the group; grad: gathered."""
    return _ReduceScatter.apply(x, view, 1)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def scatter_sequence(x: Tensor, view: GroupView) -> Tensor:
    """Return this rank's shard along dim 1 of what all ranks hold alike; grad: gathered."""
    return _Scatter.apply(x, view, 1)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

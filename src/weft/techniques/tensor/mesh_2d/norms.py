"""Norms over features of which each rank of a line has a part: sums over the line complete the statistics.

Forward one small exchange: RMS norms sum one number per token; layer norms gather two (mean and squared distances from
it, which merge without cancellation, Chan et al. 1979).  Backward one sum of as many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import GroupView
from weft.model.derivatives import once
from weft.techniques.tensor.mesh_2d.roles import is_centred


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, view: GroupView, epsilon: float, centred: bool
    ) -> Tensor:
        # x (samples / q, …, features / q); its statistics (samples / q, …, 1)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, square = _centred(wide, view) if centred else _uncentred(wide, view)
        scale = (square + epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, mean, scale)
        ctx.view, ctx.centred = view, centred
        made = ((wide if mean is None else wide - mean) * scale).to(x.dtype)
        made = made if weight is None else made * weight
        return made if bias is None else made + bias

    @staticmethod
    @once("a norm that tensor ranks of a grid compute together", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale = ctx.saved_tensors
        gradient, (by_x, by_weight, by_bias) = grads[0], ctx.needs_input_grad[:3]
        wide = x.to(scale.dtype)
        normed = (wide if mean is None else wide - mean) * scale
        d_weight = (gradient * normed).flatten(0, -2).sum(0).to(weight.dtype) if by_weight else None
        d_bias = gradient.flatten(0, -2).sum(0) if by_bias else None
        if not by_x:
            return None, d_weight, d_bias, None, None, None
        # With n = normed and g = dL/dn:  dx = scale · (g − n·mean(g·n) − mean(g)), means over all features, the last
        # one for layer norms alone.  Both means travel in one all-reduce.
        by_normed = gradient.to(scale.dtype) if weight is None else (gradient * weight).to(scale.dtype)
        sums = [(by_normed * normed).sum(-1), *([by_normed.sum(-1)] if ctx.centred else [])]
        means = all_reduce(torch.stack(sums), ctx.view) / (x.shape[-1] * ctx.view.size)
        d_x = by_normed - normed * means[0, ..., None]
        d_x = d_x - means[1, ..., None] if ctx.centred else d_x
        return (d_x * scale).to(x.dtype), d_weight, d_bias, None, None, None


def _uncentred(x: Tensor, view: GroupView) -> tuple[None, Tensor]:
    """Return no mean, and the mean square over all features, (samples, …, 1)."""
    total = all_reduce(x.square().sum(-1, keepdim=True), view)
    return None, total / (x.shape[-1] * view.size)


def _centred(x: Tensor, view: GroupView) -> tuple[Tensor, Tensor]:
    """Return mean and variance over all features, (samples, …, 1) each."""
    # E[x²] − E[x]² would cancel digits where the mean is large; squared distances from each part's own mean do not.
    own = x.mean(-1, keepdim=True)
    means, squares = all_gather(torch.stack([own, (x - own).square().sum(-1, keepdim=True)]), view).unbind(1)
    mean = means.mean(0)
    between = (means - mean).square().sum(0) * x.shape[-1]
    return mean, (squares.sum(0) + between) / (x.shape[-1] * view.size)


def norm_forward(module: nn.Module, view: GroupView) -> Callable[[Tensor], Tensor]:
    """Return the forward of a norm of which each rank of the line has a part of features and weights.

    Statistics are in fp32 or wider.  Call it on every rank of the line.
    """
    centred, stated_epsilon = is_centred(module), _epsilon_of(module)

    def forward(x: Tensor) -> Tensor:
        epsilon = torch.finfo(x.dtype).eps if stated_epsilon is None else stated_epsilon
        weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
        return _Norm.apply(x, weight, bias, view, epsilon, centred)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

    return forward


def _epsilon_of(module: nn.Module) -> float | None:
    """Return what a norm adds to the mean square, by the names that it has in torch and transformers; None: it takes
    the least step of its input's type."""
    epsilon: Any = getattr(module, "eps", None)
    epsilon = getattr(module, "variance_epsilon", None) if epsilon is None else epsilon
    return None if epsilon is None else float(epsilon)

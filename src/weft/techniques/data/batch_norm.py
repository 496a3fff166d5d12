"""Batch normalisation over the samples of all data ranks: equal to one process that sees the whole microbatch row.

torch's own `SyncBatchNorm` does not run on CPUs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from weft.comm.collectives import all_gather, all_reduce
from weft.comm.mesh import GroupView, Mesh
from weft.config.plan import BATCH_AXES
from weft.model.derivatives import once


class _Normalise(torch.autograd.Function):
    """(x, weight, bias) → normalised x, and the mean, biased variance and count that it used.

    One exchange each way, of a few numbers per channel.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, view: GroupView
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean, variance, total = _statistics(wide, view)
        scale, shift = (None if tensor is None else tensor.to(wide.dtype) for tensor in (weight, bias))
        output = F.batch_norm(wide, mean, variance, scale, shift, False, 0.0, epsilon)
        ctx.save_for_backward(x, mean, variance, total, weight)
        ctx.view, ctx.epsilon, ctx.bias_dtype = view, epsilon, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    @once(
        "batch normalisation over several data ranks or in 16 bits",
        "Use one data rank and fp32, or a norm of each sample (LayerNorm, GroupNorm).",
    )
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, mean, variance, total, weight = ctx.saved_tensors
        grad = grads[0].to(mean.dtype)
        centred = x.to(mean.dtype) - _broadcast(mean, x)  # (samples, channels, …); statistics are (channels,)
        inverse = (variance + ctx.epsilon).rsqrt()
        by_bias, by_weight = grad.sum(_dims(x)), (centred * grad).sum(_dims(x)) * inverse
        by_x = None
        if ctx.needs_input_grad[0]:
            # scale/σ · (grad − mean(grad) − x̂ · mean(grad · x̂)), means over the samples of all ranks
            of_grad, of_normalised = (all_reduce(torch.stack([by_bias, by_weight]), ctx.view) / total).unbind()
            scale = inverse if weight is None else inverse * weight
            constant, slope = -scale * of_grad, -scale * inverse * of_normalised
            by_x = torch.addcmul(_broadcast(constant, x), centred, _broadcast(slope, x))
            by_x = by_x.addcmul_(grad, _broadcast(scale, x)).to(grads[0].dtype)
        return (
            by_x,
            None if weight is None else by_weight.to(weight.dtype),
            None if ctx.bias_dtype is None else by_bias.to(ctx.bias_dtype),
            None,
            None,
        )


def _statistics(x: Tensor, view: GroupView) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count per channel over all ranks, the same bits on each.  Collective.

    Deviations are taken from each rank's own mean (Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm
    for computing sample variances", 1979, eq. 2.1): sums of squares alone cancel where |mean| >> deviation.  In passes
    of their own: `var_mean` and torch's batch norm are not vectorised here and take 7 and 2.5 times as long.
    """
    count = x.numel() // x.shape[1]
    mean = x.sum(_dims(x)) / max(1, count)
    squares = (x - _broadcast(mean, x)).square_().sum(_dims(x))
    own = torch.cat([mean, squares, x.new_full((1,), count)])  # filled there: no wait for a copy from the host
    # Gathered and combined in the order of ranks on each of them, so that all get the same bits; the ranks' counts may
    # differ, and weigh their means.
    every = all_gather(own, view)
    means, squares, counts = *every[:, :-1].chunk(2, dim=1), every[:, -1:]
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    variance = (squares + (means - mean).square() * counts).sum(0) / total
    return mean, variance, total


def _dims(x: Tensor) -> list[int]:
    """Return all dims except that of the channels."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _broadcast(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *(1,) * (like.dim() - 2))


class _Synchronised(_BatchNorm):
    """Takes the place of a `BatchNormNd` by its class; parameters, buffers and hooks are the module's own."""

    _weft_view: GroupView

    def _check_input_dim(self, input: Tensor) -> None:
        assert input.dim() >= 2, "batch normalisation takes (samples, channels, …)"

    def forward(self, input: Tensor) -> Tensor:
        by_batch = self.training or self.running_mean is None
        if not by_batch:
            return self._by_running_statistics(input)
        self._check_input_dim(input)
        result = _Normalise.apply(input, self.weight, self.bias, self.eps, self._weft_view)
        output, mean, variance, total = cast(tuple[Tensor, Tensor, Tensor, Tensor], result)
        if self.training and self.track_running_stats:
            self._track(mean, variance * (total / (total - 1)))
        return output

    def _by_running_statistics(self, input: Tensor) -> Tensor:
        dtype = torch.promote_types(input.dtype, torch.float32)
        fixed = (self.running_mean, self.running_var, self.weight, self.bias)
        mean, variance, weight, bias = (None if tensor is None else tensor.to(dtype) for tensor in fixed)
        return F.batch_norm(input.to(dtype), mean, variance, weight, bias, False, 0.0, self.eps).to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, unbiased: Tensor) -> None:
        assert self.num_batches_tracked is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        self.num_batches_tracked.add_(1)
        if self.momentum is None:
            weight = 1.0 / self.num_batches_tracked.to(mean.dtype)
        else:
            weight = mean.new_full((), self.momentum)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), weight.to(running.dtype))


def apply_batch_norm(part: nn.Module, mesh: Mesh, *, is_narrow: bool = False) -> None:
    """Let every `BatchNorm1d`, `2d` and `3d` of `part` take its statistics over all ranks that see other samples or
    parts of them; names and buffers stay.

    All of them must then run the same number of microbatches, of any sizes.  Running statistics become those of one
    process (unbiased variance) and are equal on all of them.  Outside training nothing is communicated.

    Args:
        is_narrow: weights are in bf16 or fp16.  Statistics stay in fp32, a mixture that torch's own kernel for CPUs
            refuses, so the modules change their forward on a single data rank, too.
    """
    view = mesh.group_over(BATCH_AXES)
    if view.group is None and not is_narrow:
        return
    for module in part.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            # By class, not by a new module: names, buffers and the user's references to it stay.
            object.__setattr__(module, "__class__", _synchronised(type(module)))
            object.__setattr__(module, "_weft_view", view)


def _synchronised(cls: type[nn.Module]) -> type[nn.Module]:
    """A class that is still a `cls` to isinstance, named as it is, with the synchronised forward."""
    return type(cls.__name__, (_Synchronised, cls), {"__doc__": cls.__doc__})

"""Batch normalisation over the samples of all data ranks: equal to one process that sees the whole microbatch row.

torch's own `SyncBatchNorm` does not run on CPUs.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from weft.comm import GroupView, Mesh, all_reduce


class _Normalise(torch.autograd.Function):
    """(x, weight, bias) → normalised x, and the mean, biased variance and count that it used."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float, view: GroupView
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        dims = [dim for dim in range(x.dim()) if dim != 1]
        count = wide.new_full((1,), x.numel() // x.shape[1])  # filled there: no wait for a copy from the host
        # Two rounds, mean then squares of deviations: sums of squares alone cancel where |mean| >> deviation.
        sums = all_reduce(torch.cat([wide.sum(dims), count]), view)
        total, mean = sums[-1], sums[:-1] / sums[-1]
        centred = wide - _broadcast(mean, x)
        variance = all_reduce(centred.square().sum(dims), view) / total
        inverse = (variance + epsilon).rsqrt()
        normalised = centred.mul_(_broadcast(inverse, x))
        ctx.save_for_backward(normalised, inverse, total, weight)
        ctx.view, ctx.dims, ctx.has_bias = view, dims, bias is not None
        output = normalised if weight is None else normalised * _broadcast(weight, x)
        output = output if bias is None else output + _broadcast(bias, x)
        ctx.mark_non_differentiable(mean, variance, total)
        return output.to(x.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        normalised, inverse, total, weight = ctx.saved_tensors
        grad = grads[0].to(normalised.dtype)
        by_bias, by_weight = grad.sum(ctx.dims), (grad * normalised).sum(ctx.dims)
        by_x = None
        if ctx.needs_input_grad[0]:
            sums = all_reduce(torch.stack([by_bias, by_weight]), ctx.view) / total
            by_x = grad - _broadcast(sums[0], grad) - normalised * _broadcast(sums[1], grad)
            scale = inverse if weight is None else inverse * weight
            by_x = (by_x * _broadcast(scale, grad)).to(grads[0].dtype)
        return (
            by_x,
            None if weight is None else by_weight.to(weight.dtype),
            by_bias.to(grads[0].dtype if weight is None else weight.dtype) if ctx.has_bias else None,
            None,
            None,
        )


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
    """Let every `BatchNorm1d`, `2d` and `3d` of `part` take its statistics over the data ranks; names and buffers stay.

    All data ranks must then run the same number of microbatches, of any sizes.  Running statistics become those of one
    process (unbiased variance) and are equal on all data ranks.  Outside training nothing is communicated.

    Args:
        is_narrow: weights are in bf16 or fp16.  Statistics stay in fp32, a mixture that torch's own kernel for CPUs
            refuses, so the modules change their forward on a single data rank, too.
    """
    view = mesh["data"]
    if view.group is None and not is_narrow:
        return
    for module in part.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)):
            object.__setattr__(module, "__class__", _synchronised(type(module)))
            object.__setattr__(module, "_weft_view", view)


def _synchronised(cls: type[nn.Module]) -> type[nn.Module]:
    """A class that is still a `cls` to isinstance, named as it is, with the synchronised forward."""
    return type(cls.__name__, (_Synchronised, cls), {"__doc__": cls.__doc__})

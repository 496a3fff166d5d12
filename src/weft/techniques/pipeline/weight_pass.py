"""Gradients of the weights in a pass of their own, as the zero-bubble schedules want them.

While a forward runs under `deferring`, every linear map and convolution whose weight is trained is replaced by one
whose backward computes only the gradient of its input and puts the other half into a queue; `WeightPass.run` does it
later.  All other parameters (norms, embeddings: a few per cent of the work) get their gradients in the first pass.

Torch's own split backward cuts the recorded graph instead.  It was not taken: it keeps the whole graph between the
passes, recomputes checkpointed blocks twice, and takes gradients with `autograd.grad`, so that hooks on parameters stay
silent.  Here a weight's gradient goes through its own accumulation node: existing `.grad` views are added to in place,
hooks fire, and a checkpointed block is recomputed once.

Source: Qi et al. 2024, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.model.derivatives import once


class WeightPass:
    """The postponed weight gradients of one microbatch's backward through one stage."""

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[Tensor, list[Callable[[], Tensor]]]] = {}

    def put_off(self, parameter: Tensor, gradient: Callable[[], Tensor]) -> None:
        """Queue one term of a parameter's gradient."""
        self._waiting.setdefault(id(parameter), (parameter, []))[1].append(gradient)

    def run(self) -> None:
        """Add all queued gradients to their parameters, once per parameter, and free what they were computed from."""
        while self._waiting:
            _, (parameter, terms) = self._waiting.popitem()
            # Terms of one parameter are summed first: its hook must fire once, as a bucket counts on it.
            total = terms.pop()()
            while terms:
                total = total + terms.pop()()
            torch.autograd.backward([parameter], [total])  # through its accumulation node, so that hooks fire


@dataclass(slots=True)
class _Affine:
    """A call that can be deferred: its map of the input, the adjoint, and the gradients of its two parameters."""

    weight: Tensor
    bias: Tensor | None
    apply: Callable[[Tensor], Tensor]
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    weight_gradient: Callable[[Tensor, Tensor], Tensor]
    bias_gradient: Callable[[Tensor], Tensor]


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, call: _Affine, queue: WeightPass) -> Tensor:
        ctx.save_for_backward(source)
        ctx.call, ctx.queue = call, queue
        return call.apply(source)

    @staticmethod
    @once(
        "a pipeline schedule that computes weight gradients in passes of their own",
        'Use plan.pipeline_parallel.schedule = "1f1b".',
    )
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (source,), call, gradient = ctx.saved_tensors, ctx.call, gradients[0]
        ctx.queue.put_off(call.weight, lambda: call.weight_gradient(gradient, source))
        if call.bias is not None and call.bias.requires_grad:
            ctx.queue.put_off(call.bias, lambda: call.bias_gradient(gradient))
        return call.input_gradient(gradient, source), None, None


class deferring(TorchFunctionMode):  # noqa: N801 - reads as a verb: `with deferring(queue):`
    """Defer the weight gradients of forwards inside it to `queue`.

    Also enter it around the backward, because a block that recomputes its forward there must record the same
    operations; start that backward from a `GradientEdge` (given tensors, `backward` itself leaves the mode).
    """

    def __init__(self, queue: WeightPass) -> None:
        super().__init__()
        self._queue = queue

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        read = _READERS.get(func)
        if read is not None and torch.is_grad_enabled():
            call = read(*args, **(kwargs or {}))
            if call is not None and _can_wait(*call):
                return _Deferred.apply(call[0], call[1], self._queue)
        return func(*args, **(kwargs or {}))


def _can_wait(source: Tensor, call: _Affine) -> bool:
    """Return whether the call's weight gradient can be postponed.

    Its input must need a gradient now, its parameters must be trained leaves, and all must be plain tensors.
    """
    leaves = [call.weight] if call.bias is None else [call.weight, call.bias]
    return (
        source.requires_grad
        and call.weight.requires_grad
        and all(leaf.is_leaf for leaf in leaves)
        and all(type(tensor) in (Tensor, torch.nn.Parameter) for tensor in (source, *leaves))
        and not torch.is_autocast_enabled(source.device.type)
    )


def _read_linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, _Affine] | None:
    if source.ndim < 2:
        return None
    return source, _Affine(
        weight,
        bias,
        apply=lambda value: F.linear(value, weight, bias),
        input_gradient=lambda gradient, _: gradient @ weight,
        weight_gradient=lambda gradient, value: gradient.flatten(0, -2).t() @ value.flatten(0, -2),
        bias_gradient=lambda gradient: gradient.flatten(0, -2).sum(0),
    )


def _read_addmm(bias: Tensor, source: Tensor, weight: Tensor, **factors: Any) -> tuple[Tensor, _Affine] | None:
    """`bias + source @ weight`: how Hugging Face's `Conv1D` is written."""
    if factors or bias.ndim != 1:
        return None
    return source, _Affine(
        weight,
        bias,
        apply=lambda value: torch.addmm(bias, value, weight),
        input_gradient=lambda gradient, _: gradient @ weight.t(),
        weight_gradient=lambda gradient, value: value.t() @ gradient,
        bias_gradient=lambda gradient: gradient.sum(0),
    )


def _reader_of_convolution(convolve: Callable[..., Tensor], dims: int) -> Callable[..., tuple[Tensor, _Affine] | None]:
    def read(
        input: Tensor,  # noqa: A002 - torch's own keyword
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> tuple[Tensor, _Affine] | None:
        if isinstance(padding, str) or input.ndim != dims + 2:
            return None
        steps = [
            list(size) if isinstance(size, list | tuple) else [size] * dims for size in (stride, padding, dilation)
        ]

        def adjoint(gradient: Tensor, value: Tensor, which: int) -> Tensor:
            mask = [which == index for index in range(3)]
            settings = (None, *steps, False, [0] * dims, groups, mask)
            weight_gradient = torch.ops.aten.convolution_backward(gradient, value, weight.detach(), *settings)[which]
            assert weight_gradient is not None
            return weight_gradient

        return input, _Affine(
            weight,
            bias,
            apply=lambda value: convolve(value, weight, bias, stride, padding, dilation, groups),
            input_gradient=lambda gradient, value: adjoint(gradient, value, 0),
            weight_gradient=lambda gradient, value: adjoint(gradient, value, 1),
            bias_gradient=lambda gradient: gradient.sum([0, *range(2, gradient.ndim)]),
        )

    return read


_READERS: dict[Any, Callable[..., tuple[Tensor, _Affine] | None]] = {
    F.linear: _read_linear,
    torch.addmm: _read_addmm,
    torch.conv1d: _reader_of_convolution(torch.conv1d, 1),
    torch.conv2d: _reader_of_convolution(torch.conv2d, 2),
    torch.conv3d: _reader_of_convolution(torch.conv3d, 3),
}

"""Mixtures of experts over the tensor group: a part of every expert on each rank, and the whole router on all.

What enters is whole on every rank, and what leaves are parts of a sum, so a mixture costs what a feed-forward layer
does, and one small sum more in its backward: that of the gradients of the weights by which choices count, of which each
rank has a part.  With it the router's gradients are whole everywhere; those of its input, which are summed over the
ranks with the experts', are divided before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from weft.comm.mesh import GroupView
from weft.errors import PlanError
from weft.model.reference.mixture import Mixture, Routing
from weft.techniques.core.autograd import copy_to_group, reduce_from_group


class _Divide(torch.autograd.Function):
    """Its input; grad: divided by `ranks`, which all compute the same of it and whose gradients are summed later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return torch.ops.aten._unsafe_view(x, x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.ranks, None


Change = Callable[[Tensor], Tensor]


def share_mixture(name: str, module: nn.Module, view: GroupView, enter: Change, leave: Change) -> None:
    """Let `module`, a `Mixture`, compute with this rank's part of its experts.

    `enter` makes of what each rank has what the experts see, whole; its gradient is summed.  `leave` sums parts.

    Raises:
        PlanError: it is neither that nor stacked experts of `transformers`.
    """
    if {"gate_up_proj", "down_proj"} <= {leaf for leaf, _ in module.named_parameters(recurse=False)}:
        _share_experts(module, view)
        return
    if not isinstance(module, Mixture):
        raise PlanError(
            f'model.split: the kind "expert" also matches {name}, a {type(module).__name__}, but only a'
            " weft.model.reference.mixture.Mixture or stacked experts of transformers split so. Narrow the pattern."
        )
    module.register_forward_pre_hook(partial(_enter, enter))
    module.register_forward_hook(partial(_leave, leave))
    module.router.register_forward_pre_hook(partial(_divide, view.size))
    module.router.register_forward_hook(partial(_sum_weights, view))


def _share_experts(module: nn.Module, view: GroupView) -> None:
    """Stacked experts of `transformers`, which are called with tokens, choices and their weights, and sum them up."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        def copied(value: Any) -> Any:
            is_meant = isinstance(value, Tensor) and value.is_floating_point() and _wants_gradient(value)
            return copy_to_group(value, view) if is_meant else value

        return tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()}

    def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return reduce_from_group(output, view)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after)


def _enter(enter: Change, module: nn.Module, args: Any) -> Any:
    return (enter(args[0]),)


def _leave(leave: Change, module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return leave(output)


def _divide(ranks: int, module: nn.Module, args: Any) -> Any:
    (tokens,) = args
    return (_Divide.apply(tokens, ranks) if _wants_gradient(tokens) else tokens,)


def _sum_weights(view: GroupView, module: nn.Module, args: Any, routing: Routing) -> Routing:
    if not _wants_gradient(routing.weights):
        return routing
    return routing._replace(weights=copy_to_group(routing.weights, view))


def _wants_gradient(x: Tensor) -> bool:
    return torch.is_grad_enabled() and x.requires_grad

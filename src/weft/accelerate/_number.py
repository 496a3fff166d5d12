"""The number of processes, by which scripts multiply a loss that they have divided by a count of all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

_PRODUCTS = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__"})


@final
class ProcessNumber(int):
    """A number of processes.

    A loss times it is one of which the mean over processes is meant: each counts the same.  Gradients are weighted by
    samples, which is another mean where a batch does not divide; so what goes back through the product is divided by
    that weight.
    """

    _weight: Callable[[], float]

    @classmethod
    def of(cls, number: int, weight: Callable[[], float]) -> Self:
        """`weight` is this process's part of the batch that was handed out last."""
        made = cls(number)
        made._weight = weight
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = next((each for each in args if type(each) is cls), None)
        plain = [int(each) if type(each) is cls else each for each in args]
        loss = next((each for each in plain if isinstance(each, Tensor)), None)
        is_product = getattr(func, "__name__", "") in _PRODUCTS and len(plain) == 2
        if number is None or loss is None or not is_product or not loss.requires_grad:
            return func(*plain, **(kwargs or {}))
        return _Product.apply(loss, int(number), number._weight())


@final
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, number: int, weight: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight = weight
        return loss * number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / ctx.weight, None, None

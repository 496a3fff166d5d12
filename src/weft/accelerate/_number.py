"""The number of processes, by which scripts multiply a loss that they have divided by a count of all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, final

import torch
from torch import Tensor

from weft.errors import RecipeError

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

    def __mul__(self, other: Any) -> Any:
        product = super().__mul__(other)
        return StepNumber.of(product, other) if type(other) is int else product

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number = next((argument for argument in args if type(argument) is cls), None)
        plain = [int(argument) if type(argument) is cls else argument for argument in args]
        loss = next((value for value in plain if isinstance(value, Tensor)), None)
        is_product = getattr(func, "__name__", "") in _PRODUCTS and len(plain) == 2
        if number is None or loss is None or not is_product or not loss.requires_grad:
            return func(*plain, **(kwargs or {}))
        return _Product.apply(loss, int(number), number._weight())


@final
class StepNumber(int):
    """A number times that of processes: scripts give it to a schedule, which the peer steps once for each process."""

    own: int
    """The number before."""

    @classmethod
    def of(cls, product: int, own: int) -> Self:
        made = cls(product)
        made.own = own
        return made


def count_own_steps(scheduler: Any) -> None:
    """Let a schedule count optimizer steps, where a script has counted those of all processes.

    Raises:
        RecipeError: what it has computed of them is not known.
    """
    for inner in getattr(scheduler, "_schedulers", ()):
        count_own_steps(inner)
    has_step_number = _taken_back(vars(scheduler))
    for function in getattr(scheduler, "lr_lambdas", ()):
        _taken_back(getattr(function, "keywords", {}))
        for cell in getattr(getattr(function, "func", function), "__closure__", None) or ():
            if type(cell.cell_contents) is StepNumber:
                cell.cell_contents = cell.cell_contents.own
    if has_step_number and hasattr(scheduler, "_schedule_phases"):
        raise RecipeError(
            f"{type(scheduler).__name__} was given steps times accelerator.num_processes, and schedules step"
            " once for each optimizer step here, whatever the number of processes. Leave the factor out."
        )


def _taken_back(values: Any) -> bool:
    names = [name for name, value in values.items() if type(value) is StepNumber]
    for name in names:
        values[name] = values[name].own
    for each in values.values():
        if isinstance(each, list):
            each[:] = [value.own if type(value) is StepNumber else value for value in each]
    return bool(names)


@final
class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, number: int, weight: float) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.weight = weight
        return loss * number

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient / ctx.weight, None, None

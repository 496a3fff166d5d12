"""Parts of features that meet what every rank has whole, entry by entry: each rank takes its part of that.

Looking at a forward shows in which modules this happens.  There, operands whose sizes do not fit, because one is as
many times as large as there are parts, are narrowed; without that they would be an error, so nothing else changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

Narrow = Callable[[Tensor, int], Tensor]
"""Returns a rank's part of a tensor along a dim."""
_OPERATIONS = ("add", "sub", "mul", "div", "true_divide", "truediv")
MEETING = frozenset({*_OPERATIONS, *(f"{name}_" for name in _OPERATIONS)})
"""Operators of two operands that may meet so."""
_CALLS = frozenset({*MEETING, *(f"__{prefix}{name}__" for name in _OPERATIONS for prefix in ("", "r", "i"))})


def narrowing(forward: Callable[..., Any], parts: int, narrow: Narrow) -> Callable[..., Any]:
    """Return a forward in which what is whole is narrowed where it meets one of `parts` parts."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _Narrowing(parts, narrow):
            return forward(*args, **kwargs)

    return run


class _Narrowing(TorchFunctionMode):
    def __init__(self, parts: int, narrow: Narrow) -> None:
        super().__init__()
        self._parts, self._narrow = parts, narrow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if len(args) == 2 and all(isinstance(each, Tensor) for each in args) and func.__name__ in _CALLS:
            args = self._fitted(*args)
        return func(*args, **(kwargs or {}))

    def _fitted(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        sizes = [(first.shape[at], second.shape[at], at) for at in range(-min(first.dim(), second.dim()), 0)]
        odd = [each for each in sizes if each[0] != each[1] and 1 not in each[:2]]
        if len(odd) != 1:
            return first, second
        mine, theirs, at = odd[0]
        if mine == theirs * self._parts:
            return self._narrow(first, first.dim() + at), second
        if theirs == mine * self._parts:
            return first, self._narrow(second, second.dim() + at)
        return first, second

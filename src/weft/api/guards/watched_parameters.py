"""What a loop does with parameters between two steps, as far as no version of theirs shows: they tell, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.errors import RecipeError


class ParameterListener(Protocol):
    """Who is told."""

    def touch(self, parameter: Tensor, data: Tensor) -> None:
        """Somebody has asked for the `.data` of a parameter, or for another tensor of the same storage."""

    def rebind(self, parameter: nn.Parameter, old: Tensor, new: Tensor) -> bool:
        """Somebody gives a parameter other storage; return whether the listener has taken its values over."""
        ...

    def read(self, parameters: Iterable[Tensor]) -> None:
        """Somebody has computed something of parameters."""


def watched_class(listener: Callable[[], ParameterListener | None], *, reads: bool) -> type[nn.Parameter]:
    """Return a class of parameters that tell of `.data`, and, with `reads`, of every function that returns values.

    It is made anew for each model, and copies and pickles are torch's own parameters: nothing of Weft goes with them.
    """
    kind = _watched_data(listener)
    kind = _watched_reads(kind, listener) if reads else kind
    kind.__module__, kind.__qualname__ = nn.Parameter.__module__, nn.Parameter.__qualname__
    kind.__name__ = nn.Parameter.__name__
    return kind


def _watched_data(listener: Callable[[], ParameterListener | None]) -> type[nn.Parameter]:
    plain = cast(Any, torch.Tensor).data

    class Parameter(nn.Parameter):
        @property
        def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
            with torch.DisableTorchFunctionSubclass():
                data = plain.__get__(self)
                if (listening := listener()) is not None:
                    listening.touch(self, data)
            return data

        @data.setter
        def data(self, value: Tensor) -> None:
            listening = listener()
            with torch.DisableTorchFunctionSubclass():
                if listening is None or not listening.rebind(self, plain.__get__(self), value):
                    plain.__set__(self, value)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                copied = self.detach().clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(copied, self.requires_grad)
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    return Parameter


def _watched_reads(kind: type[nn.Parameter], listener: Callable[[], ParameterListener | None]) -> type[nn.Parameter]:
    gradient = cast(Any, torch.Tensor).grad

    class ReadParameter(kind):
        @property
        def grad(self) -> Tensor | None:
            """No value of the parameter, and asked for often."""
            with torch.DisableTorchFunctionSubclass():
                return gradient.__get__(self)

        @grad.setter
        def grad(self, value: Tensor | None) -> None:
            with torch.DisableTorchFunctionSubclass():
                gradient.__set__(self, value)

        @grad.deleter
        def grad(self) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            with torch.DisableTorchFunctionSubclass():
                gradient.__delete__(self)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            keywords = kwargs or {}
            with torch.DisableTorchFunctionSubclass():
                result = func(*args, **keywords)
                if not _is_value(result) or (listening := listener()) is None:
                    return result
                # A parameter that is returned itself was written to, or is as it was: nothing was computed of it.
                used = [
                    value for value in _flat((*args, *keywords.values())) if type(value) is cls and value is not result
                ]
                listening.read(used)
                if len(used) == 1 and isinstance(result, Tensor) and result.data_ptr() == used[0].data_ptr():
                    listening.touch(used[0], used[0].detach())  # whose numpy array tells nobody who writes into it
            return result

    return ReadParameter


def refuse_part_of_sum(refused: bool) -> None:
    """Refuse to make a number of what is computed of shares (a norm, a sum), or do so no more.

    Torch gives each rank the number of its own share, without a word (2.11 to 2.13).
    """
    handlers = cast(Any, DTensor)._op_dispatcher._custom_op_handlers  # as torch's own loss_parallel has them
    if refused:
        handlers[_NUMBER] = _number
    else:
        handlers.pop(_NUMBER, None)


_NUMBER = torch.ops.aten._local_scalar_dense.default


def _number(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    (value,) = args
    if any(placement.is_partial() for placement in value.placements):
        raise RecipeError(
            "the loop has made a number (`float(…)`, `.item()`) of what it computed of a weight, of which each rank has"
            " a share under data_parallel.zero = 3: it would be that of the share. Write `.full_tensor()` before it, on"
            " every rank, or use data_parallel.zero = 0, 1 or 2."
        )
    return operator(value.to_local())


def _is_value(result: Any) -> bool:
    """Whether a function's result may hold values, and not only a shape, a dtype or the like."""
    if isinstance(result, tuple):
        return any(isinstance(each, Tensor) for each in cast("tuple[Any, ...]", result))
    return isinstance(result, Tensor | float | complex | list | np.ndarray)


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from cast("Iterable[Any]", value)
        else:
            yield value

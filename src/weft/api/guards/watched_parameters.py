"""What a loop does with weights between two steps, as far as no version of theirs shows: they tell, or refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from weft.api.guards.elementwise import AcrossElements, flat
from weft.errors import RecipeError


class ParameterListener(Protocol):
    """Receiver of a watched parameter's reports."""

    @property
    def listens(self) -> bool:
        """Whether the loop has its turn: what Weft does by itself is nobody's business."""
        ...

    def touch(self, parameter: Tensor, data: Tensor) -> None:
        """Note a read of a parameter's `.data`, or of another tensor of the same storage."""

    def rebind(self, parameter: nn.Parameter, old: Tensor, new: Tensor) -> bool:
        """Note that a parameter is given other storage; return whether the listener has copied its values."""
        ...

    def read(self, parameters: Iterable[Tensor]) -> None:
        """Note that the loop has computed something of parameters."""

    def read_across(self, weights: Iterable[int]) -> None:
        """Somebody has computed of weights, given by their identities, what is not computed element by element: a norm,
        an average, the value at a place."""


_Told = Callable[[], ParameterListener | None]


def watched_class(listener: _Told, reader: ReadWatcher | None) -> type[nn.Parameter]:
    """Return a class of parameters that tell of `.data`, and, with a `reader`, of every function that returns values.

    It is made anew for each model, and copies and pickles are torch's own parameters: nothing of Weft goes with them.
    """
    kind = _watched_data(listener, reader)
    kind = _watched_reads(kind, reader) if reader is not None else kind
    kind.__module__, kind.__qualname__ = nn.Parameter.__module__, nn.Parameter.__qualname__
    kind.__name__ = nn.Parameter.__name__
    return kind


def _watched_data(listener: _Told, reader: ReadWatcher | None) -> type[nn.Parameter]:
    plain = cast(Any, torch.Tensor).data

    class Parameter(nn.Parameter):
        @property
        def data(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
            with torch.DisableTorchFunctionSubclass():
                data = plain.__get__(self)
                if (told := listener()) is not None:
                    told.touch(self, data)
                return data if reader is None else reader.part(data, {id(self)})

        @data.setter
        def data(self, value: Tensor) -> None:
            told = listener()
            with torch.DisableTorchFunctionSubclass():
                if told is None or not told.rebind(self, plain.__get__(self), value):
                    plain.__set__(self, value)

        def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
            if id(self) not in memo:
                copied = self.detach().clone(memory_format=torch.preserve_format)
                memo[id(self)] = nn.Parameter(copied, self.requires_grad)
            return memo[id(self)]

        def __reduce_ex__(self, protocol: Any) -> Any:
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    return Parameter


def _watched_reads(kind: type[nn.Parameter], reader: ReadWatcher) -> type[nn.Parameter]:
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
            return reader.call(func, args, kwargs or {})

    return ReadParameter


class ReadWatcher:
    """Calls functions for tensors that tell of reads, and tells.

    `part_class` is that of what an optimizer holds of parameters, and of what is computed element by element of these
    or of parameters: a function of that tells, too, until it is no more elementwise.
    """

    def __init__(self, listener: _Told) -> None:
        self._listener = listener
        self._elementwise = set[Any]()
        """Functions that were so, and always are."""
        self.part_class = _part_class(self)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what a function returns; what is computed element by element of a part is a part."""
        told = self._listener()
        with torch.DisableTorchFunctionSubclass():
            if told is None or not told.listens:
                return func(*args, **kwargs)
            seen = None
            if func in self._elementwise:
                result = func(*args, **kwargs)
            else:
                with AcrossElements() as seen:
                    result = func(*args, **kwargs)
                if seen.is_elementwise:
                    self._elementwise.add(func)
            if not _is_value(result):
                return result
            given = [each for each in flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
            return self._told(told, result, given, seen)

    def _told(self, told: ParameterListener, result: Any, given: list[Tensor], seen: AcrossElements | None) -> Any:
        holds_tensors = any(isinstance(each, Tensor) for each in flat([result]))
        is_across = (seen is not None and seen.is_across) or not holds_tensors
        # What is returned itself was written to, or is as it was: nothing was computed of it.
        parameters = [each for each in given if isinstance(each, nn.Parameter) and each is not result]
        parts = [each for each in given if isinstance(each, self.part_class) and (is_across or each is not result)]
        if not parameters and not parts:
            return result
        if parameters:
            told.read(parameters)
            if len(parameters) == 1 and isinstance(result, Tensor) and result.data_ptr() == parameters[0].data_ptr():
                told.touch(parameters[0], parameters[0].detach())  # whose numpy array tells nobody who writes into it
        weights = {id(each) for each in parameters}.union(*map(_weights_of, parts))
        if is_across:
            told.read_across(weights)
            return result
        if seen is not None and seen.copies:
            return result
        known = {*map(id, given)}
        if type(result) not in (list, tuple):
            return result if id(result) in known else self.part(result, weights)
        return type(result)(each if id(each) in known else self.part(each, weights) for each in result)

    def part(self, value: Any, weights: set[int]) -> Any:
        """Return a tensor that tells that it was computed of these weights; anything else as it is."""
        if type(value) is not Tensor:
            return value
        part = value.as_subclass(self.part_class)
        vars(part)[_WEIGHTS] = weights
        return part


_WEIGHTS = "_computed_of"


def _weights_of(part: Tensor) -> set[int]:
    return vars(part).get(_WEIGHTS) or {id(part)}


def _part_class(reader: ReadWatcher) -> type[Tensor]:
    gradient = cast(Any, torch.Tensor).grad

    class Part(Tensor):
        @property
        def grad(self) -> Tensor | None:
            with torch.DisableTorchFunctionSubclass():
                return gradient.__get__(self)

        @grad.setter
        def grad(self, value: Tensor | None) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
            with torch.DisableTorchFunctionSubclass():
                gradient.__set__(self, value)

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return reader.call(func, args, kwargs or {})

        def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
            with torch.DisableTorchFunctionSubclass():
                return memo.setdefault(id(self), self.as_subclass(Tensor).clone(memory_format=torch.preserve_format))

        def __reduce_ex__(self, protocol: Any) -> Any:
            with torch.DisableTorchFunctionSubclass():
                return self.as_subclass(Tensor).__reduce_ex__(protocol)

    Part.__module__, Part.__qualname__, Part.__name__ = Tensor.__module__, Tensor.__qualname__, Tensor.__name__
    return Part


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

"""Copies of functions, with copies of the variables around them, so that calling one on trial changes nothing."""

from __future__ import annotations

import copy
import types
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

_SHARED_BYTES = 1 << 28
"""Larger tensors that a function reads from outside are data, which nobody changes."""
_DATA = (Tensor, np.ndarray, int, float, bool, list, dict, set, deque)
FOREIGN = ("weft.", "torch.optim", "torch.utils.data", "torch.distributed")
"""Modules whose objects are not copied: a loss may know of a session or an optimizer."""


def copied_call(function: Any, memo: dict[int, Any]) -> Any:
    """A copy of a function, with copies of the variables around it; or of a callable object."""
    if id(function) in memo:
        return memo[id(function)]
    if isinstance(function, partial):
        bound = cast("partial[Any]", function)
        arguments = [_copied(value, memo) for value in bound.args]
        return partial(copied_call(bound.func, memo), *arguments, **_copied_each(bound.keywords, memo))
    if isinstance(function, types.MethodType):
        return types.MethodType(function.__func__, _copied(function.__self__, memo))
    if not isinstance(function, types.FunctionType):
        return _copied_callable(function, memo)
    around = {**function.__globals__}
    around |= _copied_each({name: around[name] for name in data_around(function)}, memo)
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    defaults = tuple(_copied(value, memo) for value in function.__defaults__ or ())
    made = types.FunctionType(function.__code__, around, function.__name__, defaults or None, cells)
    memo[id(function)] = made  # which may be among the variables around itself
    for cell, value in zip(cells, cells_of(function), strict=True):
        cell.cell_contents = _copied(value, memo)
    made.__kwdefaults__ = _copied_each(function.__kwdefaults__ or {}, memo)
    made.__dict__.update(_copied_each(vars(function), memo))
    return made


def copied_model(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a model; what it holds of tensors with a history (pruned weights), which torch refuses to copy, by
    value."""
    for inner in module.modules():
        for value in vars(inner).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo.setdefault(id(value), value.detach().clone())
    return copy.deepcopy(module, memo)


def cells_of(function: types.FunctionType) -> list[Any]:
    """Values of the variables around a function."""
    return [_content(cell) for cell in function.__closure__ or ()]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # filled later
        return None


def data_around(function: types.FunctionType) -> list[str]:
    """Names of a module's variables that a function reads and that hold data."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    return [name for name in names if isinstance(function.__globals__[name], _DATA)]


def _copied_each(values: Mapping[str, Any], memo: dict[int, Any]) -> dict[str, Any]:
    return {name: _copied(value, memo) for name, value in values.items()}


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, types.FunctionType | types.MethodType | partial):
        return copied_call(value, memo)
    is_large = isinstance(value, Tensor) and value.nbytes > _SHARED_BYTES
    if is_large or type(value).__module__.startswith(FOREIGN):
        return value
    if isinstance(value, nn.Module) and sum(parameter.nbytes for parameter in value.parameters()) > _SHARED_BYTES:
        memo |= {id(parameter): parameter for parameter in value.parameters()}  # of a teacher
    try:
        return copy.deepcopy(value, memo)
    except Exception:  # whatever it holds: files, locks, groups
        return value


def _copied_callable(value: Any, memo: dict[int, Any]) -> Any:
    """A callable object; one of Weft's own holds the user's, and is not copied deeper than that."""
    if not type(value).__module__.startswith("weft.") or not hasattr(value, "__dict__"):
        return _copied(value, memo)
    made = copy.copy(value)
    made.__dict__.update(_copied_each(vars(value), memo))
    return made

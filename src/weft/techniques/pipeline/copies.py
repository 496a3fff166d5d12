"""Copies of a model for its stages, whose hooks know the copy.

`copy.deepcopy` takes functions as they are.  A hook that reads `model.temperature` of the variable around it would go
on reading the model that the stages were copied from, and what a loop sets on its stage would change nothing.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any, cast

from torch import nn

from weft.model.meta_forward.copied_calls import copied_model


def copied(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a copy, for which `memo` already knows what takes the place of some modules."""
    made = copied_model(module, memo)
    for inner in made.modules():
        for name, value in list(vars(inner).items()):
            if name.endswith("_hooks") and isinstance(value, dict):
                hooks = cast("dict[Any, Any]", value)
                hooks.update({key: _rebound(hook, memo) for key, hook in hooks.items()})
            elif isinstance(value, types.FunctionType):
                vars(inner)[name] = _rebound(value, memo)
    return made


def _rebound(function: Any, memo: dict[int, Any]) -> Any:
    """A function with the copies of those modules that stand in the variables around it; all else it shares."""
    if isinstance(function, partial):
        wrapped = cast("partial[Any]", function)
        return partial(_rebound(wrapped.func, memo), *wrapped.args, **wrapped.keywords)
    if not isinstance(function, types.FunctionType) or not function.__closure__:
        return function
    cells = tuple(_cell(cell, memo) for cell in function.__closure__)
    if cells == function.__closure__:
        return function
    made = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__dict__.update(vars(function))
    return made


def _cell(cell: types.CellType, memo: dict[int, Any]) -> types.CellType:
    try:
        value = cell.cell_contents
    except ValueError:  # filled later
        return cell
    return types.CellType(memo[id(value)]) if isinstance(value, nn.Module) and id(value) in memo else cell

"""Copies of a model and its loss that may run on trial: they share the weights, and nothing else that can change."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from weft.model.meta_forward.copied_calls import FOREIGN, cells_of, copied_call, copied_model, data_around

LOSS = "the loss"
"""Stands for the loss where a module's name is asked."""
_OF_TORCH = frozenset(vars(nn.Module())) | {"training"}
_MOST_VALUES = 20_000
_DEEPEST = 6


@dataclass(frozen=True, slots=True)
class KeptObject:
    """An object that a module or the loss keeps from forward to forward."""

    owner: str
    """Name of the module; empty: the model itself."""
    name: str
    kind: str
    """`parameter`, `buffer` or `attribute`."""
    is_saved: bool
    """Whether it is part of the model's state."""

    @property
    def shown(self) -> str:
        return f"{self.owner}.{self.name}" if self.owner and self.owner != LOSS else self.name


class TrialCopy:
    """A model and its loss, which nothing that happens to it changes, but for writes to shared weights.

    `own`: weights that it has for itself.  Raises whatever copying raises.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], own: Collection[str] = ()) -> None:
        memo: dict[int, Any] = {}
        for name, parameter in model.named_parameters():
            if name not in own:
                memo[id(parameter)] = parameter
        self._shared = frozenset(memo)
        self.model: nn.Module = copied_model(model, memo)
        self.loss = copied_call(loss, memo)

    def state(self) -> dict[KeptObject, Any]:
        """Everything that it keeps, detached from what will be."""
        seen = set(self._shared)
        saved = self.model.state_dict(keep_vars=True)
        state: dict[KeptObject, Any] = {}
        for owner, module in self.model.named_modules():
            prefix = f"{owner}." if owner else ""
            for name, value in module.named_parameters(recurse=False):
                state[KeptObject(owner, name, "parameter", True)] = _noted(value, seen, 0)
            for name, value in module.named_buffers(recurse=False):
                state[KeptObject(owner, name, "buffer", prefix + name in saved)] = _noted(value, seen, 0)
            seen.add(id(module))
        for owner, module in self.model.named_modules():
            for name, value in vars(module).items():
                if name not in _OF_TORCH:
                    state[KeptObject(owner, name, "attribute", False)] = _noted(value, seen, 0)
        for name, value in of_call(self.loss).items():
            state[KeptObject(LOSS, name, "attribute", False)] = _noted(value, seen, 0)
        return state

    def value_of(self, kept: KeptObject) -> Any:
        """The value of a buffer or an attribute, as it is."""
        if kept.owner == LOSS:
            return of_call(self.loss).get(kept.name)
        return getattr(self.model.get_submodule(kept.owner), kept.name, None)

    def set_value(self, kept: KeptObject, value: Any) -> None:
        """Give a buffer or an attribute of a module, or a variable around the loss, another value."""
        if kept.owner != LOSS:
            setattr(self.model.get_submodule(kept.owner), kept.name, value)
        else:
            set_in_call(self.loss, kept.name, value)


def set_in_call(function: Any, name: str, value: Any) -> None:
    """Give something that a function or a callable object keeps another value; nothing where it cannot be given."""
    if isinstance(function, partial):
        set_in_call(cast("partial[Any]", function).func, name, value)
    elif isinstance(function, types.MethodType):
        set_in_call(function.__self__, name, value)
    elif not isinstance(function, types.FunctionType):
        if name in vars(function):
            setattr(function, name, value)
    elif name in function.__code__.co_freevars:
        cell = (function.__closure__ or ())[function.__code__.co_freevars.index(name)]
        cell.cell_contents = value
    elif name in function.__dict__:
        function.__dict__[name] = value
    elif name in function.__globals__:
        function.__globals__[name] = value


def of_call(function: Any) -> dict[str, Any]:
    """Return the objects that a function or a callable object keeps, by name."""
    if isinstance(function, partial):
        bound = cast("partial[Any]", function)
        named = {str(place): value for place, value in enumerate(bound.args)} | bound.keywords
        return named | of_call(bound.func)
    if isinstance(function, types.MethodType):
        return of_call(function.__self__)
    if isinstance(function, types.FunctionType):
        cells = dict(zip(function.__code__.co_freevars, cells_of(function), strict=True))
        cells |= {name: function.__globals__[name] for name in data_around(function)}
        defaults = {f"default {place}": value for place, value in enumerate(function.__defaults__ or ())}
        return cells | defaults | vars(function)
    if isinstance(function, nn.Module):
        tensors = dict(function.named_parameters()) | dict(function.named_buffers())
        inner = {
            f"{prefix}.{name}" if prefix else name: value
            for prefix, module in function.named_modules()
            for name, value in vars(module).items()
            if name not in _OF_TORCH
        }
        return tensors | inner
    return dict(vars(function)) if hasattr(function, "__dict__") else {}


# ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _noted(value: Any, seen: set[int], depth: int) -> Any:
    """A value as tensors, numbers, texts and tuples of them; each object once."""
    if isinstance(value, nn.Parameter) and id(value) in seen:
        return None
    if isinstance(value, Tensor):
        return value if value.is_meta else value.detach().clone()
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, torch.Generator):
        return value.get_state()
    # Objects refer to one another in circles, and some hold a data set: the look is bounded.
    if id(value) in seen or depth > _DEEPEST or len(seen) > _MOST_VALUES:
        return None
    if isinstance(value, list | tuple | deque | set | frozenset | Mapping):
        seen.add(id(cast(object, value)))
        return _noted_each(cast(Any, value), seen, depth)
    inside = isinstance(value, types.ModuleType | types.FunctionType | types.MethodType | type)
    if inside or not hasattr(value, "__dict__") or type(value).__module__.startswith(FOREIGN):
        return None
    seen.add(id(value))
    attributes = of_call(value) if isinstance(value, nn.Module) else vars(value)
    return {name: _noted(value, seen, depth + 1) for name, value in attributes.items()}


def _noted_each(values: Any, seen: set[int], depth: int) -> Any:
    if isinstance(values, Mapping):
        items = cast("Mapping[Any, Any]", values).items()
        return {str(name): _noted(item, seen, depth + 1) for name, item in items}
    if isinstance(values, set | frozenset):
        return tuple(sorted(map(repr, cast("set[Any]", values))))
    return tuple(_noted(value, seen, depth + 1) for value in values)


def is_same(one: Any, other: Any) -> bool:
    """Whether two noted values are equal to the last bit."""
    return _compared(one, other, None, exact=True)


def is_alike(one: Any, other: Any, before: Any) -> bool:
    """Whether two values that grew from `before` are equal but for rounding."""
    return _compared(one, other, before, exact=False)


def _compared(one: Any, other: Any, before: Any, *, exact: bool) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _tensors_alike(one, other, before, exact=exact)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
    if isinstance(one, dict):
        mine, theirs = cast("dict[str, Any]", one), cast("dict[str, Any]", other)
        earlier = cast("dict[str, Any]", before) if isinstance(before, dict) else {}
        return mine.keys() == theirs.keys() and all(
            _compared(value, theirs[name], earlier.get(name), exact=exact) for name, value in mine.items()
        )
    if isinstance(one, tuple):
        rows, others = cast("tuple[Any, ...]", one), cast("tuple[Any, ...]", other)
        return len(rows) == len(others) and all(
            _compared(*pair, None, exact=exact) for pair in zip(rows, others, strict=True)
        )
    if isinstance(one, float) and not exact:
        # Relative to what a forward changed: a counter of 10⁶ that grew by 1 and by 2 is another one.
        change = abs(one - before) if isinstance(before, float) else abs(one)
        return abs(one - other) <= 1e-4 * change + 1e-12 * abs(one) or one != one
    return bool(one == other) or one != one


def _tensors_alike(one: Tensor, other: Tensor, before: Any, *, exact: bool) -> bool:
    if one.shape != other.shape or (one.dtype != other.dtype and not (one.is_floating_point() and exact)):
        return False
    if one.is_meta or torch.equal(one, other.to(one.dtype)):  # in another dtype nothing was left behind yet
        return True
    if not one.is_floating_point():
        return False
    if exact:
        return torch.allclose(one, other.to(one.dtype), rtol=0.0, atol=0.0, equal_nan=True)
    wide, others = one.double().nan_to_num(), other.double().nan_to_num()
    is_grown = isinstance(before, Tensor) and before.shape == one.shape
    change = wide - before.double().nan_to_num() if is_grown else wide
    allowed = 1e-4 * float(change.norm()) + 8 * torch.finfo(one.dtype).eps * float(wide.norm())
    return float((wide - others).norm()) <= allowed

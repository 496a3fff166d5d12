"""Modules that every rank of a row computes whole, for its samples: features are gathered before, and cut behind.

What is whole on a row carries on each rank the part of its gradient that comes from the features which the rank goes on
with.  Backward is linear, so what the ranks find for a weight, or for what entered, are parts of a sum: over all ranks
of the grid for a weight, along the row for what entered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from weft.errors import PlanError

Change = Callable[[Tensor], Tensor]
_ONE_DIMENSION = 'use plan.tensor_parallel.scheme = "1d".'


def computed_whole(forward: Callable[..., Any], gather: Change, cut: Change | None) -> Callable[..., Any]:
    """Return a forward whose first tensor is gathered, and the first tensor of whose result is cut; `cut`: None where
    all ranks of a row go on with all of it.  Call it on every rank of a row.

    Raises:
        PlanError: a call without a tensor, or a result that is none and begins with none.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        given, named = [*args], {**kwargs}
        place = next((at for at, each in enumerate(given) if isinstance(each, Tensor)), None)
        if place is not None:
            given[place] = gather(given[place])
        else:
            key = next((name for name, each in named.items() if isinstance(each, Tensor)), None)
            if key is None:
                raise PlanError(
                    "a module that every rank of a row computes whole was called without a tensor, of which the others"
                    f" would have the rest: {_ONE_DIMENSION}"
                )
            named[key] = gather(named[key])
        made = forward(*given, **named)
        return made if cut is None else cut_first(made, cut)

    return run


def first_of(made: Any) -> Tensor | None:
    """Return the tensor of a result that is cut; None: there is none."""
    first = made[0] if isinstance(made, tuple | list) and made else made
    return first if isinstance(first, Tensor) else None


def cut_first(made: Any, cut: Change) -> Any:
    """Return a result with its first tensor cut."""
    first = first_of(made)
    if first is None:
        raise PlanError(
            "a module that every rank of a row computes whole returned no tensor, nor a tuple that begins with one, of"
            f" which each rank would take its part: {_ONE_DIMENSION}"
        )
    if isinstance(made, Tensor):
        return cut(first)
    rest = cast("tuple[Any, ...]", made)[1:]
    if hasattr(made, "_fields"):
        return type(made)(cut(first), *rest)
    return type(made)((cut(first), *rest))

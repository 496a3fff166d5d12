"""Whether a function computes each element of its result from the elements at that place alone.

Of a part of a weight such a result is the same part of the whole's result.  A norm, an average or the value at a place
is not: that of a part says nothing of the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_MOVES = frozenset({
    *("copy", "copy_", "_copy_from", "clone", "_to_copy", "lift_fresh", "detach", "alias", "contiguous"),
    *("zero", "zero_", "fill", "fill_", "cat", "stack", "_unsafe_view", "set_", "resolve_conj", "resolve_neg"),
})  # fmt: skip
"""Operators of torch that give elements another place, another dtype or another value, and are not tagged for it."""


class AcrossElements(TorchDispatchMode):
    """While it is entered: notes whether an operator was more than elementwise."""

    def __init__(self) -> None:
        super().__init__()
        self.is_across = False
        self.is_elementwise = False
        """Whether all operators were so whatever they are given; of a view it depends on what is asked for."""
        self.copies = False
        """Whether the last operator has copied, so that its result is the loop's own."""
        self._is_first = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.copies = name == "clone"
        is_elementwise = _is_elementwise(func, name, args, result)
        self.is_elementwise = is_elementwise and not self.copies and (self.is_elementwise or self._is_first)
        self._is_first = False
        if not is_elementwise and func.is_view:
            self.is_across |= _smallest(result) < _smallest(args)
        elif not is_elementwise:
            self.is_across |= any(isinstance(each, Tensor) for each in flat(args)) and not name.endswith("_like")
        return result


def _is_elementwise(operator: Any, name: str, args: Any, result: Any) -> bool:
    """As torch tags it.  An operator on a list of tensors is what the one on a single tensor is."""
    if name in _MOVES or torch.Tag.pointwise in operator.tags:
        return True
    if not name.startswith("_foreach_"):
        return False
    if result is not None and _elements(result) < _elements(
        args[:1]
    ):  # `_foreach_max` has the name of `max(a, b)`, too
        return False
    one = name.removeprefix("_foreach_")
    packet = getattr(torch.ops.aten, one, None)
    overloads = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return one in _MOVES or any(torch.Tag.pointwise in each.tags for each in overloads)


def _elements(values: Any) -> int:
    return sum(each.numel() for each in flat([values]) if isinstance(each, Tensor))


def _smallest(values: Any) -> int:
    return min((each.numel() for each in flat([values]) if isinstance(each, Tensor)), default=0)


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Yield values, and those in lists and tuples among them."""
    for value in values:
        if isinstance(value, list | tuple):
            yield from flat(cast("Iterable[Any]", value))
        else:
            yield value

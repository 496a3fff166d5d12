"""Classify operators: those that work entry by entry, and those that only lay memory out."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_ENTRYWISE = frozenset(
    {
        *(
            "_to_copy",
            "clone",
            "copy_",
            "detach",
            "lift_fresh",
            "alias",
            "_conj",
            "resolve_conj",
            "polar",
            "nan_to_num",
        ),
        *("ones_like", "zeros_like", "empty_like", "full_like", "fill_", "zero_", "log_sigmoid_forward", "hardswish"),
        *("dropout", "masked_fill_", "isnan", "isinf", "floor_divide", "_assert_tensor_metadata", "_prelu_kernel"),
    }
)
"""Entry-wise operators that torch does not mark as pointwise."""
LAYOUT = frozenset(
    {
        *("view", "_unsafe_view", "reshape", "_reshape_alias", "clone", "alias", "detach", "lift_fresh", "contiguous"),
        *("expand", "transpose", "t", "permute", "unsqueeze", "squeeze", "_to_copy", "as_strided", "slice", "select"),
        *("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "empty", "empty_like", "empty_strided"),
        *("_assert_tensor_metadata", "_assert_async", "arange", "zeros", "ones"),
    }
)
"""Operators that compute nothing, or nothing of activations: which of them run may depend on sizes alone (a reshape is
a view or a copy)."""


def is_elementwise(name: str) -> bool:
    """Whether each entry of an operator's result follows from those of its operands at the same place."""
    if name in _ENTRYWISE:
        return True
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if packet is None:
        return False
    return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())


def broadcast(shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The shape of an entry-wise operator's result; None where its operands do not fit together."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[int] = []
    for at in range(-rank, 0):
        sizes = {shape[at] for shape in shapes if len(shape) >= -at} - {1}
        if len(sizes) > 1:
            return None
        result.append(math.prod(sizes))
    return tuple(result)

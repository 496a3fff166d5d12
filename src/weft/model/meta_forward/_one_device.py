"""Calls whose operands lie on two devices because some have values: torch checks devices before any operator runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map


class OneDevice(TorchFunctionMode):
    """Within it, a call that fails on activations without memory beside constants is made without the values of these.

    A forward that makes its first hidden state by `torch.zeros(…)` gives a recurrent layer both.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        try:
            return func(*args, **keywords)
        except RuntimeError as problem:
            if "device" not in str(problem) or not _is_mixed((args, keywords)):
                raise
            return func(*_without_values(args), **_without_values(keywords))


def _is_mixed(tree: Any) -> bool:
    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage] # looking is no call
        places = {leaf.is_meta for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)}
    return len(places) == 2


def _without_values(tree: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.is_meta or not leaf.is_floating_point():
            return leaf
        return torch.empty_like(leaf, device="meta")

    with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
        return tree_map(convert, tree)

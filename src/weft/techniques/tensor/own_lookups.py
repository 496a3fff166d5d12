"""Embeddings that do more than look up: their own forward runs, around a lookup that ranks of a grid do together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def looking_up(module: nn.Module, look_up: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the forward of an embedding that looks up rows of its weight by `look_up` of what it is given.

    A forward of its own (a scale, ids that are moved) does the rest.
    """
    if type(module).forward is nn.Embedding.forward:
        return look_up
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LookUps(module, look_up):
            return own(*args, **kwargs)

    return forward


class _LookUps(TorchFunctionMode):
    def __init__(self, module: nn.Module, look_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._module, self._look_up = module, look_up

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.embedding:
            named = dict(zip(("input", "weight"), args, strict=False)) | given
            if named["weight"] is self._module.weight:
                return self._look_up(named["input"])
        return func(*args, **given)

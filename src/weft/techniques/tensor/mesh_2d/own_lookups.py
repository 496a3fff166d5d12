"""Embeddings that do more than look up: their own forward runs, around a lookup that ranks of a grid do together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.errors import PlanError
from weft.model.plain_layers import runs

_ARGUMENTS = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")


def looking_up(module: nn.Embedding, look_up: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    """Return the forward of an embedding that looks up rows of its weight by `look_up` of what it is given.

    A forward of its own (a scale, ids that are moved) does the rest.
    """
    if runs(module, nn.Embedding.forward):
        return look_up
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        with _LookUps(module, look_up):
            return own(*args, **kwargs)

    return forward


class _LookUps(TorchFunctionMode):
    def __init__(self, module: nn.Embedding, look_up: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._module, self._look_up = module, look_up

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if func is F.embedding:
            named: dict[str, Any] = {**dict(zip(_ARGUMENTS, args, strict=False)), **given}
            if named["weight"] is self._module.weight:
                self._check(named)
                return self._look_up(named["input"])
        return func(*args, **given)

    def _check(self, named: Mapping[str, Any]) -> None:
        """Refuse options that ranks would not obey: they look up as the module says, which may name a padding row."""
        padding = named.get("padding_idx")
        padding = padding + self._module.num_embeddings if padding is not None and padding < 0 else padding
        options = (named.get("max_norm"), named.get("scale_grad_by_freq") or None, named.get("sparse") or None)
        if padding != self._module.padding_idx or any(option is not None for option in options):
            raise PlanError(
                "its embedding calls F.embedding with options that the module has not got (padding_idx, max_norm,"
                " scale_grad_by_freq or sparse), which ranks that have parts of a row would not obey"
            )

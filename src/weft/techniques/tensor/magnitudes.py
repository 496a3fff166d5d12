"""The magnitudes of DoRA beside a layer that the tensor axis divides.

DoRA scales each output feature of `W + s·B·A` to a trained length, so it needs the norm of every row of that matrix,
through which no gradient flows.  Beside a column-split layer a rank has whole rows, and the magnitudes of these.
Beside a row-split one it has a part of every row, and the squares are summed over the ranks.  Source: Liu et al. 2024,
section 4.3, https://arxiv.org/abs/2402.09353.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[..., Tensor]
OfTensor = Callable[[Tensor], Tensor]


def column_magnitudes(module: nn.Module, enter: OfTensor) -> Forward:
    """Return the forward of magnitudes beside a column-split layer.  `enter` makes of the layer's input what the
    product with this rank's rows takes."""

    def forward(x: Tensor, **keywords: Any) -> Tensor:
        base = keywords["base_layer"]
        rows = _rows(module, base, keywords)
        made = keywords["base_result"]
        made = F.linear(enter(x), _weight(module, base, x)) if made is None else _without_bias(made, base)
        return _scaled(module, rows.square().sum(1), made, x, keywords)

    return forward


def row_magnitudes(module: nn.Module, sum_squares: OfTensor, reduce: OfTensor) -> Forward:
    """Return the forward of magnitudes beside a row-split layer, whole on every rank.  `sum_squares` and `reduce` sum
    the squares of parts of rows, and parts of the layer's result, over the ranks."""

    def forward(x: Tensor, **keywords: Any) -> Tensor:
        base = keywords["base_layer"]
        squares = sum_squares(_rows(module, base, keywords).square().sum(1))
        made = keywords["base_result"]  # none where dropout has changed the input
        made = reduce(F.linear(x, _weight(module, base, x))) if made is None else _without_bias(made, base)
        return _scaled(module, squares, made, x, keywords)

    return forward


@torch.no_grad()
def _rows(module: nn.Module, base: nn.Module, keywords: Any) -> Tensor:
    """What this rank has of `W + s·B·A`, features along dim 0."""
    first, second = keywords["lora_A"].weight, keywords["lora_B"].weight
    return _weight(module, base, first) + keywords["scaling"] * (second @ first)


def _weight(module: nn.Module, base: nn.Module, like: Tensor) -> Tensor:
    """The frozen weight, features along dim 0."""
    weight: Any = base.weight
    return (weight.T if getattr(module, "fan_in_fan_out", False) else weight).to(like.dtype)


def _without_bias(result: Tensor, base: nn.Module) -> Tensor:
    bias: Any = getattr(base, "bias", None)
    return result if bias is None else result - bias


def _scaled(module: nn.Module, squares: Tensor, made: Tensor, x: Tensor, keywords: Any) -> Tensor:
    """What is added to the layer's own result, as `peft` computes it."""
    magnitude: Any = module.weight
    scale = (magnitude / squares.sqrt().to(x.dtype)).view(1, -1)
    return (scale - 1) * made + scale * keywords["lora_B"](keywords["lora_A"](x)) * keywords["scaling"]

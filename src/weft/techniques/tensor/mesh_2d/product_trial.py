"""Whether a linear layer with a forward of its own computes what `nn.Linear` does: shown by trials in fp64."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes  # pyright: ignore[reportPrivateUsage]

from weft.techniques.tensor.mesh_2d.norm_trial import LAYOUTS, TriedOperators, is_near

_MOST_ELEMENTS = 1 << 24
"""Larger weights are not tried."""
_OF_PRODUCTS = LAYOUTS | {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "add", "add_"}
"""No casts: a product in another type than the model's is another product in narrow types."""


def is_product_by_trial(module: nn.Linear) -> bool:
    """Return whether results and gradients of a few random numbers are those of x · Wᵀ + b, in training and evaluation.

    The module may be on meta, and is left as it is.
    """
    if dict(module.named_parameters()).keys() - {"weight", "bias"} or any(module.named_buffers()):
        return False
    if module.weight.numel() > _MOST_ELEMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    try:
        with _disable_current_modes(), torch.enable_grad(), torch.device("cpu"):  # a dry run's tensors have no values
            return all(_agrees(module, scale, generator) for scale in (1.0, 1e-4))
    except Exception:  # it wants more than an activation, or does with it what it likes
        return False


def _agrees(module: nn.Linear, scale: float, generator: torch.Generator) -> bool:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    stand_ins: dict[int, Any] = {id(each): nn.Parameter(draw(*each.shape)) for each in module.parameters()}
    tried = copy.deepcopy(module, stand_ins)
    x, by = (scale * draw(2, 3, module.in_features)).requires_grad_(), draw(2, 3, module.out_features)
    read = [x, *tried.parameters()]
    wanted = F.linear(x, tried.weight, tried.bias)
    expected = [wanted, *torch.autograd.grad((wanted * by).sum(), read)]
    for training in (True, False):
        tried.train(training)
        with TriedOperators(_OF_PRODUCTS):
            made = tried(x)
        found = [made, *torch.autograd.grad((made * by).sum(), read)]
        if not all(is_near(mine, theirs) for mine, theirs in zip(expected, found, strict=True)):
            return False
    return True

"""Tensors that are no views; every rank loads this."""

from __future__ import annotations

import torch
from torch import Tensor


def no_view(x: Tensor) -> Tensor:
    """Return `x`, sharing its storage, as a tensor that is no view; grad: unchanged.

    `fully_shard` warns of a module that returns a view (models slice before their head), because who changes it in
    place loses the gather of the backward.  Nothing here does that.
    """
    return x if x._base is None else torch.ops.aten._unsafe_view(x, x.shape)

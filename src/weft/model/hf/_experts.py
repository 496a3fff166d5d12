"""Experts of `transformers` in every dtype: its grouped product knows no fp64, in which gradients are compared."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

IMPLEMENTATION = "weft"
_GROUPED = (torch.float32, torch.bfloat16, torch.float16)


def register_experts() -> None:
    """Make the implementation known to transformers in this process."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _experts)


def _experts(experts: Any, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """One grouped product where there is one, else one product per token and choice, with its copy of the weights."""
    from transformers.integrations.moe import batched_mm_experts_forward, grouped_mm_experts_forward

    # The kernel wants rows of whole 16 bytes, which the narrow layers of a small model do not always have.
    widths = (width for matrices in experts.parameters(recurse=False) for width in matrices.shape[1:])
    fits = hidden.is_meta or all(width * hidden.element_size() % 16 == 0 for width in widths)
    is_grouped = hidden.dtype in _GROUPED and fits
    forward: Any = grouped_mm_experts_forward if is_grouped else batched_mm_experts_forward
    return forward(experts, hidden, top_k_index, top_k_weights)

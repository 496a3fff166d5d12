"""Find the share of a model's weights that is trained, and the share held as codes of a byte or less."""

from __future__ import annotations

from typing import TypedDict

from torch import nn


class Holding(TypedDict):
    """Fields of `weft.model.profile.Profile` of the same names."""

    trained_share: float
    coded_share: float
    code_bytes: float


def holding_of(module: nn.Module) -> Holding:
    """Return what a model's parameters, tied ones once, say of themselves."""
    total = trained = coded = size = 0
    for parameter in module.parameters():
        total += parameter.numel()
        trained += parameter.numel() * parameter.requires_grad
        if not parameter.is_floating_point():
            coded += parameter.numel()
            size += parameter.numel() * parameter.element_size()
    whole = max(total, 1)
    return Holding(trained_share=trained / whole if total else 1.0, coded_share=coded / whole, code_bytes=size / whole)

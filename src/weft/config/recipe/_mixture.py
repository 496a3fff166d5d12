"""What a shape must say of its mixtures of experts."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from weft.config.document import Rules
from weft.errors import RecipeError

if TYPE_CHECKING:
    from weft.config.recipe._shapes import DecoderShape

_RULES = Rules(RecipeError)
_OF_MIXTURES = (
    "top_k", "expert_ffn_size", "shared_experts", "first_dense_layers", "router", "normalise", "balance_loss_weight",
    "z_loss_weight", "balance_rate",
)  # fmt: skip


def check_mixture(shape: DecoderShape) -> None:
    """Raise RecipeError unless what it says of experts makes mixtures, or nothing is said of them."""
    if not shape.num_experts:
        for field in fields(shape):
            if field.name in _OF_MIXTURES and getattr(shape, field.name) != field.default:
                raise _RULES.refuse(shape, field.name, "means nothing without num_experts. Give it, or remove this.")
    _RULES.at_least(shape, 0, "num_experts", "shared_experts", "first_dense_layers")
    _RULES.at_least(shape, 0, "balance_loss_weight", "z_loss_weight", "balance_rate")
    _RULES.at_least(shape, 1, "top_k", "expert_ffn_size")
    if shape.num_experts and shape.top_k > shape.num_experts:
        raise _RULES.refuse(shape, "top_k", f"is more than num_experts = {shape.num_experts}. Use that or less.")
    if shape.num_experts and shape.first_dense_layers >= shape.num_layers:
        most = shape.num_layers - 1
        raise _RULES.refuse(shape, "first_dense_layers", f"leaves no block for a mixture. Use {most} or less.")

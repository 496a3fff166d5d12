"""Whether ranks can share the sequence of a model of which it is known how its tokens see one another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from weft.model.families import OWN_CHECKPOINTS

if TYPE_CHECKING:
    from weft.model.blueprint import Blueprint


def find_problem(blueprint: Blueprint) -> str:
    """Return what its loss or its modules have against it: a sentence without its end; empty: nothing."""
    if not (blueprint.per_sample_loss and getattr(blueprint.loss, "per_token", False)):
        return "nothing says that its loss is a sum over tokens (an attribute `per_token` of the loss)"
    if getattr(blueprint.loss, "auxiliary", None):
        return "its loss has auxiliary terms over the batch"
    if any(getattr(module, "gradient_checkpointing", False) for module in blueprint.module.modules()):
        return OWN_CHECKPOINTS
    return ""

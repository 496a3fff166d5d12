"""Tables of Hugging Face models: of the family's file; and the library's own tensor-parallel plan, to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.config.recipe import SplitKind
from weft.model.description import Description, describe_family
from weft.model.families import SplitRule, Tables, family_of


def description_of_model(
    model: Any, sequence_length: int | None = None, *, where: str = "config"
) -> Description | None:
    """Return the description of a constructed model by its family; None where that has no file.

    Raises:
        RecipeError: its configuration makes no model of the family.
    """
    family = family_of(model.config.model_type)
    if family is None:
        return None
    return describe_family(family, model.config.to_dict(), sequence_length, where=where)


def tables_of_model(model: Any, sequence_length: int | None = None) -> Tables:
    """Return how a constructed model splits and where it is cut, as its family says; what has no family is looked at
    (`weft.analysis`)."""
    description = description_of_model(model, sequence_length)
    return Tables() if description is None else description.tables


_STYLES: dict[str, tuple[SplitKind, bool]] = {
    "colwise": ("column", False),
    "colwise_gather_output": ("column", True),
    "colwise_rep": ("column", True),
    "rowwise": ("row", False),
    "embedding_rowwise": ("vocab", False),
    "sequence_parallel": ("sequence", False),
    "replicated_with_grad_allreduce": ("heads", False),
}
"""transformers' tensor-parallel styles → (kind, gather_output)."""


def translate_plan(model: Any) -> tuple[list[SplitRule], list[str]]:
    """Translate the model's own tensor-parallel plan; return the rules and the styles that have no translation."""
    base: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    head: Mapping[str, str] = getattr(type(model), "_tp_plan", None) or {}
    plan = {f"{model.base_model_prefix}.{pattern}": style for pattern, style in base.items()} | dict(head)
    unknown = sorted({style for style in plan.values() if style not in _STYLES})
    rules = [
        SplitRule(match=pattern, kind=_STYLES[style][0], gather_output=_STYLES[style][1])
        for pattern, style in plan.items()
        if style in _STYLES
    ]
    return rules, unknown

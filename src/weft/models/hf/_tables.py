"""Tables of Hugging Face models: of the family's file, else of the library's own tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weft.description import Description, describe_family
from weft.families import SplitRule, Tables, family_of
from weft.recipe import SplitKind


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
    """Return how a constructed model splits and where it is cut, as its family or its own plan says."""
    description = description_of_model(model, sequence_length)
    return library_tables(model) if description is None else description.tables


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


def library_tables(model: Any) -> Tables:
    """Tables of a family without a file: its own tensor plan if all of it translates, and no pipeline cuts.

    A pipeline plan alone does not tell what a forward does between the embedding and the first block (some scale
    there), so Weft does not cut by it.
    """
    config = model.config
    rules, unknown = translate_plan(model)
    no_tensor, notes = "", list[str]()
    if unknown:
        rules = []
        no_tensor = f"its tensor-parallel plan uses {', '.join(unknown)}, which Weft cannot split"
        notes.append(f"{no_tensor}: no tensor axis.")
    elif not rules:
        no_tensor = "it brings no tensor-parallel plan, and the recipe has no [model.split]"
        notes.append("it brings no tensor-parallel plan: no tensor axis unless [model.split] says how.")
    counts = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
    sizes = {name: getattr(config, name, None) for name in counts}
    divisible = {name: size for name, size in sizes.items() if isinstance(size, int)}
    return Tables(
        split=rules,
        divisible=divisible if rules else {},
        no_tensor=no_tensor,
        notes=notes,
    )

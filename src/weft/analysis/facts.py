"""What a plan must know of a model that has been built."""

from __future__ import annotations

import math
from typing import get_args

from weft.config.plan import Limit, ModelFacts
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint


def facts_of_blueprint(blueprint: Blueprint, recipe: Recipe | None = None) -> ModelFacts:
    """Return the facts that a model, its tables and its loss show.  The recipe may have a name for it."""
    factory = recipe.model.factory if recipe is not None else None
    limits: dict[Limit, str] = {limit: reason for limit in get_args(Limit) if (reason := blueprint.why_not(limit))}
    if not blueprint.per_sample_loss:
        from weft.techniques.data.find_whole_batch import why_no_gathering  # only such a loss is run for it

        limits |= {"gathered_loss": reason} if (reason := why_no_gathering(blueprint)) else {}
    return ModelFacts(
        name=blueprint.name or factory or type(blueprint.module).__name__,
        limits=limits,
        num_blocks=None if blueprint.cut is None else len(blueprint.cut.blocks),
        num_experts=math.gcd(*blueprint.experts.values()),
        attention_heads=blueprint.attention_heads,
        divisible=(dict(blueprint.divisible) or None) if blueprint.splits else {},
        num_parameters=sum(parameter.numel() for parameter in blueprint.module.parameters()),
        hidden_size=blueprint.hidden_size,
        sequence_length=blueprint.sequence_length,
        vocabulary_size=blueprint.vocabulary_size,
        has_batch_norm=bool(blueprint.batch_norm),
        batch_norm=blueprint.batch_norm,
        per_sample_loss=blueprint.per_sample_loss,
    )

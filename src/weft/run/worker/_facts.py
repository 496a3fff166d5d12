"""Facts of a built model that a plan depends on."""

from __future__ import annotations

import math

from weft.config.plan import ModelFacts
from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.families import NO_SEQUENCE, FoundCut


def facts_of_blueprint(blueprint: Blueprint, recipe: Recipe) -> ModelFacts:
    """Return the facts that a model and its tables show."""
    cut, model = blueprint.cut, type(blueprint.module).__name__
    return ModelFacts(
        name=blueprint.name or recipe.model.factory or model,
        num_blocks=None if cut is None else len(cut.blocks),
        no_stages="" if cut is not None else blueprint.no_stages or f"nothing says where the blocks of {model} are",
        no_pipeline=blueprint.no_pipeline,
        no_sequence=NO_SEQUENCE if isinstance(cut, FoundCut) else "",
        no_context=blueprint.no_context,
        num_experts=math.gcd(*blueprint.experts.values()),
        no_experts=blueprint.no_experts,
        no_grid=blueprint.no_grid,
        no_cube=blueprint.no_cube,
        attention_heads=blueprint.attention_heads,
        no_tensor=blueprint.no_tensor or ("" if blueprint.splits else f"nothing says how the layers of {model} split"),
        divisible=(dict(blueprint.divisible) or None) if blueprint.splits else {},
        num_parameters=sum(parameter.numel() for parameter in blueprint.module.parameters()),
        hidden_size=blueprint.hidden_size,
        sequence_length=blueprint.sequence_length,
        vocabulary_size=blueprint.vocabulary_size,
        has_batch_norm=bool(blueprint.batch_norm),
        batch_norm=blueprint.batch_norm,
        per_sample_loss=blueprint.per_sample_loss,
        no_gathering="" if blueprint.per_sample_loss else _why_no_gathering(blueprint),
    )


def _why_no_gathering(blueprint: Blueprint) -> str:
    from weft.techniques.data.find_whole_batch import why_no_gathering  # only such a loss is run for it

    return why_no_gathering(blueprint)

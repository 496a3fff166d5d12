"""What a plan must know of a model that has been built, where the recipe alone does not tell."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from weft.models import Blueprint
from weft.plan import ModelFacts, facts_of
from weft.recipe import Recipe

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def facts_of_blueprint(blueprint: Blueprint, recipe: Recipe) -> ModelFacts:
    """Return the recipe's facts, completed and corrected by the model itself."""
    facts = facts_of(recipe)
    parameters = list(blueprint.module.parameters())
    splits = any(rule.kind in ("column", "row", "vocab") for rule in blueprint.split)
    cut = blueprint.cut
    model = type(blueprint.module).__name__
    return replace(
        facts,
        name=facts.name if facts.name != "model" else model,
        num_blocks=len(cut.blocks) if cut is not None else facts.num_blocks,
        no_stages="" if cut is not None else blueprint.no_stages or f"nothing says where the blocks of {model} are",
        no_tensor="" if splits else blueprint.no_tensor or f"nothing says how the layers of {model} split",
        divisible=(dict(blueprint.divisible) or None) if splits else {},
        num_parameters=sum(parameter.numel() for parameter in parameters),
        sequence_length=blueprint.sequence_length,
        vocabulary_size=blueprint.vocabulary_size,
        has_batch_norm=any(isinstance(module, _BATCH_NORMS) for module in blueprint.module.modules()),
        per_sample_loss=getattr(blueprint.loss, "per_sample", True),
    )

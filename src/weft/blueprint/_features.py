"""Whether tensor ranks may form a grid for a recipe's model: what was kept of it, or a look."""

from __future__ import annotations

from weft.describe import look_at_features
from weft.description import stored
from weft.models import Blueprint
from weft.recipe import Recipe


def look_at_its_features(blueprint: Blueprint, recipe: Recipe) -> None:
    """Enter into the blueprint of a model without known forward why its ranks may not have parts of the features."""
    if blueprint.has_known_forward:
        return
    if recipe.data.documents == "isolated":
        blueprint.no_features = "its documents are kept apart by masks that a look at one document does not show"
        return
    known = stored(recipe)
    if known is None:
        look_at_features(blueprint)
    else:
        blueprint.no_features = known.no_features

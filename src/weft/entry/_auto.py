"""`plan = "auto"`: what a choice needs to know of a model that has been built."""

from __future__ import annotations

from contextlib import suppress

import torch

from weft.cluster import Cluster, KnownMachine, known_machine
from weft.describe import build_blueprint, describe
from weft.entry._facts import facts_of_blueprint
from weft.errors import RecipeError
from weft.launch import Place
from weft.models import Blueprint
from weft.plan import ModelFacts
from weft.profile import Profile, profile_of
from weft.recipe import Recipe


def profile_of_built(recipe: Recipe) -> tuple[Profile | None, ModelFacts]:
    """Build the recipe's model on the meta device; return its profile and its facts.  See `profile_of_blueprint`."""
    blueprint = build_blueprint(recipe)
    facts = facts_of_blueprint(blueprint, recipe)
    return profile_of_blueprint(blueprint, recipe, facts), facts


def profile_of_blueprint(blueprint: Blueprint, recipe: Recipe, facts: ModelFacts) -> Profile | None:
    """Return the profile that the recipe's numbers give, or one forward of the model on the meta device.

    None where the model cannot be described: it brings no example, or its forward depends on values.
    """
    known = profile_of(recipe, facts)
    if known is not None or blueprint.example is None:
        return known
    dtype = torch.bfloat16 if "bf16" in recipe.permit.precision else torch.float32
    with suppress(RecipeError):  # `weft describe` says what is missing
        return describe(blueprint, dtype=dtype)
    return None


def machine_for(place: Place | None) -> KnownMachine:
    """This machine as well as it is known; in a job on several hosts as its system says, so that all hosts agree."""
    if place is not None and place.local_world_size < place.world_size:
        return KnownMachine(cluster=Cluster.detect(), note="")
    return known_machine()

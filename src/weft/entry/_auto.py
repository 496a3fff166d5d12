"""`plan = "auto"`: what a choice needs to know of a model that has been built."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from weft.blueprint import build_blueprint
from weft.cluster import Cluster, KnownMachine, known_machine
from weft.describe import describe, describe_weights
from weft.description import Description, description_of
from weft.errors import RecipeError
from weft.launch import RankInfo
from weft.models import Blueprint
from weft.plan import ModelFacts
from weft.recipe import Recipe
from weft.worker import facts_of_blueprint

_WEIGHTS_ALONE = "a forward of the model cannot be described, so plans are compared by its weights alone"


def describe_built(recipe: Recipe) -> tuple[Description, ModelFacts]:
    """Build the recipe's model on the meta device; return its description and its facts.  See `describe_blueprint`."""
    blueprint = build_blueprint(recipe)
    facts = facts_of_blueprint(blueprint, recipe)
    return describe_blueprint(blueprint, recipe), facts


def describe_blueprint(blueprint: Blueprint, recipe: Recipe) -> Description:
    """Return what the recipe's numbers say of a model, or one forward of it on the meta device.

    Where that cannot be run (the model brings no example, or its forward depends on values), its weights alone tell.
    """
    known = description_of(recipe)
    if known is not None:
        return known
    dtype = torch.bfloat16 if "bf16" in recipe.permit.precision else torch.float32
    if blueprint.example is not None:
        with suppress(RecipeError):  # `weft describe` says what is missing
            return Description(profile=describe(blueprint, dtype=dtype))
    return Description(profile=describe_weights(blueprint), notes=(_WEIGHTS_ALONE,))


def describe_user_model(blueprint: Blueprint, recipe: Recipe) -> Description:
    """Describe a module that the user has constructed, with the user's own loss.

    A copy of it on the meta device runs, so that what its forward counts or stores, and the state of the random
    generators, stay as they are.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # the loss says what it has to say when it is run for what it is for
        module = _on_meta(blueprint.module)
        if module is None:
            return Description(profile=describe_weights(blueprint), notes=(_WEIGHTS_ALONE,))
        return describe_blueprint(replace(blueprint, module=module), recipe)


def _on_meta(module: nn.Module) -> nn.Module | None:
    """A copy without memory; None where a module holds what cannot be copied (open files, locks)."""
    stand_ins: dict[int, object] = {}
    for parameter in module.parameters():
        empty = torch.empty_like(parameter, device="meta")
        stand_ins[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    for buffer in module.buffers():
        stand_ins[id(buffer)] = torch.empty_like(buffer, device="meta")
    with suppress(Exception):  # __deepcopy__ and __reduce__ are the user's, and may raise what they like
        return copy.deepcopy(module, stand_ins)
    return None


def machine_for(rank_info: RankInfo | None) -> KnownMachine:
    """This machine as well as it is known; in a job on several hosts as its system says, so that all hosts agree."""
    if rank_info is not None and rank_info.local_world_size < rank_info.world_size:
        return KnownMachine(cluster=Cluster.detect(), note="")
    return known_machine()

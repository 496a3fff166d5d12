"""`plan = "auto"`: what a choice needs to know of a model that has been built."""

from __future__ import annotations

import copy
import warnings
from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from weft.analysis.blueprint import build_blueprint
from weft.analysis.describe import describe
from weft.analysis.describe_weights import describe_weights
from weft.analysis.facts import facts_of_blueprint
from weft.analysis.look import look
from weft.analysis.tensor_split.try_table import try_table
from weft.config.cluster import Cluster, KnownMachine, known_machine
from weft.config.recipe import Recipe
from weft.errors import RecipeError
from weft.model.blueprint import Blueprint
from weft.model.description import Description, description_of, store, stored
from weft.model.families import Tables
from weft.planning.learned import learned_here
from weft.run.launch import RankInfo
from weft.techniques.cost_terms import DATASHEET, Calibration

_WEIGHTS_ALONE = "a forward of the model cannot be described, so plans are compared by its weights alone"


def describe_recipe(recipe: Recipe) -> Description:
    """Return what the recipe's numbers say of its model, what was kept of it, or else what the built model shows."""
    return description_of(recipe) or stored(recipe) or _kept(recipe, build_blueprint(recipe))


def describe_blueprint(blueprint: Blueprint, recipe: Recipe) -> Description:
    """`describe_recipe`, of a recipe whose model has been built already."""
    return description_of(recipe) or stored(recipe) or _kept(recipe, blueprint)


def describe_user_model(blueprint: Blueprint, recipe: Recipe) -> Description:
    """Describe a module that the user has constructed, with the user's own loss.

    A copy of it on the meta device runs, so that what its forward counts or stores, and the state of the random
    generators, stay as they are.
    """
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # warnings of the user's loss are shown when training calls it
        module = _on_meta(blueprint.module)
        if module is None:
            return _described(replace(blueprint, example=None), recipe)
        return _described(replace(blueprint, module=module), recipe)


def look_at_user_model(blueprint: Blueprint, *, has_table: bool) -> None:
    """Split a module that the user has constructed as its forward allows, or see whether that allows the user's table;
    a copy of it on the meta device runs."""
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        module = _on_meta(blueprint.module)
        if module is None:
            return
        seen, known = replace(blueprint, module=module), len(blueprint.notes)
        (try_table if has_table else look)(seen)
        for name, value in Tables(**seen.of_tables).of_tables.items():
            setattr(blueprint, name, value)
    if has_table:
        for note in blueprint.notes[known:]:
            warnings.warn(note, stacklevel=2)


def _kept(recipe: Recipe, blueprint: Blueprint) -> Description:
    description = _described(blueprint, recipe)
    store(recipe, description)
    return description


def _described(blueprint: Blueprint, recipe: Recipe) -> Description:
    """What one forward on the meta device shows; where that cannot be run (the model brings no example, or its forward
    depends on values), what its weights alone tell."""
    profile, notes = None, ()
    if blueprint.example is not None:
        dtype = torch.bfloat16 if "bf16" in recipe.permit.precision else torch.float32
        with suppress(RecipeError):  # `weft describe` says what is missing
            profile = describe(blueprint, dtype=dtype)
    if profile is None:
        profile, notes = describe_weights(blueprint), (_WEIGHTS_ALONE,)
    name = facts_of_blueprint(blueprint, recipe).name
    facts = replace(
        profile.facts,
        name=name,
        attention_heads=profile.attention_heads,
        hidden_size=profile.hidden_size,
        tied=profile.tied,
    )
    return Description(
        profile=replace(profile, name=name, facts=facts), tables=Tables(**blueprint.of_tables), notes=notes
    )


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


def calibration_for(machine: KnownMachine, rank_info: RankInfo | None) -> Calibration:
    """Return the constants of prices on this machine, corrected by what its recorded runs took.

    Ranks that another program has started choose a plan each for itself, and the runs may change between two looks at
    them: those take the constants alone."""
    return learned_here(machine.cluster).calibration(DATASHEET) if rank_info is None else DATASHEET

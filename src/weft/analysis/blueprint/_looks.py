"""Look at a recipe's model for its split, or read what was kept of an earlier look."""

from __future__ import annotations

from weft.config.recipe import Recipe
from weft.model.blueprint import Blueprint
from weft.model.description import stored
from weft.model.families import Tables, found_split_note


def look_for_a_split(blueprint: Blueprint, recipe: Recipe) -> None:
    """Take what was kept of the same model, described by the same code; else see what its forward shows."""
    if (known := stored(recipe)) is not None:
        _take_split(blueprint, known.tables)
        return
    from weft.analysis.look import look  # thousands of lines, which ranks do without where something was kept

    look(blueprint)


def _take_split(blueprint: Blueprint, tables: Tables) -> None:
    blueprint.split, blueprint.localise, blueprint.divisible = tables.split, tables.localise, tables.divisible
    blueprint.vocabulary_head = tables.vocabulary_head
    if reason := tables.limits.get("tensor"):
        blueprint.limit("tensor", reason)
    if tables.splits:  # other notes that were kept are not of this model: its folder may have got weights since
        blueprint.notes = (*blueprint.notes, found_split_note(tables.split))

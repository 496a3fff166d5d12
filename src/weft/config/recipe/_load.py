"""Recipes as TOML."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping

from weft.config.document import Document, bind, dump, lay_over, parse_document, parse_overrides, read_document
from weft.config.recipe._recipe import Recipe
from weft.errors import RecipeError


def load_recipe(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe file, with overrides such as `recipe.optimizer.learning_rate=1e-3` laid over it.

    Raises:
        RecipeError: when the file cannot be read, or a setting is unknown, of the wrong type or impossible; the
            message names file, line, key and value, and the change to make.
    """
    return bind_recipe(read_document(path, "recipe", RecipeError), overrides)


def parse_recipe(text: str, overrides: Iterable[str] = (), *, name: str = "recipe.toml") -> Recipe:
    """Read a recipe from TOML text; `name` stands for the file in messages.  Raises as `load_recipe` does."""
    return bind_recipe(parse_document(text, "recipe", RecipeError, name=name), overrides)


def bind_recipe(document: Document, overrides: Iterable[str] = ()) -> Recipe:
    """Build the recipe of a document and remember where each setting was given."""
    document = lay_over(document, parse_overrides(overrides, ("recipe",)))
    recipe = bind(Recipe, document)
    return dataclasses.replace(recipe, origins=dict(document.origins))


def dump_recipe(recipe: Recipe, comments: Mapping[str, str] | None = None, *, everything: bool = False) -> str:
    """Write a recipe as TOML with comments; `parse_recipe` gives an equal one back.

    Args:
        comments: dotted key → comment in place of the setting's description.
        everything: also write settings that have their default value.
    """
    return dump(recipe, comments=comments, everything=everything)

"""Plans as TOML, and settings of the command line laid over recipes and plans."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from weft.config.document import (
    Document,
    Override,
    bind,
    dump,
    lay_over,
    parse_document,
    parse_overrides,
    read_document,
    to_table,
)
from weft.config.plan._plan import Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError, RecipeError


def load_plan(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> Plan:
    """Read a plan file, with overrides such as `plan.mesh.tensor=2` laid over it.

    Raises:
        PlanError: when the file cannot be read, or a setting is unknown, of the wrong type or impossible by itself
            (`check_plan` says whether it fits a recipe); the message names file, line, key and value.
    """
    return _bind_plan(read_document(path, "plan", PlanError), overrides)


def parse_plan(text: str, overrides: Iterable[str] = (), *, name: str = "plan.toml") -> Plan:
    """Read a plan from TOML text; `name` stands for the file in messages.  Raises as `load_plan` does."""
    return _bind_plan(parse_document(text, "plan", PlanError, name=name), overrides)


def dump_plan(
    plan: Plan, reasons: Mapping[str, str] | None = None, *, header: Iterable[str] = (), everything: bool = False
) -> str:
    """Write a plan as TOML; `parse_plan` gives an equal one back.

    Args:
        reasons: dotted key → why it has this value, written beside it.
        header: comment lines at the top.
        everything: also write settings that have their default value.
    """
    return dump(plan, header=header, comments=reasons, everything=everything)


def apply_overrides(recipe: Recipe, plan: Plan, overrides: Iterable[str]) -> tuple[Recipe, Plan]:
    """Return both with `recipe.…=value` and `plan.…=value` settings laid over them; values are TOML or bare words.

    Messages about these settings say `(from --set)`, also those of `check_plan`.

    Raises:
        WeftError: when a text is no setting; RecipeError or PlanError when a setting is unknown or impossible.
    """
    parsed = parse_overrides(overrides, ("recipe", "plan"))
    return _lay_over_recipe(recipe, parsed), _lay_over_plan(plan, parsed)


def lay_over_plan(plan: Plan, overrides: Iterable[str]) -> Plan:
    """`apply_overrides` of `plan.…=value` settings alone."""
    return _lay_over_plan(plan, parse_overrides(overrides, ("plan",)))


def with_settings(plan: Plan, settings: Mapping[str, Any], origin: str) -> Plan:
    """Return a plan with settings by dotted key (`data_parallel.zero`) laid over it, given at `origin`, for messages.

    Raises:
        PlanError: a setting is unknown or impossible.
    """
    overrides = [Override("plan", tuple(key.split(".")), value) for key, value in settings.items()]
    document = lay_over(Document("plan", PlanError, to_table(plan), plan.origins), overrides, origin)
    return dataclasses.replace(bind(Plan, document), origins=document.origins)


def _lay_over_recipe(recipe: Recipe, overrides: list[Override]) -> Recipe:
    if not any(override.noun == "recipe" for override in overrides):
        return recipe
    document = lay_over(Document("recipe", RecipeError, to_table(recipe), recipe.origins), overrides)
    return dataclasses.replace(bind(Recipe, document), origins=document.origins)


def _lay_over_plan(plan: Plan, overrides: list[Override]) -> Plan:
    if not any(override.noun == "plan" for override in overrides):
        return plan
    document = lay_over(Document("plan", PlanError, to_table(plan), plan.origins), overrides)
    return dataclasses.replace(bind(Plan, document), origins=document.origins)


def _bind_plan(document: Document, overrides: Iterable[str]) -> Plan:
    document = lay_over(document, parse_overrides(overrides, ("plan",)))
    return dataclasses.replace(bind(Plan, document), origins=document.origins)

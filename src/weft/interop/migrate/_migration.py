"""The result of a migration: a plan, and the settings that a recipe needs with it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.config.document import format_value
from weft.config.plan import Plan, dump_plan, with_settings
from weft.config.recipe import parse_recipe
from weft.errors import PlanError, RecipeError, WeftError
from weft.interop.migrate._keys import MigratedSettings
from weft.techniques.check import check_runnable

_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    """The result of a migration.  No key of the configuration was left out silently."""

    plan: Plan
    recipe: Mapping[str, Any]
    """Settings of a recipe by dotted key, such as `optimizer.max_grad_norm`: what the configuration says of the
    training itself, and the permissions that the plan needs."""
    reasons: Mapping[str, str]
    """Dotted key (`plan.…` or `recipe.…`) → the key of the configuration that it comes from."""
    notes: tuple[str, ...]
    """Sentences on keys that have no setting here, with what replaces them."""
    source: str
    """Name of the configuration."""

    def plan_toml(self) -> str:
        """Return plan.toml, each setting with where it comes from."""
        reasons = {key.partition(".")[2]: why for key, why in self.reasons.items() if key.startswith("plan.")}
        text = dump_plan(self.plan, reasons, header=(f"{self.source} as a plan of Weft, by weft migrate.",))
        notes = [_comment(f"- {note}") for note in self.notes]
        return "\n".join([text.rstrip("\n"), *(["", "# Without a setting of a plan:", *notes] if notes else [])]) + "\n"

    def recipe_toml(self) -> str:
        """Return the sections of recipe.toml that the configuration says; model, data and `run.steps` are yours."""
        sections: dict[str, list[str]] = {}
        for key, value in self.recipe.items():
            section, _, name = key.partition(".")
            line, why = f"{name} = {format_value(value)}", self.reasons.get(f"recipe.{key}", "")
            beside = f"{line}  # {why}"
            lines = sections.setdefault(section, [])
            lines += [beside] if len(beside) <= _WIDTH else [_comment(why), line]
        head = f"# What {self.source} says of a recipe, by weft migrate. Model, data and run.steps are not in it."
        return "\n\n".join([head, *("\n".join([f"[{name}]", *lines]) for name, lines in sections.items())]) + "\n"


def migration_of(settings: MigratedSettings, source: str) -> Migration:
    """Check what a configuration became, and return it.

    Raises:
        RecipeError: a key is refused, or the settings do not go together.
    """
    plan = Plan()
    if not settings.problems:
        try:
            plan = with_settings(plan, settings.plan, source)
            check_runnable(plan)
        except PlanError as error:
            settings.problems += [_traced(line, settings) for line in str(error).splitlines()]
    migration = Migration(
        plan=plan,
        recipe=dict(sorted(settings.recipe.items(), key=lambda item: item[0].partition(".")[0])),
        reasons=settings.reasons,
        notes=tuple(dict.fromkeys(settings.notes)),
        source=source,
    )
    if not settings.problems:
        try:
            parse_recipe(_completed(migration.recipe_toml()), name=source)
        except WeftError as error:
            settings.problems.append(_traced(str(error), settings))
    if settings.problems:
        lines = "\n".join(f"  {problem}" for problem in settings.problems)
        raise RecipeError(f"{source} cannot be migrated as it is:\n{lines}")
    return migration


def _completed(text: str) -> str:
    """The fragment as a whole recipe, so that the recipe's own checks read it."""
    if "[batch]" not in text:
        text += "\n[batch]\nglobal_batch_size = 1\n"
    if "[run]" not in text:
        text += "\n[run]\nsteps = 1_000_000_000\n"
    elif "\nsteps = " not in text:
        text = text.replace("[run]\n", "[run]\nsteps = 1_000_000_000\n")
    return text + '\n[model]\nreference = "mlp"\nnum_layers = 1\ninput_size = 1\nhidden_size = 1\nnum_classes = 2\n'


def _traced(problem: str, settings: MigratedSettings) -> str:
    """A plan's or a recipe's refusal with the key that asked for the setting."""
    named = [key for key in settings.reasons if key.partition(".")[2] in problem]
    if not named:
        return problem
    why = settings.reasons[max(named, key=len)]
    return f"{why.partition(':')[0]}: {problem}"


def _comment(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="#   "))

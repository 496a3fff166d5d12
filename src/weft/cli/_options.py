"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from weft.errors import PlanError, WeftError

FLAG = Parameter(negative=(), show_default=False)
"""Says of an option that it is given without a value, or several times, or not at all."""

RecipeFile = Annotated[Path, Parameter(help="TOML file that says what to train.")]
PlanFile = Annotated[str, Parameter(help="TOML file that says how to split it, or `auto`.")]
Overrides = Annotated[
    tuple[str, ...],
    FLAG,
    Parameter(
        name="--set",
        help="One setting, such as recipe.optimizer.learning_rate=1e-3 or plan.mesh.tensor=2. May be given again.",
    ),
]
Json = Annotated[bool, FLAG, Parameter(name="--json", help="Print everything as JSON.")]


def refuse_plan_settings(command: str, overrides: tuple[str, ...]) -> None:
    """Refuse settings of a plan in a command that reads a recipe alone, where they would do nothing."""
    for text in overrides:
        if text.startswith("plan."):
            raise PlanError(
                f"--set {text}: {command} reads no plan, so it would do nothing. Leave it out, or ask weft plan."
            )


def write_output(output: Path, text: str, error: type[WeftError]) -> None:
    """Write what `--output` asks for.  Raises `error` where that cannot be."""
    try:
        output.write_text(text)
    except OSError as problem:
        raise error(f"{output} cannot be written: {problem.strerror}. Name a file you may write.") from None

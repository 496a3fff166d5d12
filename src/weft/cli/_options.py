"""Options that several commands have: one name, one meaning, one text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

FLAG = Parameter(negative=(), show_default=False)
"""Of what is given without a value, or again and again, or not at all."""

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

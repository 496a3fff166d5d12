"""Names of runs."""

from __future__ import annotations

import re
from pathlib import Path


def run_name(recipe: Path) -> str:
    """The name of a run of this recipe: the file's, or its folder's when the file is just called recipe.toml."""
    stem = recipe.resolve().parent.name if recipe.stem == "recipe" else recipe.stem
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-.") or "run"

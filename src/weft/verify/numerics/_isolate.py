"""Take one technique after another out of a plan, to find those that a difference needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config.plan import Plan
from weft.config.recipe import ConvNetShape, ModelRecipe, Recipe
from weft.techniques.contract import Ablation
from weft.techniques.registry import TECHNIQUES

_ABLATIONS: Mapping[str, Ablation] = {
    ablation.name: ablation
    for ablation in sorted(
        (ablation for technique in TECHNIQUES for ablation in technique.ablations),
        key=lambda ablation: not ablation.frees_ranks,
    )
}
"""Whole axes first: what is tried after them runs on fewer processes."""
REMOVABLE = (*_ABLATIONS, "dropout")


def without_technique(technique: str, recipe: Recipe, plan: Plan, folder: Path) -> tuple[Recipe, Plan] | None:
    """Return recipe and plan without one of `REMOVABLE`; None when they do not have it.

    The global batch stays.  A Hugging Face configuration without dropout is written into `folder`.
    """
    if technique == "dropout":
        model = _without_dropout(recipe.model, folder)
        return None if model is None else (replace(recipe, model=model), plan)
    simpler = _ABLATIONS[technique].apply(plan)
    return None if simpler == plan else (recipe, simpler)


def _without_dropout(model: ModelRecipe, folder: Path) -> ModelRecipe | None:
    shape = model.shape
    if shape is not None:
        if isinstance(shape, ConvNetShape) or shape.dropout == 0.0:
            return None
        return replace(model, shape=replace(shape, dropout=0.0))
    if model.hf is None:
        return None
    config: dict[str, Any] = json.loads(Path(model.hf).read_text(encoding="utf-8"))
    names = [name for name, value in config.items() if ("dropout" in name or name.endswith("pdrop")) and value]
    if not names:
        return None
    path = folder / "without-dropout.json"
    path.write_text(json.dumps(config | dict.fromkeys(names, 0.0)))
    return replace(model, hf=str(path))

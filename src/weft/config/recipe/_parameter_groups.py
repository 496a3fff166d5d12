"""Group the parameters that share a learning-rate scale and a weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from weft.config.recipe._recipe import OptimizerRecipe
from weft.errors import RecipeError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """Settings that may differ from parameter to parameter."""

    learning_rate_scale: float
    weight_decay: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerGroup:
    """The parameters of this rank's parts that have the same settings; `Shard.group` counts these."""

    settings: GroupSettings
    names: tuple[str, ...]
    """Names in the whole model, also of parameters of which this rank's shards hold nothing."""


def parameter_settings(recipe: OptimizerRecipe, name: str, shape: Sequence[int]) -> GroupSettings:
    """Return the settings of one parameter: of the recipe's first group that matches its name, else the defaults.

    `shape` is the whole shape.  Parameters with fewer than two dimensions (biases, norms) have no decay unless a group
    gives them one by name or the recipe says `decay_one_dimensional`.
    """
    decayed = len(shape) >= 2 or recipe.decay_one_dimensional
    inherited = recipe.weight_decay if decayed else 0.0
    for group in recipe.groups:
        if fnmatchcase(name, group.match):
            decay = inherited if group.weight_decay is None else group.weight_decay
            return GroupSettings(learning_rate_scale=group.learning_rate_scale, weight_decay=decay)
    return GroupSettings(learning_rate_scale=1.0, weight_decay=inherited)


def group_parameters(recipe: OptimizerRecipe, shapes: Mapping[str, Sequence[int]]) -> list[OptimizerGroup]:
    """Gather trainable parameters (name → whole shape) with equal settings, in order of first appearance.

    Call it with the same parameters in the same order on all data and tensor ranks of a stage: group indices must
    agree.
    """
    groups: dict[GroupSettings, list[str]] = {}
    for name, shape in shapes.items():
        groups.setdefault(parameter_settings(recipe, name, shape), []).append(name)
    return [OptimizerGroup(settings=settings, names=tuple(names)) for settings, names in groups.items()]


def check_group_globs(recipe: OptimizerRecipe, names: Iterable[str]) -> None:
    """Check that every group of the recipe matches a parameter; `names` are those of the whole model, not of one stage.

    Raises:
        RecipeError: A glob matches nothing, and would be silently ignored.
    """
    known = list(names)
    for index, group in enumerate(recipe.groups):
        if not any(fnmatchcase(name, group.match) for name in known):
            shown = ", ".join(known[:3]) + (", …" if len(known) > 3 else "")
            raise RecipeError(
                f"optimizer.groups[{index}].match = {group.match!r} matches none of the {len(known)} trainable "
                f"parameters, so its settings would do nothing.{did_you_mean(group.match, known)} "
                f"Parameters are named {shown}"
            )

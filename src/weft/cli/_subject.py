"""What to train, as the search of `weft plan` and the answers about it see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import RecipeError

if TYPE_CHECKING:
    from weft.description import Description
    from weft.profile import ModelSizes, Profile
    from weft.recipe import OptimizerRecipe, PermitRecipe, Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What to train, as search sees it."""

    profile: Profile
    global_batch_size: int
    permit: PermitRecipe | None
    optimizer: OptimizerRecipe | None
    sizes: ModelSizes | None = None
    """Sizes of a transformer, for other systems."""
    recipe: Recipe | None = None
    """None for a well-known model."""
    described: Description | None = None
    """The model, by what is known of it."""
    steps: int | None = None
    """Optimizer steps of the recipe's run."""


def need_sizes(subject: Subject) -> ModelSizes:
    """Return the sizes of a transformer.

    Raises:
        RecipeError: the model is none.
    """
    if subject.sizes is None:
        raise RecipeError(
            f"{subject.profile.name} is no transformer whose sizes Weft knows: no other system can be told of it."
            " Use --eject."
        )
    return subject.sizes

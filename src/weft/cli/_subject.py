"""The subject of a search: a model and its batch, from a recipe or from the list of known models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.errors import RecipeError

if TYPE_CHECKING:
    from weft.config.recipe import OptimizerRecipe, PermitRecipe, Recipe
    from weft.model.description import Description
    from weft.model.profile import ModelSizes, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and its training, as the search sees them."""

    described: Description
    """The model's description."""
    global_batch_size: int
    permit: PermitRecipe | None
    optimizer: OptimizerRecipe | None
    recipe: Recipe | None = None
    """None for a well-known model."""
    steps: int | None = None
    """Optimizer steps of the recipe's run."""

    @property
    def profile(self) -> Profile:
        return self.described.profile

    @property
    def sizes(self) -> ModelSizes | None:
        """Sizes of a transformer, for other systems."""
        return self.described.sizes


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

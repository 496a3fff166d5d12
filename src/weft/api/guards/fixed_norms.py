"""Batch norms that took no statistics at `prepare`: where the plan counts on it, they must take none afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import nn

from weft.config.plan import Plan
from weft.config.recipe import Recipe
from weft.errors import PlanError, RecipeError
from weft.model.blueprint import BATCH_NORMS, Blueprint, takes_statistics
from weft.run.worker import facts_of_blueprint
from weft.techniques.check import check_plan


class FixedNorms:
    """The batch norms of a rank's `parts` that took no statistics of the batch when the plan was checked."""

    def __init__(self, parts: Iterable[nn.Module], blueprint: Blueprint, plan: Plan, recipe: Recipe) -> None:
        self._norms: Sequence[tuple[str, nn.Module]] = ()
        self._problem = ""
        every = [found for part in parts for found in part.named_modules() if isinstance(found[1], BATCH_NORMS)]
        if not every:
            return
        try:
            # Every other check has passed already.
            check_plan(plan, recipe, replace(facts_of_blueprint(blueprint, recipe), has_batch_norm=True))
        except PlanError as problem:
            self._norms = [(name, module) for name, module in every if not takes_statistics(module)]
            self._problem = str(problem)

    def check(self) -> None:
        """Refuse a step in which one of them takes statistics, under a plan that could not have that.

        Raises:
            RecipeError: it would.
        """
        for name, module in self._norms:
            if takes_statistics(module):
                raise RecipeError(
                    f"{name} ({type(module).__name__}) was in evaluation mode when session.prepare was given the model,"
                    f" and takes the statistics of the batch now. {self._problem}\nOr call eval() of it after each"
                    " model.train()."
                )

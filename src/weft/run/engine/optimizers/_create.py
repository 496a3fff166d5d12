"""Creates the optimizer of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from weft.comm.mesh import Mesh
from weft.config.recipe import OptimizerGroup, OptimizerRecipe
from weft.run.engine.optimizers._base import ShardOptimizer
from weft.techniques.core import Shard

if TYPE_CHECKING:
    from weft.run.engine.optimizers._tables import TableOptimizer


def create_optimizer(
    recipe: OptimizerRecipe,
    shards: Sequence[Shard],
    mesh: Mesh,
    groups: Sequence[OptimizerGroup],
    frozen_after: int | None = None,
) -> ShardOptimizer:
    """Build the recipe's optimizer over this rank's shards.  Call on every rank.

    LAMB and LARS leave biases and norms out of the layer-wise rates exactly when the recipe leaves them out of decay
    (`decay_one_dimensional = false`), which is how both are used in practice.

    Tables with sparse gradients get an optimizer of their own (`check_sparse_tables` says which recipes have one).
    `frozen_after` is the warm-up of 1-bit Adam, in steps; only an AdamW has one.

    Raises:
        PlanError: The shards are cut where this optimizer cannot work.
    """
    tables = [shard for shard in shards if shard.sparse]
    dense = _create_dense(recipe, [shard for shard in shards if not shard.sparse], mesh, groups, frozen_after)
    if not tables:
        return dense
    from weft.run.engine.optimizers._tables import JoinedOptimizers

    return JoinedOptimizers([dense, _create_for_tables(recipe, tables, groups)])


def _create_for_tables(
    recipe: OptimizerRecipe, tables: Sequence[Shard], groups: Sequence[OptimizerGroup]
) -> TableOptimizer:
    from weft.run.engine.optimizers._tables import TableOptimizer

    has_own = recipe.name in ("adamw", "lamb")
    return TableOptimizer(
        tables,
        groups,
        rule=recipe.sparse_rule or "sgd",
        betas=recipe.betas,
        epsilon=_or(recipe.epsilon if has_own else None, 1e-8),
    )


def _create_dense(
    recipe: OptimizerRecipe,
    shards: Sequence[Shard],
    mesh: Mesh,
    groups: Sequence[OptimizerGroup],
    frozen_after: int | None = None,
) -> ShardOptimizer:
    every = recipe.decay_one_dimensional
    match recipe.name:
        case "adamw":
            from weft.run.engine.optimizers.adamw import AdamW

            epsilon = _or(recipe.epsilon, 1e-8)
            return AdamW(shards, groups, betas=recipe.betas, epsilon=epsilon, frozen_after=frozen_after)
        case "sgd":
            from weft.run.engine.optimizers.sgd import SGD

            return SGD(shards, groups, momentum=recipe.momentum, nesterov=recipe.nesterov)
        case "adafactor":
            from weft.run.engine.optimizers.adafactor import Adafactor

            epsilon = _or(recipe.epsilon, 1e-30)
            return Adafactor(shards, groups, mesh, epsilon=epsilon, relative_step=recipe.relative_step)
        case "lamb":
            from weft.run.engine.optimizers.lamb import LAMB

            epsilon = _or(recipe.epsilon, 1e-6)
            return LAMB(shards, groups, mesh, betas=recipe.betas, epsilon=epsilon, adapt_one_dimensional=every)
        case "lars":
            from weft.run.engine.optimizers.lars import LARS

            return LARS(shards, groups, mesh, momentum=recipe.momentum, adapt_one_dimensional=every)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

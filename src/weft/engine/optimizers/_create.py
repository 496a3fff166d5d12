"""From a recipe to an optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from weft.comm import Mesh
from weft.engine.optimizers._adafactor import Adafactor
from weft.engine.optimizers._adamw import AdamW
from weft.engine.optimizers._base import ShardOptimizer
from weft.engine.optimizers._groups import OptimizerGroup
from weft.engine.optimizers._lamb import LAMB
from weft.engine.optimizers._lars import LARS
from weft.engine.optimizers._sgd import SGD
from weft.engine.optimizers._tables import JoinedOptimizers, TableOptimizer
from weft.parallel import Shard
from weft.recipe import OptimizerRecipe

_CLASSES: Mapping[str, type[ShardOptimizer]] = {
    "adamw": AdamW,
    "sgd": SGD,
    "adafactor": Adafactor,
    "lamb": LAMB,
    "lars": LARS,
}


def optimizer_class(recipe: OptimizerRecipe) -> type[ShardOptimizer]:
    """Return the class of the recipe's optimizer; its `cuts` says where data parallelism may cut shards."""
    return _CLASSES[recipe.name]


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
    return JoinedOptimizers([dense, _create_for_tables(recipe, tables, groups)]) if tables else dense


def _create_for_tables(
    recipe: OptimizerRecipe, tables: Sequence[Shard], groups: Sequence[OptimizerGroup]
) -> TableOptimizer:
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
            epsilon = _or(recipe.epsilon, 1e-8)
            return AdamW(shards, groups, betas=recipe.betas, epsilon=epsilon, frozen_after=frozen_after)
        case "sgd":
            return SGD(shards, groups, momentum=recipe.momentum, nesterov=recipe.nesterov)
        case "adafactor":
            epsilon = _or(recipe.epsilon, 1e-30)
            return Adafactor(shards, groups, mesh, epsilon=epsilon, relative_step=recipe.relative_step)
        case "lamb":
            epsilon = _or(recipe.epsilon, 1e-6)
            return LAMB(shards, groups, mesh, betas=recipe.betas, epsilon=epsilon, adapt_one_dimensional=every)
        case "lars":
            return LARS(shards, groups, mesh, momentum=recipe.momentum, adapt_one_dimensional=every)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value

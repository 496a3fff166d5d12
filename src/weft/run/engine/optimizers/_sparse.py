"""Updates of a few rows of an embedding table, for `nn.Embedding(sparse=True)`.

The table itself is a plain local tensor; whoever owns the rows (data ranks exchange them) calls `sparse_step` with the
merged rows.  The semantics are those of torch's optimizers on sparse gradients: rows that a step does not name keep
their values and their states, so an update costs what its rows cost.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from weft.config.recipe import OptimizerRecipe, parameter_settings
from weft.errors import RecipeError
from weft.techniques.core import SparseRows

SparseRule = Literal["sgd", "adagrad", "adam"]


@dataclass(slots=True, kw_only=True)
class SparseState:
    """States of one table, dense: `square_sum` of Adagrad; moments and step count of Adam."""

    square_sum: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    step: int = 0


@torch.no_grad()
def sparse_step(
    rule: SparseRule,
    table: Tensor,
    rows: SparseRows,
    state: SparseState,
    *,
    learning_rate: float,
    gradient_scale: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
) -> None:
    """Update the named rows of `table` (rows, width) and of its states in place.

    `sgd`, `adagrad` and `adam` equal `torch.optim.SGD` (without momentum), `Adagrad` and `SparseAdam`.  Adam counts
    steps by table, also when `rows` is empty, so that ranks that own different rows of it agree.
    """
    gradient = rows.values.to(table.dtype) * gradient_scale
    if rule == "adagrad":
        assert state.square_sum is not None
        # Rows are merged: each index occurs once, so reading states by index and writing them back loses nothing.
        state.square_sum.index_add_(0, rows.indices, gradient.square())
        gradient = gradient / state.square_sum[rows.indices].sqrt_().add_(epsilon)
    elif rule == "adam":
        assert state.exp_avg is not None
        assert state.exp_avg_sq is not None
        state.step += 1
        exp_avg = state.exp_avg[rows.indices].lerp_(gradient, 1.0 - betas[0])
        exp_avg_sq = state.exp_avg_sq[rows.indices].lerp_(gradient.square(), 1.0 - betas[1])
        state.exp_avg[rows.indices] = exp_avg
        state.exp_avg_sq[rows.indices] = exp_avg_sq
        corrections = math.sqrt(1.0 - betas[1] ** state.step) / (1.0 - betas[0] ** state.step)
        gradient = exp_avg.mul_(corrections) / exp_avg_sq.sqrt_().add_(epsilon)
    table.index_add_(0, rows.indices, gradient, alpha=-learning_rate)


def check_sparse_tables(recipe: OptimizerRecipe, tables: Mapping[str, Sequence[int]]) -> None:
    """Check the recipe against the tables with sparse gradients of the whole model (name → shape).

    Raises:
        RecipeError: as `check_sparse_support`, or `sparse_rule` is set and there is no such table.
    """
    for name, shape in tables.items():
        check_sparse_support(recipe, name, parameter_settings(recipe, name, shape).weight_decay)
    if recipe.sparse_rule is not None and not tables:
        raise RecipeError(
            f'optimizer.sparse_rule = "{recipe.sparse_rule}" would do nothing: no trained nn.Embedding of the model has'
            " sparse=True. Remove it, or build an embedding with sparse=True."
        )


def check_sparse_support(recipe: OptimizerRecipe, name: str, weight_decay: float) -> None:
    """Check that the recipe's optimizer, or its `sparse_rule`, can update parameter `name` from sparse gradients.

    Raises:
        RecipeError: It cannot, as in torch: momentum, moments and decay move rows that no sample named.
    """
    if weight_decay:
        reason = f"weight_decay = {weight_decay} also moves rows that no sample used"
    elif recipe.sparse_rule is not None or (recipe.name == "sgd" and not recipe.momentum):
        return
    elif recipe.name == "sgd":
        reason = f"momentum = {recipe.momentum} also moves rows that no sample used"
    else:
        reason = f"{recipe.name} also moves rows that no sample used, or needs norms of the whole table"
    raise RecipeError(
        f"{name} has sparse gradients (nn.Embedding(sparse=True)), and {reason}. Build the embedding with "
        'sparse=False, or set optimizer.sparse_rule = "adam", "adagrad" or "sgd" for such tables and a group for this '
        "one with weight_decay = 0"
    )

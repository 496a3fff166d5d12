"""That all ranks mean the same run, asked before their collectives could go astray."""

from __future__ import annotations

import torch
import torch.distributed as dist

from weft.errors import LaunchError
from weft.plan import Plan
from weft.recipe import Recipe


def check_same_on_all_ranks(recipe: Recipe, plan: Plan) -> None:
    """Compare recipe and plan over the default group.  Call on every rank; nothing is asked of a single one.

    Raises:
        LaunchError: on every rank, when they differ anywhere.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    mine = [int(recipe.digest, 16), int(plan.digest, 16)]
    low, high = torch.tensor(mine), torch.tensor(mine)
    dist.all_reduce(low, dist.ReduceOp.MIN)
    dist.all_reduce(high, dist.ReduceOp.MAX)
    differing = [name for name, a, b in zip(("recipe", "plan"), low.tolist(), high.tolist(), strict=True) if a != b]
    if differing:
        raise LaunchError(
            f"the ranks were given different {' and '.join(differing)}s (this one has recipe {recipe.digest}, plan"
            f" {plan.digest}). Give all hosts the same files; where `auto` sees different machines, write one plan with"
            " `weft plan --output plan.toml` and give that."
        )

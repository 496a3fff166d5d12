"""A recipe's model and optimizer as plain PyTorch has them, whole on one process."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.config.plan import MicrobatchPlan, Plan
from weft.config.recipe import Recipe, group_parameters, learning_rate
from weft.model.blueprint import Blueprint
from weft.run.engine.proof._plain_optimizers import plain_optimizer
from weft.techniques.core import ModelLayout, ParameterLayout, materialise
from weft.techniques.zero.contract import reduction_rounds


def whole_module(blueprint: Blueprint, seed: int, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the whole model on one process, with the initial weights that every plan begins with."""
    module = copy.deepcopy(blueprint.module)
    layout = ModelLayout()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        layout.entries[name] = ParameterLayout(name=name, shape=tensor.shape)
    materialise(module, blueprint, layout, seed, device, dtype)
    return module


def optimizer_of(recipe: Recipe, trained: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over whole parameters, as torch or its paper has it."""
    settings = recipe.optimizer
    groups = [
        {
            "params": [trained[name] for name in group.names],
            "weight_decay": group.settings.weight_decay,
            "lr_scale": group.settings.learning_rate_scale,
        }
        for group in group_parameters(settings, {name: tensor.shape for name, tensor in trained.items()})
    ]
    return plain_optimizer(settings, groups)


def set_rates(recipe: Recipe, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Set the learning rates of a step."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(recipe, step) * group["lr_scale"]


def few_microbatches(plan: Plan) -> MicrobatchPlan:
    """Return as few and small microbatches as show what the plan's own do, on the plan's own ranks."""
    shares, stages = plan.microbatch.shares(plan.mesh.data), plan.mesh.pipeline
    fewest = min(shares)
    # A pipeline needs a warm-up, a steady phase and a cool-down; one that never fills must not fill here either.
    enough = 2 if stages == 1 else 2 * stages + 1 if fewest >= stages else stages - 1
    if len(set(shares)) > 1:  # then ranks reduce as often as the one with the fewest, as what was built knows already
        enough = max(enough, reduction_rounds(plan))
    kept = tuple(min(fewest, enough) + min(share - fewest, 2) for share in shares)
    size = min(plan.microbatch.size, 4 if max(kept) == 1 else 2)
    if plan.mesh.tensor > 1:
        from weft.techniques.tensor.mesh_2d.shape import grid_of_plan  # loaded where tensor ranks may form a grid

        grid = grid_of_plan(plan)
        size = size if grid is None else grid.sample_parts
    return MicrobatchPlan.of(size, kept)

"""Weft in one process against the loop that one writes without it: module, `torch.optim.AdamW`, `clip_grad_norm_`.

The matrix compares plans with one process; this compares that one process with plain torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import cells
import pytest
import torch
from cells import STEPS
from parity_run import run_rank, with_precision
from pool import RankPool
from torch import Tensor

from weft.config.recipe import ModelRecipe, Recipe, learning_rate
from weft.model.build import build_model
from weft.verify.numerics import TrialData, assemble, compare, one_process

TOLERANCE = 1e-12


def plain_loop(recipe: Recipe, initial: Mapping[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of every step and the final parameters; what decays is what Weft's defaults say, matrices only."""
    blueprint = build_model(recipe)
    module = blueprint.module.to_empty(device="cpu") if blueprint.initialise is not None else blueprint.module
    module = module.double().train()
    missing = module.load_state_dict(dict(initial), strict=False).missing_keys
    assert missing in ([], ["head.weight"]), missing
    if missing:
        module.head.weight = module.embedding.weight  # `to_empty` unties, without a word
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    settings = recipe.optimizer
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained if p.ndim >= 2], "weight_decay": settings.weight_decay},
            {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )
    plan = one_process(cells.plan())
    data = TrialData(blueprint, plan, data_index=0, seed=recipe.run.seed)
    losses: list[float] = []
    for step in range(STEPS):
        (batch,) = data.microbatches(step)
        inputs = {keyword: as_double(batch[name]) for keyword, name in blueprint.inputs.items()}
        total, count = blueprint.loss(module(**inputs), batch)
        optimizer.zero_grad()
        (total / count).backward()
        torch.nn.utils.clip_grad_norm_(trained, settings.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(recipe, step)
        optimizer.step()
        losses.append(float(total.detach() / count))
    return losses, {f"model/{name}": parameter.detach() for name, parameter in module.named_parameters()}


def as_double(values: Tensor) -> Tensor:
    return values.double() if values.is_floating_point() else values


MODELS: Mapping[str, ModelRecipe] = {
    "decoder": cells.decoder(),
    "own": ModelRecipe(factory="parity_models:build_own", arguments={"dropout": 0.0}),  # plain torch has its own masks
}


@pytest.mark.parametrize("model", MODELS)
def test_one_process_equals_a_plain_loop(ranks: RankPool, model: str):
    recipe = cells.recipe_of(MODELS[model], "fp64")
    plan = with_precision(one_process(cells.plan()), "fp64")
    initial = assemble([trial.state for trial in ranks.run(1, run_rank, recipe, plan, 0)])
    (trial,) = ranks.run(1, run_rank, recipe, plan, STEPS)
    state = assemble([trial.state])
    losses, weights = plain_loop(recipe, {name.partition("/")[2]: tensor for name, tensor in initial.items()})
    assert trial.losses == pytest.approx(losses, rel=TOLERANCE)
    trained = {name: tensor for name, tensor in state.items() if name in weights}
    assert trained.keys() == weights.keys()
    worst = compare(weights, trained)[0]
    assert worst.relative <= TOLERANCE, worst
    if model == "own":
        for name in ("model/never.weight", "model/never.bias", "model/blocks.1.up.weight"):
            assert torch.equal(state[name], initial[name]), f"{name} had no gradient and was changed"
        assert not torch.equal(state["model/stem.rare.weight"], initial["model/stem.rare.weight"])

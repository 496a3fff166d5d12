"""What is offloaded of models with parameters that are shared, frozen, sparse, or not used in every step: same bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_kit import Seen, Training, plan_of, recipe_of
from engine_models import branches_blueprint, branches_sample, tables_blueprint, tables_sample
from torch import Tensor

from weft.config.plan import MemoryPlan, Plan
from weft.config.recipe import OptimizerRecipe
from weft.model.blueprint import Blueprint
from weft.techniques.core import CheckpointShard

STEPS = 4
ADAMW = OptimizerRecipe(learning_rate=1e-2, weight_decay=0.1, max_grad_norm=0.5, average_decay=0.9)
MODELS = ("branches", "tied", "sparse", "mixed")
PLANS: dict[str, Plan] = {
    "parameters": plan_of(shard=2, zero=3, micro=1),
    "parameters, reduced once": plan_of(shard=2, zero=3, micro=2, every="step"),
    "optimizer": plan_of(replicate=2, zero=1, micro=1),
}


def mixed_blueprint() -> Blueprint:
    """Half of a layer frozen, and a buffer of another dtype."""
    made = branches_blueprint()
    made.module.stem.bias.requires_grad_(False)  # type: ignore[union-attr]
    made.module.register_buffer("seen", torch.zeros(2))
    return made


def blueprint_of(model: str) -> Blueprint:
    if model == "branches":
        return branches_blueprint()
    return mixed_blueprint() if model == "mixed" else tables_blueprint(sparse=model == "sparse", tied=model == "tied")


def sample_of(model: str, index: int) -> dict[str, Tensor]:
    return branches_sample(index) if model in ("branches", "mixed") else tables_sample(index)


def looked_at(training: Training, model: str) -> float:
    """A forward without gradients between two steps, as an evaluation has it."""
    samples = [sample_of(model, index) for index in range(3)]
    fields = training.state.model.parts[0].module
    with torch.no_grad():
        names = ("features", "asks") if model in ("branches", "mixed") else ("tokens", "tags")
        return float(fields(*(torch.cat([sample[name] for sample in samples]) for name in names)).sum())


def trained(model: str, plan: Plan) -> tuple[Seen, list[float]]:
    sparse = replace(ADAMW, weight_decay=0.0, sparse_rule="adam", average_decay=None)
    made = recipe_of("fp64", sparse if model == "sparse" else ADAMW, steps=STEPS)
    training = Training(made, plan, lambda: blueprint_of(model), lambda index: sample_of(model, index))
    looks = list[float]()
    for step in range(STEPS):
        training.step(step)
        looks.append(looked_at(training, model))
    return training.finished(), looks


def both(model: str, plan: Plan, what: Any) -> tuple[tuple[Seen, list[float]], tuple[Seen, list[float]]]:
    away = replace(plan, memory=MemoryPlan(offload=what, offload_to="disk"))
    return trained(model, plan), trained(model, away)


def different(one: list[CheckpointShard], other: list[CheckpointShard]) -> list[str]:
    pairs = zip(one, other, strict=True)
    return [a.name for a, b in pairs if a.name != b.name or not torch.equal(a.tensor, b.tensor)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("model", MODELS)
def test_odd_models_are_the_same_bits(ranks: Any, model: str, name: str) -> None:
    what = name.split(",")[0]
    for (plain, looks), (away, other_looks) in ranks.run(2, both, model, PLANS[name], what):
        assert away.losses == plain.losses
        assert away.norms == plain.norms
        assert other_looks == looks
        assert different(plain.state, away.state) == []

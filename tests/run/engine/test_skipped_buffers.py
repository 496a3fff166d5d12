"""A step that is skipped leaves running statistics as they were: one NaN must not spoil every evaluation to come."""

from __future__ import annotations

from typing import Any

import torch

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.config.recipe import BatchRecipe, ConvNetShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.model.build import build_model
from weft.run.engine import create_training
from weft.verify.numerics import TrialData


def run_bad_image() -> list[bool]:
    recipe = Recipe(
        model=ModelRecipe(reference="convnet", shape=ConvNetShape(num_layers=1, channels=4)),
        batch=BatchRecipe(global_batch_size=4),
        run=RunRecipe(steps=3),
        permit=PermitRecipe(precision=("fp64",)),
    )
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=2), compute=ComputePlan(precision="fp64"))
    mesh = Mesh(plan.mesh, torch.device("cpu"))
    blueprint = build_model(recipe)
    training = create_training(recipe, plan, blueprint, mesh, Recorder())
    data = TrialData(blueprint, plan, data_index=mesh.index("data"), seed=1)
    training.stepper(data.microbatches(0), step=0, learning_rate=0.1)
    before = [buffer.clone() for buffer in training.model.module.buffers()]
    bad = data.microbatches(1)
    if mesh.rank == 1:
        bad = [{**batch, "images": batch["images"] * torch.nan} for batch in bad]
    skipped = training.stepper(bad, step=1, learning_rate=0.1).skipped
    kept = all(torch.equal(a, b) for a, b in zip(before, training.model.module.buffers(), strict=True))
    moved = training.stepper(data.microbatches(2), step=2, learning_rate=0.1)
    changed = any(not torch.equal(a, b) for a, b in zip(before, training.model.module.buffers(), strict=True))
    return [skipped, kept, not moved.skipped, changed]


def test_running_statistics_survive_a_skipped_step(ranks: Any) -> None:
    assert ranks.run(2, run_bad_image) == [[True] * 4] * 2

"""Training whose moving average of the weights is evaluated after every step: weights change places twice a step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import breakages
import torch

from weft.comm.mesh import Mesh
from weft.comm.telemetry import Recorder
from weft.config.plan import Plan
from weft.config.recipe import Recipe, learning_rate
from weft.model.build import build_model
from weft.run.engine import create_training
from weft.verify.numerics import TrialData

Curve = list[tuple[float, float]]
"""Per step: the global mean loss, and this rank's part of the average's validation loss sum."""


def run_averaged(recipe: Recipe, plan: Plan, steps: int, breakage: str | None = None) -> Curve:
    """One rank of the training; plans without tensor or pipeline axes only."""
    with breakages.entered(breakage) if breakage is not None else nullcontext():
        mesh = Mesh(plan.mesh, torch.device("cpu"))
        blueprint = build_model(recipe)
        training = create_training(recipe, plan, blueprint, mesh, Recorder())
        data = TrialData(blueprint, plan, data_index=mesh.index("data"), seed=recipe.run.seed)
        assert training.average is not None
        curve: Curve = []
        for step in range(steps):
            rate = learning_rate(recipe, step)
            loss = training.stepper(data.microbatches(step), step=step, learning_rate=rate).loss
            with training.average.swapped(training.model.stores.gather_weights):
                totals = training.model.runner.evaluate(data.microbatches(0), step=0, seed=recipe.run.seed)
            curve.append((loss, float(totals.sum)))
        return curve


def validation_curve(ranks: Sequence[Curve]) -> list[float]:
    """Losses, then validation sums over all ranks."""
    losses = [loss for loss, _ in ranks[0]]
    sums = [sum(curve[step][1] for curve in ranks) for step in range(len(losses))]
    return losses + sums

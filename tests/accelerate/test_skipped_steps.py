"""A step that overflows in fp16 is left out, and so is the schedule's; the Accelerator says so."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from weft.accelerate import Accelerator, GradScalerKwargs
from weft.config.plan import ComputePlan, MeshPlan, Plan
from weft.errors import PlanError, RecipeError


def overflowing(how: str) -> list[tuple[bool, float]]:
    """Four steps, of which the first two overflow."""
    plan = Plan(mesh=MeshPlan(replicate=2), compute=ComputePlan(precision="fp16"))
    accelerator = Accelerator(plan=plan) if how == "plan" else Accelerator(mixed_precision="fp16")
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(32, 8), torch.randint(4, (32,)))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8), schedule)
    found: list[tuple[bool, float]] = []
    for number, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x).float(), y) * (1e6 if number < 2 else 1)
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        found.append((accelerator.optimizer_step_was_skipped, optimizer.param_groups[0]["lr"]))
    accelerator.end_training()
    return found


def beside_a_plan() -> None:
    Accelerator(mixed_precision="fp16", plan=Plan(mesh=MeshPlan(replicate=2)))


def test_losses_that_nobody_would_scale_are_refused(ranks: RankPool) -> None:
    with pytest.raises(PlanError, match=r"nobody would scale the losses.*compute\.precision = "):
        ranks.run(2, beside_a_plan)


def test_a_scaler_of_the_scripts_own_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RecipeError, match=r"GradScalerKwargs\(init_scale=…\) is not had"):
        ranks.run(1, with_a_scaler)


def with_a_scaler() -> None:
    Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=8.0)])


@pytest.mark.parametrize("how", ["plan", "mixed precision"])
def test_steps_that_overflow_are_left_out_and_told(ranks: RankPool, how: str) -> None:
    for found in ranks.run(2, overflowing, how):
        assert found == [(True, 1e-3), (True, 1e-3), (False, 5e-4), (False, 2.5e-4)]

"""A step that overflows in fp16 is left out, and so is the schedule's; the Accelerator says so."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pool import RankPool
from weft.accelerate import Accelerator
from weft.plan import ComputePlan, MeshPlan, Plan


def overflowing(ranks: int) -> list[tuple[bool, float]]:
    """Four steps, of which the first two overflow."""
    plan = Plan(mesh=MeshPlan(replicate=ranks), compute=ComputePlan(precision="fp16"))
    accelerator = Accelerator(plan=plan)
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


def test_steps_that_overflow_are_left_out_and_told(ranks: RankPool) -> None:
    for found in ranks.run(2, overflowing, 2):
        assert found == [(True, 1e-3), (True, 1e-3), (False, 5e-4), (False, 2.5e-4)]

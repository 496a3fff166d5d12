"""Losses with second derivatives (a penalty on gradients, forces of an energy) are plain PyTorch's under any plan, or
refused."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import (
    ComputePlan,
    DataParallelPlan,
    MeshPlan,
    MicrobatchPlan,
    PipelineParallelPlan,
    Plan,
)
from weft.errors import PlanError
from weft.model.families import CutTable

BATCH, WIDTH, TOKENS = 8, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Energy(nn.Module):
    """`where` the gradient is taken: in the loss, or in the forward."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.entry, self.head = where, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        x = x.requires_grad_()
        h = self.entry(x)
        for block in self.blocks:
            h = block(h)
        energy = self.head(h).sum((1, 2))
        if self.where == "loss":
            return energy, x
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def penalised(outputs: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    energy, x = outputs
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return (energy - batch[1]).square().sum() + (slope.square().sum((1, 2)) - 1).square().sum(), len(energy)


def forces(outputs: Any, batch: list[Tensor]) -> tuple[Tensor, int]:
    energy, force = outputs
    return (energy - batch[1]).square().sum() + (force - 0.5).square().sum(), len(energy)


CUT = CutTable(entry="entry", blocks=("blocks.0", "blocks.1"), tail=("head",))
LOSSES = {"loss": penalised, "forward": forces}


def rows() -> TensorDataset:
    x = torch.randn(24, TOKENS, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x.sin().sum((1, 2)))


def build(where: str) -> nn.Module:
    torch.manual_seed(3)
    return Energy(where).double()


def plain(where: str) -> list[float]:
    model = build(where)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for batch in DataLoader(rows(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = LOSSES[where](model(batch[0]), batch)[0] / BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(plan: Plan, folder: str, where: str) -> list[float]:
    model = build(where)
    split = {"blocks.*.up": "column", "blocks.*.down": "row"} if plan.mesh.tensor > 1 else ()
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        loader = DataLoader(rows(), batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        cut = None if plan.mesh.pipeline > 1 else CUT
        state = session.prepare(model, optimizer, loader, loss=LOSSES[where], split=split, cut=cut)
        losses = [state.step(batch).loss for batch in state.batches(3)]
    gc.collect()  # graphs of a gradient and its gradient hold one another, and through hooks the groups
    return losses


def plan_for(size: int = BATCH, zero: int = 0, **more: Any) -> Plan:
    mesh = {name: more.pop(name) for name in ("replicate", "shard", "tensor", "pipeline") if name in more}
    data = mesh.get("replicate", 1) * mesh.get("shard", 1)
    return Plan(
        **{
            "mesh": MeshPlan(**mesh),
            "data_parallel": DataParallelPlan(zero=zero),  # type: ignore[arg-type]
            "microbatch": MicrobatchPlan(size=size, per_step=BATCH // size // data),
            "compute": ComputePlan(precision="fp64"),
        }
        | more
    )


PLANS: dict[str, Plan] = {
    "alone": plan_for(),
    "accumulated": plan_for(2),
    "data": plan_for(2, replicate=2),
    "zero 1": plan_for(4, 1, shard=2),
    "zero 3": plan_for(2, 3, shard=2),
    "tensor": plan_for(4, tensor=2),
}


@pytest.mark.parametrize("where", LOSSES)
@pytest.mark.parametrize("name", PLANS)
def test_second_derivatives_are_those_of_plain_torch(ranks: RankPool, tmp_path: Path, name: str, where: str) -> None:
    plan = PLANS[name]
    for losses in ranks.run(plan.mesh.world_size, trained, plan, str(tmp_path), where):
        assert losses == pytest.approx(plain(where), rel=1e-10)


WORDS = {"loss": r"takes a gradient by a tensor .*mesh.pipeline = 1", "forward": "Take the gradient outside"}


@pytest.mark.parametrize("where", LOSSES)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_zero_bubble"])
def test_what_stages_cannot_differentiate_twice_is_refused(
    ranks: RankPool, tmp_path: Path, schedule: Any, where: str
) -> None:
    plan = plan_for(4, pipeline=2, pipeline_parallel=PipelineParallelPlan(schedule=schedule))
    with pytest.raises(PlanError, match=WORDS[where]):
        ranks.run(2, trained, plan, str(tmp_path), where)

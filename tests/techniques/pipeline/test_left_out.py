"""Blocks that a forward leaves out in some steps (layer drop, stochastic depth) under a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError

BATCH, WIDTH = 8, 6


class Dropping(nn.Module):
    """Leaves the blocks of `left_out` out from the third step on.  `adds`: by itself, and not the blocks."""

    def __init__(self, left_out: tuple[int, ...], adds: bool) -> None:
        super().__init__()
        self.left_out, self.adds, self.step = left_out, adds, 0
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for index, block in enumerate(self.blocks):
            if self.step < 2 or index not in self.left_out:
                x = x + block(x) if self.adds else block(x)
        return self.head(x)


def squares(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def plan_for(pipeline: int) -> Plan:
    return Plan(
        mesh=MeshPlan(pipeline=pipeline),
        microbatch=MicrobatchPlan(size=4, per_step=2),
        compute=ComputePlan(precision="fp64"),
    )


def model_and_batches(left_out: tuple[int, ...], adds: bool) -> tuple[Dropping, DataLoader[Any]]:
    torch.manual_seed(3)
    x = torch.randn(40, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Dropping(left_out, adds).double(), DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=BATCH)


def plain(left_out: tuple[int, ...]) -> list[float]:
    model, batches = model_and_batches(left_out, False)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), list[float]()
    for model.step, batch in enumerate(batches):
        optimizer.zero_grad()
        loss = squares(model(batch[0]), batch)[0] / BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(folder: str, pipeline: int, left_out: tuple[int, ...], adds: bool) -> list[float]:
    model, loader = model_and_batches(left_out, adds)
    losses = list[float]()
    with weft.session(plan=plan_for(pipeline), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        state = session.prepare(model, optimizer, loader, loss=squares)
        for step, batch in enumerate(state.batches(5)):
            for part in (model, state.model):
                part.step = step  # type: ignore[assignment]
            losses.append(state.step(batch).loss)
    return losses


@pytest.mark.parametrize("left_out", [(0,), (2,), (3,)])
def test_a_block_within_a_stage_may_be_left_out(ranks: RankPool, tmp_path: Path, left_out: tuple[int, ...]) -> None:
    for losses in ranks.run(2, trained, str(tmp_path), 2, left_out, False):
        assert losses == pytest.approx(plain(left_out), rel=1e-10)


@pytest.mark.parametrize(("left_out", "adds"), [(1, False), (0, True)], ids=["last of a stage", "added outside"])
def test_one_whose_result_crosses_may_not(ranks: RankPool, tmp_path: Path, left_out: int, adds: bool) -> None:
    with pytest.raises(PlanError, match=r"blocks\.\d did not run in this forward.* use plan\.mesh\.pipeline = 1"):
        ranks.run(2, trained, str(tmp_path), 2, (left_out,), adds)

"""Under ZeRO-3, a block that only one rank's samples run: refused in a sentence, and right under ZeRO-2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from pool import RankPool
from weft.errors import PlanError
from weft.models import CutTable
from weft.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan

BATCH, WIDTH = 8, 6


class Routed(nn.Module):
    """Rows that are positive go through the second block."""

    def __init__(self) -> None:
        super().__init__()
        self.entry, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        positive = x[:, 0] > 0
        x = self.blocks[0](self.entry(x))
        if positive.any():
            x = x.index_put((positive,), self.blocks[1](x[positive]))
        return self.head(self.blocks[2](x))


def squares(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def model_and_rows() -> tuple[nn.Module, Tensor]:
    """In the first batch all rows are positive, in the second those of one rank."""
    torch.manual_seed(3)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64).abs()
    x[12:, 0] *= -1
    return Routed().double(), x


def plain() -> list[float]:
    model, x = model_and_rows()
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-2), []
    for batch in DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=BATCH):
        optimizer.zero_grad()
        loss = squares(model(batch[0]), batch)[0] / BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(folder: str, zero: int, world: int) -> list[float]:
    model, x = model_and_rows()
    plan = Plan(
        mesh=MeshPlan(shard=world),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=BATCH // world, per_step=1),
        compute=ComputePlan(precision="fp64"),
    )
    cut = CutTable(entry="entry", blocks=("blocks.0", "blocks.1", "blocks.2"), tail=("head",))
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(x, x[:, :2].sin()), batch_size=BATCH)
        state = session.prepare(model, optimizer, loader, loss=squares, cut=cut)
        return [state.step(batch).loss for batch in state.batches(2)]


def test_a_block_that_one_rank_runs_is_refused_under_zero_3(ranks: RankPool, tmp_path: Path) -> None:
    """Over shared memory, whose calls say what they are of."""
    with pytest.raises(PlanError, match=r"did not run the same blocks .*came to .*zero = 2"):
        ranks.run(2, trained, str(tmp_path), 3, 2, backend="cpu:weft")


@pytest.mark.parametrize("zero", [1, 2])
def test_and_is_right_where_weights_are_whole(ranks: RankPool, tmp_path: Path, zero: int) -> None:
    for losses in ranks.run(2, trained, str(tmp_path), zero, 2):
        assert losses == pytest.approx(plain(), rel=1e-10)

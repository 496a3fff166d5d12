"""A module that is called several times in a forward draws each time anew, and the same under every plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError
from weft.model.families import CutTable

BATCH, WIDTH, P = 8, 12, 0.5


class ByFunction(nn.Module):
    """Drops by a function, which is keyed in another way than a module."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)


class Block(nn.Module):
    """Two layers that share one dropout, as many blocks do."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.second(self.dropout(self.first(x).tanh())))


class Views(nn.Module):
    """An encoder that is called twice (SimCSE); `how` its blocks are run: as they are, or within a checkpoint."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.entry = how, nn.Identity()
        self.blocks = nn.ModuleList(Block(ByFunction() if how == "function" else nn.Dropout(P)) for _ in range(2))

    def encode(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            if self.how in ("checkpoint", "reentrant"):
                x = checkpoint(block, x, use_reentrant=self.how == "reentrant")  # type: ignore[assignment]
            elif self.how == "nested":
                x = checkpoint(within_another, block, x, use_reentrant=False)  # type: ignore[assignment]
            else:
                x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_(self.how == "reentrant")  # which computes no gradients else
        return torch.stack([self.encode(x), self.encode(x)], 1)


def within_another(block: nn.Module, x: Tensor) -> Any:
    return checkpoint(block, x, use_reentrant=False) * 1.0


def apart(views: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    """How far the views are from one another, and from what they should be."""
    first, second = views.unbind(1)
    return (first - second).square().sum() + (first - batch[1]).square().sum(), len(views)


def rows(number: int = 24) -> TensorDataset:
    x = torch.randn(number, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x.sin())


def plan_for(world: int, size: int = BATCH, zero: int = 0, **more: Any) -> Plan:
    axes: dict[str, int] = {"shard": world} if zero == 3 else {"replicate": world}
    return Plan(
        **{
            "mesh": MeshPlan(**axes),
            "data_parallel": DataParallelPlan(zero=zero),  # type: ignore[arg-type]
            "microbatch": MicrobatchPlan(size=size, per_step=BATCH // size // world),
            "compute": ComputePlan(precision="fp64"),
        }
        | more
    )


def trained(plan: Plan, folder: str, how: str) -> list[float]:
    """Losses and weights after three steps of the two views."""
    torch.manual_seed(3)
    model = Views(how).double()
    blocks = CutTable(entry="entry", blocks=("blocks.0", "blocks.1"))
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        loader = DataLoader(rows(), batch_size=BATCH)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        cut = blocks if plan.memory.recomputes else None
        state = session.prepare(model, optimizer, loader, loss=apart, cut=cut)
        return [state.step(batch).loss for batch in state.batches(3)]


class Distance(nn.Module):
    """Two views by dropout of what comes in; the second is drawn by the very same module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(())), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.dropout(x * self.weight), self.dropout(x * self.weight)], 1)


def difference(views: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (views[:, 0] - views[:, 1]).square().sum(), len(views)


def distance(folder: str) -> list[float]:
    torch.manual_seed(3)
    model = Distance().double()
    ones = TensorDataset(torch.ones(24, 400, dtype=torch.float64))
    with weft.session(plan=plan_for(1), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        state = session.prepare(model, optimizer, DataLoader(ones, batch_size=BATCH), loss=difference)
        return [state.step(batch).loss for batch in state.batches(3)]


def test_two_views_are_as_far_apart_as_plain_torchs(ranks: RankPool, tmp_path: Path) -> None:
    torch.manual_seed(3)
    model, x = Distance().double(), torch.ones(BATCH, 400, dtype=torch.float64)
    plain = torch.stack([difference(model(x), [])[0].detach() / BATCH for _ in range(50)])
    for loss in ranks.run(1, distance, str(tmp_path))[0]:
        assert abs(loss - float(plain.mean())) < 5 * float(plain.std())


@pytest.mark.parametrize("how", ["plain", "function"])
@pytest.mark.parametrize(("world", "size", "zero"), [(1, 2, 0), (2, 4, 0), (2, 2, 3)])
def test_every_plan_draws_the_same_views(
    ranks: RankPool, tmp_path: Path, how: str, world: int, size: int, zero: int
) -> None:
    alone = ranks.run(1, trained, plan_for(1), str(tmp_path / "1"), how)[0]
    for losses in ranks.run(world, trained, plan_for(world, size, zero), str(tmp_path / "2"), how):
        assert losses == pytest.approx(alone, rel=1e-10)


@pytest.mark.parametrize("how", ["checkpoint", "reentrant", "nested", "full", "selective"])
def test_what_runs_again_draws_what_it_drew_at_first(ranks: RankPool, tmp_path: Path, how: str) -> None:
    alone = ranks.run(1, trained, plan_for(1), str(tmp_path / "1"), "plain")[0]
    recompute = {"memory": MemoryPlan(recompute=how)} if how in ("full", "selective") else {}
    world = 1 if how == "reentrant" else 2
    plan = plan_for(world, 2, **recompute)
    for losses in ranks.run(world, trained, plan, str(tmp_path / "2"), "plain" if recompute else how):
        assert losses == pytest.approx(alone, rel=1e-10)


def test_a_gradient_that_comes_in_parts_is_not_sent_in_part(ranks: RankPool, tmp_path: Path) -> None:
    """Torch's older checkpoint has a backward of its own for each call, after each of which gradients look complete."""
    with pytest.raises(PlanError, match=r"gets its gradient in several parts .* use use_reentrant=False"):
        ranks.run(2, trained, plan_for(2, 4), str(tmp_path), "reentrant")


class Stack(nn.Module):
    """Blocks, and what they share: `what` says."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.entry, self.dropout = what, nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)
        block = Block(self.dropout)
        own = [Block(self.dropout if what == "one dropout" else nn.Dropout(0.5)) for _ in range(4)]
        self.blocks = nn.ModuleList([block] * 4 if what == "one block" else own)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = self.dropout(block(x)) if self.what == "between" else block(x)
        return x


def stacked(plan: Plan, folder: str, what: str) -> list[float]:
    torch.manual_seed(3)
    model = Stack(what).double()
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = session.prepare(model, optimizer, DataLoader(rows(), batch_size=BATCH), loss=squares)
        return [state.step(batch).loss for batch in state.batches(3)]


def squares(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


@pytest.mark.parametrize("what", ["one dropout", "between"])
def test_stages_draw_what_one_process_draws(ranks: RankPool, tmp_path: Path, what: str) -> None:
    alone = ranks.run(1, stacked, plan_for(1), str(tmp_path / "1"), what)[0]
    plan = plan_for(1, 2, mesh=MeshPlan(pipeline=2))
    for losses in ranks.run(2, stacked, plan, str(tmp_path / "2"), what):
        assert losses == pytest.approx(alone, rel=1e-10)

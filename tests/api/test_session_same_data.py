"""Ranks whose data differ are told so before they train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import weft
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError

PLAN = Plan(
    mesh=MeshPlan(replicate=2),
    microbatch=MicrobatchPlan(size=4, per_step=1),
    compute=ComputePlan(precision="fp64"),
)


def whole() -> TensorDataset:
    x = torch.randn(60, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :4].square())


class Augmented(Dataset[Any]):
    """Draws from torch's generator, which is seeded by sample, or from one of its own."""

    def __init__(self, *, own: bool) -> None:
        self.data = whole()
        self.rng = np.random.default_rng() if own else None

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        noise = float(torch.rand(())) if self.rng is None else float(self.rng.random() < 0.5)
        return x + noise, y


def data_of(kind: str) -> Any:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    order = np.random.default_rng(rank).permutation(60)
    if kind == "a subset":
        return Subset(whole(), order[:40].tolist())
    if kind == "a list":
        return [whole()[int(index)] for index in order[:40]]
    if kind == "a subset of a subset":
        return Subset(Subset(whole(), order[:50].tolist()), list(range(40)))
    if kind == "the same subset":
        return Subset(whole(), np.random.default_rng(3).permutation(60)[:40].tolist())
    return Augmented(own=kind == "a generator of its own")


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def prepared(kind: str, folder: str) -> bool:
    torch.manual_seed(5)
    model = nn.Linear(6, 4).double()
    with weft.session(plan=PLAN, permit=("fp64",), folder=folder, quiet=True) as session:
        before = torch.get_rng_state()
        loader = DataLoader(data_of(kind), batch_size=8, shuffle=True)
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        same = torch.equal(before, torch.get_rng_state())
        state.step(next(state.batches()))
        return same


@pytest.mark.parametrize("kind", ["a subset", "a list", "a subset of a subset"])
def test_a_split_that_differs_between_ranks_is_refused(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    with pytest.raises(
        DataError, match="of the loader's .* differs between the ranks|Subset1? differs between the ranks"
    ):
        ranks.run(2, prepared, kind, str(tmp_path))


@pytest.mark.parametrize("kind", ["the same subset", "augmented", "a generator of its own"])
def test_the_same_data_are_no_others_whatever_augmentation_draws(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    assert all(ranks.run(2, prepared, kind, str(tmp_path)))

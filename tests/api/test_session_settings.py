"""What a session is told of its plan beside `auto`: it is obeyed exactly, or refused with what to write."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import Plan
from weft.errors import PlanError

BATCH = 24


def losses(folder: str, given: dict[str, Any]) -> tuple[Any, list[float]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 2)).double()
    rows = torch.randn(48, 4, dtype=torch.float64)
    loader = DataLoader(TensorDataset(rows, rows[:, :2]), batch_size=BATCH, shuffle=True)

    def loss(outputs: torch.Tensor, batch: list[torch.Tensor]) -> tuple[torch.Tensor, int]:
        return (outputs - batch[1]).square().sum(), len(outputs)

    with weft.session(folder=folder, permit=("fp64",), quiet=True, **given) as session:
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss)
        return state.plan, [state.step(batch).loss for batch in state.batches(3)]


@pytest.mark.parametrize("seed", range(4))
def test_what_is_given_beside_auto_is_obeyed(ranks: RankPool, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    accumulate = draw.choice([1, 2, 3, 4, 6, 12])
    settings: dict[str, Any] = {"compute.threads_per_rank": 1, "data_parallel.zero": draw.choice([0, 1, 2, 3])}
    given = {"microbatches": accumulate, "settings": settings}
    (_, alone), *_ = ranks.run(1, losses, str(tmp_path / "alone"), {})
    for plan, found in ranks.run(2, losses, str(tmp_path / "both"), given):
        assert set(plan.microbatch.shares(plan.mesh.data)) == {accumulate}
        assert plan.microbatch.size == BATCH // 2 // accumulate
        assert (plan.data_parallel.zero, plan.compute.threads_per_rank) == (settings["data_parallel.zero"], 1)
        assert found == pytest.approx(alone, rel=1e-12)
    assert plan.origins["microbatch.size"] == "weft.session(microbatches=…)"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"microbatches": 5},
            r"microbatches=…\) = 5 on 1 data rank does not divide the global batch of 24. Use microbatches=4",
        ),
        ({"microbatches": 0}, r"= 0 is no number of microbatches"),
        ({"microbatches": True}, r"= True is no number of microbatches"),
        ({"settings": {"data_paralel.zero": 3}}, r"data_paralel is not a setting. Did you mean data_parallel"),
        ({"settings": {"data_parallel.zero": 9}}, r"settings=…\): data_parallel.zero = 9 is not one of 0, 1, 2, 3"),
        ({"settings": {"microbatch.per_step": 2}}, r"per_step follows from what auto chooses. Give microbatches="),
        ({"settings": {"mesh.tensor": 2}}, r"mesh.tensor splits the model.*a whole plan"),
        ({"settings": {"microbatch.size": 4}, "microbatches": 2}, r"say the same twice"),
        ({"plan": Plan(), "microbatches": 2}, r"plan=…, microbatches=2\) says twice how to split"),
    ],
)
def test_what_cannot_be_had_beside_auto_is_refused(
    ranks: RankPool, tmp_path: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        ranks.run(1, losses, str(tmp_path), given)


def test_settings_are_laid_over_a_plan(ranks: RankPool, tmp_path: Path) -> None:
    given = {"plan": Plan(), "settings": {"microbatch.size": 6, "microbatch.per_step": 4, "compute.precision": "fp64"}}
    ((plan, found),) = ranks.run(1, losses, str(tmp_path / "own"), given)
    assert (plan.microbatch.size, plan.microbatch.per_step) == (6, 4)
    ((_, alone),) = ranks.run(1, losses, str(tmp_path / "alone"), {})
    assert found == pytest.approx(alone, rel=1e-12)

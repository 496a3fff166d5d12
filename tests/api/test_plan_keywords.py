"""`weft.session(zero=3, tensor=2)` and `weft.Plan.fsdp()` train on the ranks at hand with the losses of one process."""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, Plan
from weft.errors import PlanError

BATCH = 24


class Blocks(nn.Module):
    """Small, with layers to split and blocks to cut between."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_fn(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


def trained(given: dict[str, Any], folder: str, has_loss: bool = True) -> tuple[list[float], Plan, str]:
    """Losses of three steps, the plan, and what the session says at its start."""
    torch.manual_seed(5)
    model = Blocks().double()
    features = torch.randn(3 * BATCH, 6, dtype=torch.float64)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(1)), batch_size=BATCH)
    optimizer, said = torch.optim.Adam(model.parameters(), lr=1e-2), io.StringIO()
    with contextlib.redirect_stdout(said), weft.session(folder=folder, record=False, prove="never", **given) as session:
        if has_loss:
            state = session.prepare(model, optimizer, loader, loss=loss_fn)
            return [state.step(batch).loss for batch in state.batches(3)], state.plan, said.getvalue()
        model, optimizer, loader = session.prepare(model, optimizer, loader)
        losses: list[float] = []
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            session.backward(loss)
            optimizer.step()
            losses.append(session.mean(loss))
        return losses, session.state(model).plan, said.getvalue()


def in_fp64(plan: Plan) -> dict[str, Any]:
    return {"plan": replace(plan, compute=ComputePlan(precision="fp64")), "permit": ("fp64",)}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "zero": ({"zero": 3, "precision": "fp64"}, "6 on each of 4 data ranks"),
    "zero and tensor": ({"zero": 3, "tensor": 2, "precision": "fp64"}, "12 on each of 2 data ranks"),
    "hybrid": ({"zero": 3, "replicate": 2, "precision": "fp64"}, "6 on each of 4 data ranks"),
    "pipeline": (
        {"pipeline": 2, "microbatches": 3, "precision": "fp64"},
        "12 on each of 2 data ranks, in 3 microbatches of 4",
    ),
    "ddp": (in_fp64(Plan.ddp(microbatches=2)), "6 on each of 4 data ranks, in 2 microbatches of 3"),
    "fsdp": (in_fp64(Plan.fsdp()), "6 on each of 4 data ranks"),
    "stage 2": (in_fp64(Plan.zero(2)), "6 on each of 4 data ranks"),
    "tensor": (in_fp64(Plan.tensor(4)), ""),
    "auto": ({"microbatches": 3, "precision": "fp64"}, "6 on each of 4 data ranks, in 3 microbatches of 2"),
}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses, plan, said = ranks.run(1, trained, in_fp64(Plan.ddp()), str(tmp_path_factory.mktemp("alone")))[0]
    assert (plan.mesh.world_size, plan.microbatch.size) == (1, BATCH)
    assert "batch     " not in said
    return losses


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_one_process_does(ranks: RankPool, tmp_path: Path, alone: list[float], name: str) -> None:
    given, share = CASES[name]
    found = ranks.run(4, trained, given, str(tmp_path))
    line = f"batch     {BATCH} samples in all per step: {share}; step.loss and step.count are those of all\n"
    for rank, (losses, plan, said) in enumerate(found):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert (plan.mesh.world_size, plan.compute.precision) == (4, "fp64")
        assert (line in said) == (rank == 0 and share != "")
        assert ("batch     " in said) == (line in said)


def test_a_loop_of_ones_own_takes_keywords_too(ranks: RankPool, tmp_path: Path, alone: list[float]) -> None:
    for losses, plan, said in ranks.run(2, trained, {"zero": 3, "precision": "fp64"}, str(tmp_path), has_loss=False):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert (plan.mesh.shard, plan.data_parallel.zero) == (2, 3)
        assert not said or "batch     24 samples in all per step: 12 on each of 2 data ranks\n" in said
    quiet = {"zero": 3, "precision": "fp64", "quiet": True}
    assert [said for *_, said in ranks.run(2, trained, quiet, str(tmp_path))] == ["", ""]


def test_microbatches_are_the_loops_own_where_it_steps_by_itself(ranks: RankPool, tmp_path: Path) -> None:
    given = {"zero": 1, "microbatches": 2, "precision": "fp64"}
    with pytest.raises(
        PlanError, match=r"microbatches=2\) says how often a step accumulates, and this loop does so itse"
    ):
        ranks.run(1, trained, given, str(tmp_path), has_loss=False)


def test_a_loop_that_accumulates_by_itself_says_what_it_makes_of_a_plans_microbatches(
    ranks: RankPool, tmp_path: Path, alone: list[float]
) -> None:
    given = in_fp64(Plan.ddp(microbatches=2))
    for rank, (losses, plan, said) in enumerate(ranks.run(2, trained, given, str(tmp_path), has_loss=False)):
        assert losses == pytest.approx(alone, rel=1e-12)
        assert plan.microbatch.per_step == 1
        assert ("one microbatch per step: the plan names more" in said) == (rank == 0)


def test_ranks_that_do_not_fit_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"makes 4 processes \(tensor 4\), but there are 2"):
        ranks.run(2, trained, {"tensor": 4, "precision": "fp64"}, str(tmp_path))
    with pytest.raises(PlanError, match=r"makes 1 process"):
        ranks.run(2, trained, {"zero": 3, "shard": 1, "replicate": 1, "precision": "fp64"}, str(tmp_path))

"""A session whose plan cuts over the tensor axis: whole logits for the user's loss, saves, fp16 scaling, equal
plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import LaunchError, PlanError


def plan_over(tensor: int, precision: str = "fp64") -> Plan:
    return Plan(
        mesh=MeshPlan(tensor=tensor),
        microbatch=MicrobatchPlan(size=2, per_step=2),
        compute=ComputePlan(precision=precision),  # type: ignore[arg-type]
    )


def own_split(tensor: int, folder: str) -> list[float]:
    """A model of one's own with a split table and AdamW; saved after two steps, and loaded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    loader = DataLoader(TensorDataset(x, x[:, :3]), batch_size=4)

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (outputs - batch[1]).square().sum(), len(outputs)

    with weft.session(plan=plan_over(tensor), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        state = session.prepare(model, optimizer, loader, loss=loss, split={"0": "column", "2": "row"})
        losses = [state.step(batch).loss for batch in state.batches(2)]
        state.save()
        losses.append(state.step(next(iter(state.batches(1)))).loss)
        assert state.load() == 2
        return [*losses, state.step(next(iter(state.batches(1)))).loss]


def test_a_split_of_ones_own_trains_saves_and_loads(ranks, tmp_path) -> None:
    alone = ranks.run(1, own_split, 1, str(tmp_path / "a"))[0]
    assert alone[2] == alone[3]
    for found in ranks.run(2, own_split, 2, str(tmp_path / "b")):
        assert found[2] == found[3]
        assert found == pytest.approx(alone, rel=1e-12)


class NowAndThen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.active = nn.Linear(6, 6), nn.Linear(6, 3), True

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh() if self.active else x)


def left_out(folder: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with weft.session(plan=plan_over(2), permit=("fp64",), folder=folder, quiet=True) as session:
        model = NowAndThen().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        state = session.prepare(
            model,
            optimizer,
            DataLoader(TensorDataset(x, x[:, :3]), batch_size=4),
            loss=lambda outputs, batch: ((outputs - batch[1]).square().sum(), len(outputs)),
            split={"first": "column", "second": "row"},
        )
        for batch in state.batches(2):
            state.step(batch)
            model.active = False


def test_a_layer_of_a_pair_that_does_not_run_is_told_of(ranks, tmp_path) -> None:
    with pytest.raises(PlanError, match=r"given 6 features, and this rank has weights for 3"):
        ranks.run(2, left_out, str(tmp_path))


def gpt2_with_own_loss(tensor: int, folder: str) -> list[float]:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 32, "n_positions": 16}
    config = GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
    model = GPT2LMHeadModel(config).double()
    tokens = torch.randint(0, 32, (16, 8), generator=torch.Generator().manual_seed(1))
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=4)  # type: ignore[arg-type]

    def loss(outputs: Any, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        assert outputs.logits.shape[-1] == 32, "a loss of the user's own reads whole logits"
        return outputs.logits.square().sum(), len(batch["labels"])

    with weft.session(plan=plan_over(tensor), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        state = session.prepare(model, optimizer, loader, loss=loss)
        return [state.step(batch).loss for batch in state.batches(3)]


def test_a_loss_of_ones_own_sees_whole_logits_under_tensor_parallelism(ranks, tmp_path) -> None:
    alone = ranks.run(1, gpt2_with_own_loss, 1, str(tmp_path / "a"))[0]
    for found in ranks.run(2, gpt2_with_own_loss, 2, str(tmp_path / "b")):
        assert found == pytest.approx(alone, rel=1e-10)


def small_gradients(folder: str) -> float:
    model = nn.Linear(4, 4, bias=False)
    x = torch.ones(4, 4)
    plan = Plan(microbatch=MicrobatchPlan(size=4), compute=ComputePlan(precision="fp16"))

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return 1e-8 * outputs.float().sum(), len(outputs)

    with weft.session(plan=plan, permit=("fp16",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=4), loss=loss)
        return state.step([x]).gradient_norm


def test_fp16_scales_the_loss_so_that_small_gradients_live(ranks, tmp_path) -> None:
    (norm,) = ranks.run(1, small_gradients, str(tmp_path))
    assert norm == pytest.approx(4e-8, rel=0.02)  # 16 elements of 1e-8 · 4 samples / 4


def different_plans(folder: str) -> str:
    model = nn.Linear(4, 4)
    rank = torch.distributed.get_rank()
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=1 + rank, per_step=2 - rank))
    loader = DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=4)
    with weft.session(plan=plan, folder=folder, quiet=True) as session:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            session.prepare(model, optimizer, loader, loss=lambda o, b: (o.sum(), len(o)))
        except LaunchError as error:
            return str(error)
    return "nothing was said"


def test_ranks_with_different_plans_are_told_before_they_hang(ranks, tmp_path) -> None:
    for told in ranks.run(2, different_plans, str(tmp_path)):
        assert told.startswith("the ranks were given different plans")
        assert "Give all hosts the same files" in told
        assert "recipe" not in told

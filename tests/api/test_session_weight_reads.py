"""A loss that reads weights by itself: plain PyTorch's where ranks have them whole, refused where they have parts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError
from weft.model.families import CutTable

BATCH, WIDTH = 8, 6


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Identity(), nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)), nn.Linear(WIDTH, 2)
    ).double()


def orthogonal(model: nn.Module) -> Tensor:
    weight = model.get_parameter("1.0.weight")
    return (weight.T @ weight - torch.eye(WIDTH, dtype=weight.dtype)).pow(2).sum()


def absolute(model: nn.Module) -> Tensor:
    return sum((each.abs().sum() for each in model.parameters()), torch.zeros((), dtype=torch.float64))


def together(model: nn.Module) -> Tensor:
    return torch.cat([each.flatten() for each in model[1].parameters()]).norm()  # type: ignore[index]


def by_list(model: nn.Module) -> Tensor:
    return torch.stack(torch._foreach_norm([model.get_parameter("1.2.weight")])).sum()


def of_shape(model: nn.Module) -> Tensor:
    """Asks a weight for all but its values."""
    weight = model.get_parameter("1.0.weight")
    assert len(weight.shape) == len(weight.stride()) == len(weight.size())
    return torch.ones((), dtype=weight.dtype, device=weight.device).to(weight).type_as(weight) * weight.dim()


TERMS: dict[str, Callable[[nn.Module], Tensor]] = {
    each.__name__: each for each in (orthogonal, absolute, together, by_list, of_shape)
}


def plan_for(world: int = 1, size: int = 4, zero: int = 0, tensor: int = 1) -> Plan:
    data = world // tensor
    axes: dict[str, int] = {"shard": data} if zero else {"replicate": data}
    return Plan(
        mesh=MeshPlan(tensor=tensor, **axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=size, per_step=BATCH // size // data),
        compute=ComputePlan(precision="fp64"),
    )


def rows() -> TensorDataset:
    x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return TensorDataset(x, x[:, :2].sin())


def objective(model: nn.Module, term: str, outputs: Tensor, batch: list[Tensor]) -> Tensor:
    return (outputs - batch[1]).square().sum() + 0.1 * TERMS[term](model) * len(outputs)


def plain(term: str) -> list[float]:
    model, losses = build(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for batch in DataLoader(rows(), batch_size=BATCH):
        optimizer.zero_grad()
        loss = objective(model, term, model(batch[0]), batch) / BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained(plan: Plan, folder: str, term: str) -> list[float]:
    model = build()

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return objective(model, term, outputs, batch), len(outputs)

    split = {"1.0": "column", "1.2": "row"} if plan.mesh.tensor > 1 else ()
    cut = CutTable(entry="0", blocks=("1",), tail=("2",))
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        loader = DataLoader(rows(), batch_size=BATCH)
        state = session.prepare(model, optimizer, loader, loss=loss, split=split, cut=cut)
        return [state.step(batch).loss for batch in state.batches(3)]


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("plan", [plan_for(), plan_for(2, 2), plan_for(2, zero=1)], ids=["alone", "data", "zero 1"])
def test_whole_weights_are_read_as_in_plain_torch(ranks: RankPool, tmp_path: Path, plan: Plan, term: str) -> None:
    for losses in ranks.run(plan.mesh.world_size, trained, plan, str(tmp_path), term):
        assert losses == pytest.approx(plain(term), rel=1e-10)


@pytest.mark.parametrize("term", [term for term in TERMS if term != "of_shape"])
@pytest.mark.parametrize("plan", [plan_for(2, tensor=2), plan_for(2, zero=3)], ids=["tensor", "zero 3"])
def test_parts_of_weights_are_refused_by_name(ranks: RankPool, tmp_path: Path, plan: Plan, term: str) -> None:
    with pytest.raises(PlanError, match=r"the loss reads 1\.\d\.weight itself, .* a part.* Use plan\."):
        ranks.run(2, trained, plan, str(tmp_path), term)


@pytest.mark.parametrize("plan", [plan_for(2, tensor=2), plan_for(2, zero=3)], ids=["tensor", "zero 3"])
def test_a_weights_dtype_is_nobodys_secret(ranks: RankPool, tmp_path: Path, plan: Plan) -> None:
    for losses in ranks.run(2, trained, plan, str(tmp_path), "of_shape"):
        assert losses == pytest.approx(plain("of_shape"), rel=1e-10)

"""Parameters that a loss holds, stepped by another optimizer of the loop's, train as in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from test_session_kept import InOrder, check_equal, in_order, whole_weights
from test_session_traps import BATCH, build, plan_for, prepared, session_of
from torch import Tensor, nn

from weft.config.plan import ComputePlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import RecipeError

STEPS = 5


class Weighted(nn.Module):
    """A learnt weight per feature and a learnt temperature, over the numbers that count: other ones in each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.1, 0.3, 4, dtype=torch.float64))
        self.temperature = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.never = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        counts = (batch[1] > 0.3).double()
        errors = (outputs - batch[1]).square() * torch.exp(-self.weight) + self.weight
        return (errors * counts).sum() * self.temperature.exp(), counts.sum()


KIND = Weighted()


def by_global(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
    return KIND(outputs, batch)


def shapes_of_a_loss(loss: Weighted) -> dict[str, Callable[..., Any]]:
    def closure(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return loss(outputs, batch)

    def given(held: list[Weighted], outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Tensor]:
        return held[0](outputs, batch)

    return {"module": loss, "closure": closure, "method": loss.forward, "partial": functools.partial(given, [loss])}


def plain() -> list[Tensor]:
    model, loss = build(), Weighted()
    first = torch.optim.Adam(model.parameters(), lr=1e-2)
    second = torch.optim.SGD(loss.parameters(), lr=0.05, momentum=0.9)
    for at, batch in enumerate([*in_order()][:STEPS]):
        first.zero_grad()
        total, count = loss(model(batch[0]), batch)
        (total / count).backward()
        first.step()
        if at != 1:  # two steps' gradients at once
            second.step()
            second.zero_grad()
    return [each.detach().clone() for each in (*model.parameters(), *loss.parameters())]


def plan_of(kind: str, world: int) -> Plan:
    if kind == "accumulation":
        return Plan(
            mesh=MeshPlan(replicate=world),
            microbatch=MicrobatchPlan(size=BATCH // world // 2, per_step=2),
            compute=ComputePlan(precision="fp64"),
        )
    return plan_for(world, int(kind[-1]) if kind[-1].isdigit() else 0, world if kind == "tensor" else 1)


def train(kind: str, folder: str, shape: str) -> list[Tensor]:
    with session_of(folder, plan_of(kind, torch.distributed.get_world_size())) as session:
        model, own = build(), Weighted()
        loss = shapes_of_a_loss(own)[shape]
        with torch.no_grad():
            own.weight += session.rank  # rank 0's are taken, as those of the model are
        second = torch.optim.SGD(own.parameters(), lr=0.05, momentum=0.9)
        split = {"0": "column", "2": "row"} if kind == "tensor" else ()
        state = prepared(session, model, InOrder(), loss=loss, batch_size=BATCH, split=split)
        for batch in state.batches(STEPS):
            state.step(batch)
            if state.steps != 2:
                second.step()
                second.zero_grad()
        return [*whole_weights(state, folder, build()), *(each.detach().clone() for each in own.parameters())]


@pytest.mark.parametrize("shape", ["module", "closure", "method", "partial"])
def test_they_train_as_in_plain_torch(ranks: RankPool, tmp_path: Path, shape: str) -> None:
    right = plain()
    plans = ((1, "data"), (2, "data"), (2, "accumulation"), (2, "zero 3"))
    for number, (world, kind) in enumerate(plans if shape == "module" else plans[:2]):
        for found in ranks.run(world, train, kind, str(tmp_path / f"{number}"), shape):
            check_equal(found, right)


def test_under_a_plan_that_does_not_sum_them_they_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"the loss holds a parameter of shape .* Make the loss's module a submodule"):
        ranks.run(2, train, "tensor", str(tmp_path), "module")


def by_name(folder: str) -> float:
    with session_of(folder, plan_for(torch.distributed.get_world_size())) as session:
        state = prepared(session, build(), InOrder(), loss=by_global, batch_size=BATCH)
        KIND.zero_grad()
        state.step(next(iter(state.batches(1))))
        assert KIND.weight.grad is not None
        return float(KIND.weight.grad.sum())


def test_those_of_a_module_that_a_function_names_are_found(ranks: RankPool, tmp_path: Path) -> None:
    (alone,) = ranks.run(1, by_name, str(tmp_path / "1"))
    assert ranks.run(2, by_name, str(tmp_path / "2")) == pytest.approx([alone] * 2, rel=1e-12)


def game(folder: str) -> list[float]:
    """The loss of the first model names the second, which is prepared later."""
    with session_of(folder, plan_for(torch.distributed.get_world_size())) as session:
        first, judge = build(), nn.Linear(4, 1).double()
        nn.init.constant_(judge.weight, 0.3)
        nn.init.constant_(judge.bias, 0.1)

        def fooled(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
            with other.frozen():
                return judge(outputs).square().sum(), len(outputs)

        def judged(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
            return (outputs - 1).square().sum(), len(outputs)

        state = prepared(session, first, InOrder(), loss=fooled, batch_size=BATCH)
        other = prepared(session, judge, InOrder(), loss=judged, batch_size=BATCH, inputs={"input": "1"})
        losses: list[float] = []
        for batch in state.batches(3):
            losses += [state.step(batch).loss, other.step(batch).loss]
        return losses


def test_a_model_that_a_loss_names_may_be_prepared_after_it(ranks: RankPool, tmp_path: Path) -> None:
    (alone,) = ranks.run(1, game, str(tmp_path / "1"))
    for losses in ranks.run(2, game, str(tmp_path / "2")):
        assert losses == pytest.approx(alone, rel=1e-10)


def test_in_the_prepared_optimizer_they_are_refused_with_what_to_do(tmp_path: Path) -> None:
    model, loss = build(), Weighted()
    optimizer = torch.optim.Adam([*model.parameters(), *loss.parameters()], lr=0.1)
    with session_of(tmp_path) as session, pytest.raises(RecipeError, match="make a submodule of the model"):
        prepared(session, model, loss=loss, optimizer=optimizer)

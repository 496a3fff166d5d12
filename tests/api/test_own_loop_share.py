"""Batches that a loop makes itself, which a session shares out: equal to plain PyTorch's under every plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import CLASSES, FEATURES, PLANS, Hands, Net, fp64, plainly, seen, under
from pool import RankPool
from torch import Tensor

import weft
from weft.errors import DataError


def drawing(hands: Hands, *, batch: int = 9, drifts: bool = False) -> tuple[list[float], list[Tensor]]:
    """Draws its batches by torch's generator, in evaluations and in two backwards of a step."""
    with fp64():
        torch.manual_seed(3)
        data, labels = torch.randn(40, FEATURES), torch.randint(0, CLASSES, (40,))
        model, losses = Net(), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = hands.prepare(model, optimizer)
        for step in range(4):
            if drifts and step == 2 and hands.session is not None and hands.session.rank == 1:
                torch.rand(1)
            for _ in range(2):
                at = torch.randint(0, 40, (batch,))
                x, y = data[at], labels[at]
                if hands.session is not None:
                    x, y = hands.session.share(x, y)
                x = x + 0.1 * torch.randn(len(x), FEATURES)  # one process's, of all rows
                loss = F.cross_entropy(model(x), y) / 2
                ahead = torch.randint(0, 40, (batch,))  # of all samples, with a batch in hand
                losses.append(float(data[ahead].sum()))
                hands.backward(loss)
                losses.append(hands.mean(loss))
            optimizer.step()
            optimizer.zero_grad()
        return losses, seen(model)


@pytest.mark.parametrize("name", ["alone", "data", "data of 4", "zero-3", "data and tensor"])
def test_a_batch_that_the_loop_draws(ranks: RankPool, name: str) -> None:
    expected = plainly(drawing)
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], drawing):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)


def summing(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """A loss that is a sum over its samples."""
    with fp64():
        torch.manual_seed(3)
        x, model = torch.randn(7, FEATURES), Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer = hands.prepare(model, optimizer)
        losses = list[float]()
        for _ in range(3):
            own = x if hands.session is None else hands.session.share(x)
            loss = model(own).square().sum()
            hands.backward(loss, **({} if hands.session is None else {"reduction": "sum"}))
            losses.append(loss.item() if hands.session is None else hands.session.all_reduce(loss).item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, seen(model)


@pytest.mark.parametrize("name", ["data", "zero-3"])
def test_a_loss_that_is_a_sum(ranks: RankPool, name: str) -> None:
    expected = plainly(summing)
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], summing):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found[1], expected[1], rtol=1e-8, atol=1e-10)


SUMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda x, labels, target: F.cross_entropy(x, labels, reduction="sum"),
    "squares": lambda x, labels, target: 3 * F.mse_loss(x, target, reduction="sum"),
    "terms": lambda x, labels, target: (
        F.binary_cross_entropy(x.sigmoid(), target, reduction="sum") - 0.5 * torch.sum(1 + x - x.exp())
    ),
}
MEANS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "entropy": lambda x, labels, target: F.cross_entropy(x, labels),
    "divided": lambda x, labels, target: F.cross_entropy(x, labels, reduction="sum") / len(x),
    "times": lambda x, labels, target: F.cross_entropy(x, labels, reduction="sum") * (1 / 16),
    "with a penalty": lambda x, labels, target: F.cross_entropy(x, labels) + 0.5 * x.square().sum(),
    "weighted": lambda x, labels, target: (x.square() * target.softmax(0)).sum(),
    "batchmean": lambda x, labels, target: F.kl_div(x.log_softmax(1), target, reduction="batchmean"),
}


def warned(kind: str, name: str) -> list[str]:
    """What is said of the first backward of a loss that is given as a mean."""
    with warnings.catch_warnings(record=True) as caught, fp64():
        warnings.simplefilter("always")
        with weft.session(plan=PLANS["data"], permit=("fp64",), quiet=True, record=False) as session:
            model = Net()
            model, _ = session.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
            x, labels, target = session.share(
                torch.rand(8, FEATURES), torch.arange(8) % CLASSES, torch.rand(8, CLASSES)
            )
            session.backward({"sum": SUMS, "mean": MEANS}[kind][name](model(x), labels, target))
    return [str(each.message) for each in caught if each.filename == __file__]


def test_a_sum_that_is_taken_for_a_mean_is_told_of(ranks: RankPool) -> None:
    for name in SUMS:
        for found in ranks.run(2, warned, "sum", name):
            (text,) = found
            assert "gradients are 2 times smaller" in text
            assert "reduction='sum'" in text
    for name in MEANS:
        assert ranks.run(2, warned, "mean", name) == [[], []], name


def drifting() -> str:
    def loop(hands: Hands) -> Any:
        return drawing(hands, drifts=True)

    try:
        under(PLANS["data"], loop)
    except DataError as error:
        return str(error)
    return "went on"


def test_ranks_that_make_other_batches_are_told_so(ranks: RankPool) -> None:
    for found in ranks.run(2, drifting):
        assert "what session.share was given differs between the ranks" in found


def state_of_a_network() -> tuple[Any, ...]:
    with weft.session(plan=PLANS["data"], permit=("fp64",), quiet=True, record=False) as session:
        hidden = {"hidden": torch.arange(12.0).view(2, 3, 2), "name": "lstm"}
        return session.rank, session.share(hidden, dim=1), session.share(torch.arange(3), torch.arange(3) + 3)


def test_samples_may_lie_along_another_dim(ranks: RankPool) -> None:
    for rank, hidden, (first, second) in ranks.run(2, state_of_a_network):
        rows = slice(0, 2) if rank == 0 else slice(2, 3)
        assert torch.equal(hidden["hidden"], torch.arange(12.0).view(2, 3, 2)[:, rows])
        assert hidden["name"] == "lstm"
        assert torch.equal(first, torch.arange(3)[rows])
        assert torch.equal(second, torch.arange(3)[rows] + 3)


@pytest.fixture
def session() -> Iterator[weft.Session]:
    with weft.session(quiet=True, record=False) as opened:
        yield opened


def test_what_is_no_batch(session: weft.Session) -> None:
    with pytest.raises(DataError, match="was given no tensor"):
        session.share("texts")
    with pytest.raises(DataError, match="tensors of 3 and 6 samples.*before they are flattened"):
        session.share(torch.zeros(3), torch.zeros(6))
    with pytest.raises(DataError, match=r"shape \(3,\), which has no such dim"):
        session.share(torch.zeros(3), dim=1)
    with pytest.raises(DataError, match=r"reduction='max'\) is not had"):
        session.backward(torch.ones((), requires_grad=True), reduction="max")  # type: ignore[arg-type]

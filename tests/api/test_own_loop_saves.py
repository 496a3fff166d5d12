"""A loop that keeps its own steps is saved whole, and goes on in the middle of an epoch, under any other plan."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, PLANS, SPLIT, Hands, Judge, Net, fp64, samples, under
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import CheckpointError, RecipeError

STEPS, SAVED = 10, 5
"""Steps of a loop, whose second pass the save is in."""


class Average:
    """An object of the loop's own, in the way of an average of losses."""

    def __init__(self) -> None:
        self.mean, self.seen, self.tail, self.drawn = torch.zeros(2), 0, {1: float("nan")}, 0.0

    def add(self, loss: float) -> None:
        self.mean, self.seen = 0.9 * self.mean + 0.1 * loss, self.seen + 1
        self.tail[self.seen] = loss

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "seen": self.seen, "tail": self.tail, "drawn": self.drawn}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean, self.seen, self.tail = state["mean"], state["seen"], state["tail"]
        self.drawn = state["drawn"]


def batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def run(hands: Hands, *, folder: str, resumes: bool, seed: int = 0) -> tuple[list[float], list[Tensor]]:
    """A classifier whose loop draws from every generator but the batches, with a schedule, a frozen teacher and a
    batch norm."""
    assert hands.session is not None
    with fp64():
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        teacher, model = Net(), Net(norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        loader = DataLoader(samples(28), BATCH, shuffle=True, generator=torch.Generator().manual_seed(seed))
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        average, done = Average(), 0
        teacher, model, optimizer, loader, schedule = hands.prepare(
            teacher, model, optimizer, loader, schedule, split=SPLIT
        )
        if resumes:
            done = hands.session.load(folder, extra={"average": average})
        losses = list[float]()
        for x, y in batches(loader):
            weight = random.random() + np.random.rand() + average.drawn
            with torch.no_grad():
                aim = teacher(x).softmax(1)
            loss = weight * F.cross_entropy(model(x), y) + F.cross_entropy(model(x), aim)
            hands.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(hands.mean(loss))
            average.add(losses[-1])
            average.drawn = float(torch.rand(1))
            done += 1
            if done == SAVED and not resumes:
                hands.session.save(folder, extra={"average": average})
            if done == STEPS:
                break
        assert average.seen == STEPS
        assert hands.session.state(model).steps == STEPS
        model.eval()
        with torch.no_grad():
            return losses, [model(samples().tensors[0]), average.mean]


def assert_goes_on(found: Any, expected: Any, *, exactly: bool) -> None:
    rtol = 0.0 if exactly else 1e-10
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected[0][SAVED:]), rtol=rtol, atol=0)
    for one, other in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(one, other, rtol=rtol * 100, atol=0 if exactly else 1e-10)


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [("alone", "alone"), ("zero-3", "zero-3"), ("data", "zero-3"), ("hybrid", "alone"), ("alone", "data and tensor")],
)
def test_a_loop_goes_on_in_mid_epoch(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    """Under the same plan bit for bit."""
    plans = [PLANS[name] for name in (saved, loaded)]
    whole = partial(run, folder=str(tmp_path / "save"), resumes=False)
    rest = partial(run, folder=str(tmp_path / "save"), resumes=True, seed=7)
    expected = ranks.run(plans[0].mesh.world_size, under, plans[0], whole)[0]
    for found in ranks.run(plans[1].mesh.world_size, under, plans[1], rest):
        assert_goes_on(found, expected, exactly=saved == loaded)


def adversaries(hands: Hands, *, folder: str, resumes: bool) -> tuple[list[float], list[Tensor]]:
    """Two models with an optimizer each; the save comes between passes, the load after other steps in the session."""
    assert hands.session is not None
    with fp64():
        torch.manual_seed(3 if resumes else 0)
        maker, judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6)), Judge(norm=False)
        making, judging = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (maker, judge))
        things = maker, judge, making, judging, DataLoader(samples(16), BATCH, shuffle=True)
        maker, judge, making, judging, loader = hands.prepare(*things)
        losses = list[float]()
        for epoch in range(3):
            if epoch == 1:
                if resumes:
                    hands.session.load(folder)
                    losses.clear()
                else:
                    hands.session.save(folder)
            for x, _ in loader:
                made = maker(x[:, :3].tanh())
                said = judge(x).mean() - judge(made.detach()).mean() + judge(x).square().mean()
                hands.backward(said)
                judging.step()
                judging.zero_grad()
                told = judge(made).square().mean()
                hands.backward(told)
                making.step()
                making.zero_grad()
                judging.zero_grad()
                losses += [hands.mean(said), hands.mean(told)]
        return losses, [maker(samples().tensors[0][:, :3]).detach()]


@pytest.mark.parametrize(("saved", "loaded"), [("alone", "zero-3"), ("zero-2", "alone")])
def test_several_models_are_one_save(ranks: RankPool, tmp_path: Path, saved: str, loaded: str) -> None:
    plans = [PLANS[name] for name in (saved, loaded)]
    whole, rest = (partial(adversaries, folder=str(tmp_path), resumes=resumes) for resumes in (False, True))
    losses, made = ranks.run(plans[0].mesh.world_size, under, plans[0], whole)[0]
    for found in ranks.run(plans[1].mesh.world_size, under, plans[1], rest):
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses[4:]), rtol=1e-10, atol=0)
        torch.testing.assert_close(found[1], made, rtol=1e-8, atol=1e-10)


@pytest.fixture
def session() -> Iterator[weft.Session]:
    with weft.session(quiet=True, record=False) as opened:
        yield opened


def prepared(session: weft.Session, seed: int = 0) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = samples().tensors
    return session.prepare(model, optimizer, DataLoader(TensorDataset(x.float(), y), 8, shuffle=True))


def train(session: weft.Session, model: nn.Module, optimizer: Any, loader: Any, steps: int = 4) -> list[float]:
    losses = list[float]()
    for number, (x, y) in enumerate(loader):
        if number == steps:
            break
        loss = F.cross_entropy(model(x), y)
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_untrained_loop_is_saved_and_loaded_anywhere(session: weft.Session, tmp_path: Path) -> None:
    """Before the first forward as after some steps; a pass that was left early begins anew."""
    things = prepared(session)
    session.save(tmp_path / "first")
    expected = train(session, *things, steps=2) + train(session, *things)
    assert session.load(tmp_path / "first") == 0
    assert train(session, *things, steps=2) + train(session, *things) == expected
    session.save(tmp_path / "last")
    rest = train(session, *things)
    with weft.session(quiet=True, record=False) as other:
        again = prepared(other, seed=4)
        assert other.load(tmp_path / "last") == 6
        assert train(other, *again) == rest


def test_weights_may_be_loaded_alone(session: weft.Session, tmp_path: Path) -> None:
    model, optimizer, loader = prepared(session)
    train(session, model, optimizer, loader)
    session.save(tmp_path)
    with weft.session(quiet=True, record=False) as other:
        again = other.prepare(Net())
        other.load(tmp_path)
        assert all(torch.equal(one, two) for one, two in zip(model.parameters(), again.parameters(), strict=True))
        tuned = other.prepare(torch.optim.SGD(again.parameters(), lr=0.1))
        losses = train(other, again, tuned, other.prepare(DataLoader(loader.dataset, 8)))
        assert losses[0] < 1.5


def test_what_the_loop_writes_after_a_load_goes_on(session: weft.Session, tmp_path: Path) -> None:
    things = prepared(session)
    train(session, *things)
    session.save(tmp_path)
    with weft.session(quiet=True, record=False) as other:
        model, optimizer, loader = prepared(other, seed=4)
        other.load(tmp_path)
        nn.init.zeros_(model.head.weight)  # type: ignore[union-attr, arg-type]
        nn.init.zeros_(model.head.bias)  # type: ignore[union-attr, arg-type]
        assert train(other, model, optimizer, loader, steps=1) == [pytest.approx(float(torch.log(torch.tensor(4.0))))]
        assert len(optimizer.state) == 8
        assert other.state(model).steps == 5
        with pytest.raises(CheckpointError, match=r"written by session.save\(\)"):
            other.state(model).load(tmp_path)


def test_saves_that_fit_nothing_are_refused(session: weft.Session, tmp_path: Path) -> None:
    def says(error: type[Exception], text: str, act: Any, *args: Any, **keywords: Any) -> None:
        with pytest.raises(error, match=text):
            act(*args, **keywords)

    things = prepared(session)
    average = Average()
    says(
        RecipeError,
        r"extra\['model'\] is what session.prepare was given",
        session.save,
        tmp_path,
        extra={"model": things[0]},
    )
    says(RecipeError, "is a int, which has no state", session.save, tmp_path, extra={"epoch": 3})
    average.tail = {1: lambda: 0}  # type: ignore[assignment, dict-item]
    says(CheckpointError, "extra.average.tail.1 is a function", session.save, tmp_path, extra={"average": average})
    says(CheckpointError, "does not exist", session.load, tmp_path / "nowhere")
    session.save(tmp_path, extra={"average": Average()})
    session.save(tmp_path, extra={"average": Average()})
    assert [each.name for each in tmp_path.iterdir() if each.is_dir()] == ["step-000000"]
    says(CheckpointError, r"and there is no such object now", session.load, tmp_path)
    says(CheckpointError, r"no state for extra\['best'\]", session.load, tmp_path, extra={"best": Average()})
    session.prepare(DataLoader(things[2].dataset, 8))
    says(CheckpointError, "1 models and 1 loaders, and session.prepare was given 1 and 2", session.load, tmp_path)
    with weft.session(quiet=True, record=False) as other:
        model = nn.Linear(3, 3)
        other.prepare(model)
        before = model.weight.detach().clone()
        says(CheckpointError, "does not fit", other.load, tmp_path, extra={"average": Average()})
        assert torch.equal(model.weight, before)
    with weft.session(quiet=True, record=False) as other:
        prepared(other)
        other.load(tmp_path, extra={"average": Average()})
        says(CheckpointError, "was loaded and not called since", other.save, tmp_path)
    train(session, *things)
    session.backward(things[0](torch.ones(2, 6)).sum())
    says(RecipeError, r"session.load\(\) was called between a backward", session.load, tmp_path)


def apart(folder: str) -> str:
    with weft.session(quiet=True, record=False) as session:
        prepared(session)
        average = Average()
        average.add(float(session.rank))
        with pytest.raises(RecipeError) as caught:
            session.save(folder, extra={"average": average})
        return str(caught.value)


def test_objects_are_the_same_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    for told in ranks.run(2, apart, str(tmp_path)):
        assert "the state of extra['average'] differs between the ranks" in told

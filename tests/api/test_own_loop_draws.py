"""What a loop draws for its samples between a batch and its backward: one process's numbers on any number of ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, FEATURES, PLANS, Hands, Judge, Net, fp64, plainly, samples, seen, under
from pool import RankPool
from test_own_loop import assert_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import MeshPlan, Plan
from weft.errors import PlanError, RecipeError


def adversaries(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """DCGAN: noise for each sample, and pictures of fixed noise behind each pass."""
    with fp64():
        torch.manual_seed(0)
        maker, judge = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, FEATURES)), Judge(norm=False)
        judging, making = (torch.optim.Adam(each.parameters(), lr=2e-3) for each in (judge, maker))
        loader = DataLoader(samples(), BATCH, shuffle=True)
        maker, judge, judging, making, loader = hands.prepare(maker, judge, judging, making, loader)
        losses, pictures = list[float](), torch.empty(0)
        for _ in range(2):
            for x, _ in loader:
                made = maker(torch.randn(len(x), 3))
                judging.zero_grad()
                smooth = torch.empty(x.size(0)).uniform_(0.8, 1.0)
                of_both = F.binary_cross_entropy_with_logits(judge(x), smooth)
                of_both = of_both + F.softplus(judge(made.detach())).mean()
                hands.backward(of_both)
                judging.step()
                making.zero_grad()
                of_maker = F.softplus(-judge(made)).mean()
                hands.backward(of_maker)
                making.step()
                losses += [hands.mean(of_both), hands.mean(of_maker)]
            with torch.no_grad():
                pictures = maker(torch.randn(16, 3))
        return losses, [pictures]


def diffusion(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Noise, times, and a mask of what is left out, by many functions; an offset that all samples share."""
    with fp64():
        torch.manual_seed(0)
        np.random.seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = hands.prepare(model, optimizer, DataLoader(samples(), BATCH, shuffle=True))
        losses = list[float]()
        for x, y in loader:
            noise = torch.randn_like(x)
            times = torch.randint(0, 10, (x.shape[0],), device=x.device).long()
            share = 0.1 * times[:, None] + torch.rand(size=(len(x), 1)) + torch.rand(()) + np.random.beta(0.2, 0.2)
            keep = torch.bernoulli(torch.full_like(x, 0.9)) * torch.distributions.Bernoulli(0.9).sample((len(x), 1))
            more = torch.normal(x, 0.1) + torch.distributions.Normal(x.abs(), 1.0).sample() + torch.randn(1, FEATURES)
            chosen = torch.multinomial(x.softmax(1), 2)
            later = torch.randint(5, [len(x)]) + torch.randint_like(y, 3)
            noisy = (x + share * noise + more) * keep + x.gather(1, chosen).sum(1, keepdim=True) + later[:, None]
            noisy = noisy + torch.empty_like(x).normal_() + torch.randn(len(x), FEATURES, requires_grad=True)
            loss = F.cross_entropy(model(noisy / 10), y)
            hands.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hands.mean(loss))
        return losses, seen(model)


Loop = Callable[[Hands], tuple[list[float], list[Tensor]]]


@pytest.mark.parametrize("loop", [adversaries, diffusion], ids=lambda loop: loop.__name__)
def test_one_process_draws_as_plain_pytorch(ranks: RankPool, loop: Loop) -> None:
    expected = ranks.run(1, plainly, loop)[0]
    found = ranks.run(1, under, PLANS["alone"], loop)[0]
    assert found[0] == expected[0]
    assert all(torch.equal(one, other) for one, other in zip(found[1], expected[1], strict=True))


@pytest.mark.parametrize("name", ["data", "data of 4", "zero-3", "data and tensor"])
@pytest.mark.parametrize("loop", [adversaries, diffusion], ids=lambda loop: loop.__name__)
def test_ranks_draw_what_one_process_draws(ranks: RankPool, loop: Loop, name: str) -> None:
    """With a tail of 3 samples, of which the fourth of four ranks has none."""
    expected = ranks.run(1, plainly, loop)[0]
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], loop):
        assert_alike(found, expected)


REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "rows of parts": (lambda x: torch.randn(3 * len(x)), "of shape (12,) where this rank has 4 of the batch's 8"),
    "another dim": (lambda x: torch.rand(5, len(x)), "nothing says which numbers are whose"),
    "an order": (lambda x: torch.randperm(len(x)), "samples of other ranks are not here to be mixed with"),
    "dropout": (lambda x: F.dropout(x), "a dropout, a gamma or Poisson draw"),
    "gamma": (lambda x: torch.distributions.Gamma(x.abs() + 1, 1.0).sample(), "a dropout, a gamma or Poisson draw"),
    "rows of numpy": (lambda x: np.random.rand(len(x), 2), "numpy.random.rand with a row for each of this rank's 4"),
    "an order of numpy": (lambda x: np.random.permutation(len(x)), "numpy.random.permutation with a row for each"),
    "out": (lambda x: torch.randn(len(x), 3, out=torch.empty(len(x), 3)), "Leave out= out"),
}


def train(session: weft.Session, model: nn.Module, x: Tensor, y: Tensor, draw: Callable[[Tensor], Any]) -> None:
    own = torch.randn(3 * len(x), generator=torch.Generator().manual_seed(0))  # the same on all ranks
    draw(x)
    session.backward(F.cross_entropy(model(x), y) * own[0])


def drawing() -> dict[str, str]:
    told = dict[str, str]()
    plain = torch.randn, Tensor.normal_
    for name, (draw, _) in REFUSED.items():
        with weft.session(quiet=True, record=False, plan=Plan(mesh=MeshPlan(replicate=2))) as session:
            model = Net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model, optimizer, loader = session.prepare(model, optimizer, DataLoader(samples(), 8))
            x, y = next(batches := iter(loader))
            x = x.float()
            with pytest.raises(PlanError) as caught:
                train(session, model, x, y, draw)
            told[name] = str(caught.value)
            batches.close()  # type: ignore[attr-defined]
            torch.randn(3 * len(x))  # outside of a pass
    assert (torch.randn, Tensor.normal_) == plain
    return told


def test_draws_that_cannot_be_placed_are_refused(ranks: RankPool) -> None:
    for told in ranks.run(2, drawing):
        for name, (_, text) in REFUSED.items():
            assert text in told[name], name


def apart() -> str:
    with weft.session(quiet=True, record=False, plan=Plan(mesh=MeshPlan(replicate=2))) as session:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = session.prepare(model, optimizer, DataLoader(samples(), 8))
        for x, y in loader:
            session.backward(F.cross_entropy(model(torch.randn_like(x).float()), y))
            if session.rank == 0:
                torch.rand(3)  # as samples are printed on one rank
            with pytest.raises(RecipeError) as caught:
                optimizer.step()
            return str(caught.value)
    raise AssertionError


def test_draws_on_some_ranks_are_refused(ranks: RankPool) -> None:
    for told in ranks.run(2, apart):
        assert "where torch's generator stands, from which the loop draws, differs between the ranks" in told


def cost() -> float:
    """What a draw that is placed, and the looks at the generator, take of a step of 5 ms."""
    with weft.session(quiet=True, record=False, plan=Plan(mesh=MeshPlan(replicate=2))) as session:
        loader: Any = session.prepare(DataLoader(samples(), 8))
        next(batches := iter(loader))
        draws = loader._sharing.draws
        spent = list[float]()
        for _ in range(200):
            started = time.perf_counter()
            draws.begin(8, 0, 4)
            draws.check()
            draws.end()
            spent.append(time.perf_counter() - started)
        batches.close()  # type: ignore[attr-defined]
        return sorted(spent)[len(spent) // 2]


def test_a_loop_that_draws_nothing_pays_little(ranks: RankPool) -> None:
    assert max(ranks.run(2, cost)) < 50e-6

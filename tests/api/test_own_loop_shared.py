"""One optimizer over several models: each model has its plan, and the step is that of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, FEATURES, PLANS, Hands, fp64, plainly, samples, under
from pool import RankPool
from test_own_loop import assert_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.errors import RecipeError


def encoder_and_head(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """Two groups, a schedule, and clipping of both as one; the encoder rests in every third step."""
    with fp64():
        torch.manual_seed(0)
        encoder, head = nn.Linear(FEATURES, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        groups = [{"params": encoder.parameters(), "lr": 1e-2}, {"params": head.parameters()}]
        optimizer = torch.optim.AdamW(groups, lr=2e-2)
        loader = DataLoader(samples(), BATCH, shuffle=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        encoder, head, optimizer, loader, schedule = hands.prepare(encoder, head, optimizer, loader, schedule)
        found = list[float]()
        for number, (x, y) in enumerate(itertools.chain(loader, loader)):
            made = encoder(x)
            loss = F.cross_entropy(head(made.detach() if number % 3 == 2 else made), y)
            hands.backward(loss)
            parameters: Iterator[nn.Parameter] = itertools.chain(encoder.parameters(), head.parameters())
            clip = nn.utils.clip_grad_norm_ if hands.session is None else hands.session.clip_grad_norm_
            found += [hands.mean(loss), float(clip(parameters, 0.1))]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return found, []


@pytest.mark.parametrize("name", ["alone", "data", "zero-2", "zero-3"])
def test_models_step_together(ranks: RankPool, name: str) -> None:
    expected = ranks.run(1, plainly, encoder_and_head)[0]
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], encoder_and_head):
        assert_alike(found, expected)


def clamped_by_groups(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """What is written into the optimizer's groups reaches the weights of all models."""
    with fp64():
        torch.manual_seed(0)
        encoder, head = nn.Linear(FEATURES, 8), nn.Linear(8, 4)
        optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], lr=2e-2)
        loader = DataLoader(samples(), BATCH, shuffle=True)
        encoder, head, optimizer, loader = hands.prepare(encoder, head, optimizer, loader)
        found = list[float]()
        for x, y in loader:
            loss = F.cross_entropy(head(encoder(x).tanh()), y)
            hands.backward(loss)
            found.append(hands.mean(loss))
            optimizer.step()
            optimizer.zero_grad()
            held = [p for group in optimizer.param_groups for p in group["params"]]
            assert sum(p.numel() for p in held) == sum(p.numel() for m in (encoder, head) for p in m.parameters())
            with torch.no_grad():
                for p in held:
                    p.clamp_(-0.1, 0.1)
        return found, []


@pytest.mark.parametrize("name", ["alone", "data"])
def test_a_loop_may_write_into_its_groups(ranks: RankPool, name: str) -> None:
    expected = ranks.run(1, plainly, clamped_by_groups)[0]
    for found in ranks.run(PLANS[name].mesh.world_size, under, PLANS[name], clamped_by_groups):
        assert_alike(found, expected)


def prepared(session: weft.Session, seed: int) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    first, second = nn.Linear(4, 4), nn.Linear(4, 2)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=1e-2)
    return session.prepare(first, second, optimizer)


def train(session: weft.Session, first: nn.Module, second: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = list[float]()
    for _ in range(3):
        loss = second(first(torch.ones(4, 4)).tanh()).square().mean()
        session.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_is_saved_with_its_models(tmp_path: Path) -> None:
    with weft.session(quiet=True, record=False) as session:
        things = prepared(session, 0)
        train(session, *things)
        things[2].param_groups[0]["lr"] = 5e-3
        session.save(tmp_path)
        expected = train(session, *things)
        things[2].param_groups[0]["lr"] = 1.0
        session.load(tmp_path)
        assert things[2].param_groups[0]["lr"] == 5e-3
        assert train(session, *things) == expected
        with pytest.raises(RecipeError, match="lie with each of its 2 models"):
            things[2].state_dict()
    with weft.session(quiet=True, record=False) as session:
        things = prepared(session, 1)
        session.load(tmp_path)
        assert train(session, *things) == expected


def test_optimizers_that_look_at_all_are_refused() -> None:
    class Whole(torch.optim.SGD):
        pass

    with weft.session(quiet=True, record=False) as session:
        first, second = nn.Linear(4, 4), nn.Linear(4, 2)
        optimizer = Whole([*first.parameters(), *second.parameters()], lr=0.1)
        session.prepare(first, second, optimizer)
        with pytest.raises(RecipeError, match="holds parameters of several models"):
            first(torch.ones(4, 4))


class Both(nn.Module):
    """A GAN in one module, whose parts train by an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.judge = nn.Linear(3, FEATURES), nn.Linear(FEATURES, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.judge(self.maker(x[:, :3]))


def in_one_module(hands: Hands, *, apart: bool = True) -> tuple[list[float], list[Tensor]]:
    with fp64():
        torch.manual_seed(0)
        both = Both()
        making, judging = (torch.optim.Adam(part.parameters(), lr=1e-2) for part in (both.maker, both.judge))
        parts = (both.maker, both.judge) if apart else (both,)
        *_, making, judging, loader = hands.prepare(*parts, making, judging, DataLoader(samples(24), BATCH))
        losses = list[float]()
        for x, _ in loader:
            told = F.softplus(both(x)).mean() + F.softplus(-both.judge(x)).mean()
            hands.backward(told)
            judging.step()
            judging.zero_grad()
            making.zero_grad()
            made = F.softplus(-both(x)).mean()
            hands.backward(made)
            making.step()
            making.zero_grad()
            judging.zero_grad()
            losses += [hands.mean(told), hands.mean(made)]
        return losses, []


@pytest.mark.parametrize("name", ["data", "zero-3"])
def test_parts_of_a_module_are_models_too(ranks: RankPool, name: str) -> None:
    expected = ranks.run(1, plainly, in_one_module)[0]
    for found in ranks.run(2, under, PLANS[name], in_one_module):
        assert_alike(found, expected)
    with pytest.raises(RecipeError, match=r"session.prepare\(model.maker, model.judge, …\)"):
        ranks.run(2, under, PLANS[name], partial(in_one_module, apart=False))


class Encoder(nn.Linear):
    def encode(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def by_a_method(hands: Hands) -> tuple[list[float], list[Tensor]]:
    with fp64():
        encoder, head = Encoder(FEATURES, 4), nn.Linear(4, 4)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (encoder, head)]
        encoder, head, *optimizers, loader = hands.prepare(encoder, head, *optimizers, DataLoader(samples(), BATCH))
        x, y = next(iter(loader))
        hands.backward(F.cross_entropy(head(encoder.encode(x)), y))
        for each in optimizers:
            each.step()
        return [], []


def test_a_model_that_was_never_called_is_not_trained_apart(ranks: RankPool) -> None:
    ranks.run(1, under, PLANS["alone"], by_a_method)
    with pytest.raises(RecipeError, match="would update the Encoder by this rank's gradients alone"):
        ranks.run(2, under, PLANS["data"], by_a_method)

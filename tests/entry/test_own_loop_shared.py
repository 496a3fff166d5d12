"""One optimizer over several models: each model has its plan, and the step is that of all."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, FEATURES, PLANS, Hands, fp64, plainly, samples, under
from test_own_loop import assert_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from pool import RankPool
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

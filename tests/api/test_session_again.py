"""Many sessions in one process, as folds and sweeps need them: after good ones, and after some that raised."""

from __future__ import annotations

import random
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from pool import RankPool
from session_places import agent, as_launched, free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.errors import CollectiveError


def _loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def _train(folder: str, raises: int | None) -> float:
    """One session; `raises` is the rank that raises in the middle, -1 for all."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    loader = DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=8)
    loss = 0.0
    with weft.session(folder=folder, quiet=True) as session:
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=_loss)
        for batch in state.batches():
            loss = state.step(batch).loss
            if raises in (session.rank, -1):
                raise ValueError("of the loop")
    return loss


def _fold(folder: str, port: int, sessions: int, seed: int, has_agent: bool) -> list[str | float]:
    draw = random.Random(seed)
    found: list[str | float] = []
    with as_launched(port, has_agent=has_agent):
        for _ in range(sessions):
            raises = draw.choice([None, None, -1, 0, 1])
            try:
                found.append(_train(folder, raises))
            except (ValueError, CollectiveError) as error:
                found.append(type(error).__name__)
    return found


@pytest.mark.parametrize(("world", "has_agent", "sessions"), [(2, True, 20), (2, False, 8), (4, True, 8)])
def test_sessions_follow_one_another_in_a_process(
    ranks: RankPool, tmp_path: Path, world: int, has_agent: bool, sessions: int
) -> None:
    with agent() if has_agent else nullcontext(free_port()) as port:
        found = ranks.run(world, _fold, str(tmp_path), port, sessions, 11 + world, has_agent, timeout=50)
    for results in zip(*found, strict=True):
        if isinstance(results[0], float):
            assert len(set(results)) == 1
        else:
            assert set(results) <= {"ValueError", "CollectiveError"}
            assert "ValueError" in results
    assert sum(isinstance(one, float) for one in found[0]) >= 2


def test_a_rank_that_does_not_come_again_is_named_at_the_deadline(ranks: RankPool) -> None:
    with agent() as port:
        text = ranks.run(2, _come_alone_soon, port, timeout=30)[0]
    assert "was not formed in 1 s: rank 1 has not come" in text


def _come_alone_soon(port: int) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weft.config.plan.COLLECTIVE_TIMEOUT_SECONDS", 1.0)
        with as_launched(port) as rank:
            _with_deadline()
            if rank == 1:
                return ""
            with pytest.raises(CollectiveError) as caught:
                _with_deadline()
            return str(caught.value)


def _with_deadline() -> None:
    with weft.session(quiet=True, collective_timeout_seconds=1.0):
        pass

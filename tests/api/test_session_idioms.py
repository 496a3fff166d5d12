"""Lines that loops have written for years: a mean over an epoch, and a model that is kept after its session."""

from __future__ import annotations

import contextlib
import io
import pickle
import pickletools
from pathlib import Path

import pytest
import torch
from pool import RankPool
from test_session_kept import InOrder
from test_session_traps import BATCH, build, loss_fn, plan_for, prepared, session_of
from torch import Tensor, nn

import weft


def mean_loss(folder: str) -> tuple[float, float, int, str]:
    """The mean and the count of an epoch, what `len(batch)` counts in it, and what the session says at its start."""
    world, said = torch.distributed.get_world_size(), io.StringIO()
    with (
        contextlib.redirect_stdout(said),
        weft.session(plan_for(world), permit=("fp64",), folder=folder, record=False) as session,
    ):
        state = prepared(session, build(), InOrder(), batch_size=BATCH)
        total, count, mine = 0.0, 0.0, 0
        for batch in state.batches():
            step = state.step(batch)
            total += step.loss * step.count
            count += step.count
            mine += len(batch[0])
        return total / count, count, mine, said.getvalue()


def test_a_mean_over_an_epoch_is_made_of_loss_and_count(ranks: RankPool, tmp_path: Path) -> None:
    """And a session of which each rank is handed a part of the batch says so."""
    model = build()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    total, count = 0.0, 0
    for batch in InOrder():
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)[0] / len(batch[0])
        loss.backward()
        optimizer.step()
        total, count = total + loss.item() * len(batch[0]), count + len(batch[0])
    for world in (1, 2):
        found = ranks.run(world, mean_loss, str(tmp_path / str(world)))
        for mean, number, mine, _ in found:
            assert (number, mine) == (count, count // world)
            assert mean == pytest.approx(total / count, rel=1e-12)
        words = f"batch     {BATCH} samples in all per step: {BATCH // 2} on each of 2 data ranks; step.loss"
        assert [words in said for *_, said in found] == [world > 1, *[False] * (world - 1)]


class Drawing(nn.Module):
    """Draws in modules, in functions and in torch's own layers, and takes statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = nn.Linear(6, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.1)
        self.cell = nn.LSTM(16, 16, 2, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.tail = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.entry(x)))[:, None]
        x = self.encoder(self.cell(x)[0])[:, 0]
        return self.tail(nn.functional.dropout(x, 0.1, self.training))


def attributes(model: nn.Module) -> dict[str, set[str]]:
    return {name: set(vars(each)) for name, each in model.named_modules()}


def kept(folder: str, zero: int, *, fails: bool) -> list[str]:
    world = torch.distributed.get_world_size()
    torch.manual_seed(1)
    model = Drawing().double()
    before, drop = attributes(model), model.drop
    try:
        with session_of(folder, plan_for(world, zero)) as session:
            state = prepared(session, model, InOrder(), batch_size=BATCH)
            for batch in state.batches(2):
                state.step(batch)
            model.drop.p = 0.3
            if fails and world == 1:
                raise OSError("of the loop")
    except OSError:
        pass
    assert attributes(model) == before
    assert model.drop is drop
    assert drop.p == 0.3
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    same = torch.load(file, weights_only=False)
    x = next(iter(InOrder()))[0]
    assert torch.equal(same.eval()(x), model.eval()(x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert set(torch.load(file, weights_only=True)) == set(model.state_dict())
    return [str(arg) for _, arg, _ in pickletools.genops(pickle.dumps(model)) if "weft" in str(arg)]


@pytest.mark.parametrize(("world", "zero", "fails"), [(1, 0, False), (1, 0, True), (2, 0, False), (2, 1, False)])
def test_after_a_session_the_model_is_plain(
    ranks: RankPool, tmp_path: Path, world: int, zero: int, fails: bool
) -> None:
    assert ranks.run(world, kept, str(tmp_path), zero, fails=fails) == [[]] * world

"""The ledger of a session: what its loop really trained on, over loads and starts, and where none can be kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from weft.cli import run
from weft.errors import DataError, RecipeError

ORDERS = ("shuffled", "in order", "drop_last")


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return F.cross_entropy(outputs, batch[1], reduction="sum"), len(batch[1])


class Endless(IterableDataset[list[Tensor]]):
    def __iter__(self) -> Any:
        while True:
            yield [torch.zeros(8), torch.tensor(1)]


def train(
    folder: Path, *, loads: bool = False, order: str = "shuffled", skip: int = 0, again: int = 0, back: int = 0
) -> None:
    """Three passes of four steps, with a save every two.  The loop skips a batch, trains on one twice, or loads."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    data = TensorDataset(torch.randn(30, 8), torch.randint(0, 4, (30,)))
    loader = DataLoader(data, batch_size=8, shuffle=order == "shuffled", drop_last=order == "drop_last")
    with weft.session(weft.Plan(), folder=folder, ledger=True, quiet=True, prove="never") as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        if loads:
            state.load()
        for number, batch in enumerate(state.batches(12 - state.steps), 1):
            if number == skip:
                continue
            made_anew = [tensor.clone() for tensor in batch]
            step = state.step(made_anew if number % 2 else batch).step
            if number == again:
                state.step(batch)
            if step % 2 == 0:
                state.save()
            if step == back:
                break
        if back:
            state.load(folder / "checkpoints" / "step-000004")
            for batch in state.batches(8):
                state.step(batch)


def ledger_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    status = run(["data", "ledger", str(folder)])
    said = capsys.readouterr()
    return status, said.out + said.err


@pytest.mark.parametrize("order", ORDERS)
def test_a_session_that_goes_on_has_one_history(tmp_path: Path, capsys: pytest.CaptureFixture[str], order: str) -> None:
    train(tmp_path / "run", order=order, back=6)
    train(tmp_path / "run", order=order, loads=True)
    status, said = ledger_of(tmp_path / "run", capsys)
    assert status == 0, said
    assert "history   12 steps by 3 generations; 8 steps were done again and do not count" in said
    assert f"epochs    {4 if order == 'drop_last' else 3} whole: each of {24 if order == 'drop_last' else 30}" in said


@pytest.mark.parametrize(
    ("skip", "again", "problem"),
    [
        (3, 0, "step 3 lacks positions 16 to 23"),
        (0, 3, "step 4 has positions 16 to 23 of the order twice"),
    ],
)
def test_a_batch_that_is_skipped_or_taken_twice_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: int, again: int, problem: str
) -> None:
    train(tmp_path / "run", skip=skip, again=again)
    status, said = ledger_of(tmp_path / "run", capsys)
    assert status == 1
    assert problem in said


def test_where_no_ledger_can_be_kept_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(RecipeError, match="ledger=True keeps its files in the folder that record=False leaves empty"):
        weft.session(ledger=True, record=False)
    with (
        weft.session(weft.Plan(), folder=tmp_path / "run", ledger=True, quiet=True, prove="never") as session,
        pytest.raises(DataError, match="only iterates, so nobody knows the indices of its samples"),
    ):
        session.prepare(model, optimizer, DataLoader(Endless(), batch_size=8), loss=loss_fn)
    with (
        weft.session(weft.Plan(), folder=tmp_path / "own", ledger=True, quiet=True) as session,
        pytest.raises(RecipeError, match="knows the samples of steps by state.step"),
    ):
        session.prepare(nn.Linear(8, 4))
    (tmp_path / "own").mkdir(exist_ok=True)
    status, said = ledger_of(tmp_path / "own", capsys)
    assert status != 0
    assert "has no ledger. Before the run starts," in said

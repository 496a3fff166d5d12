"""Gradients are reduced while the last backward of a step goes on, and in no other; a wrong guess changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, PLANS, Hands, Net, adversaries, fp64, plainly, samples, seen, under
from pool import RankPool
from test_own_loop import assert_alike
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, Plan
from weft.errors import RecipeError
from weft.techniques.data.gradient_reducer import BucketReducer

Hint = Callable[[int], bool | None]
"""What a loop says of its n-th backward in a step of three."""
HINTS: dict[str, Hint] = {
    "always": lambda number: True,
    "never": lambda number: False,
    "first": lambda number: number == 0,
    "right": lambda number: number == 2,
    "guessed": lambda number: None,
}


def accumulating(hands: Hands, *, hint: str, clips: bool = False) -> tuple[list[float], list[Tensor]]:
    """Mostly two backwards to a step; the guess is wrong in the fourth, and the seventh begins anew."""
    with fp64():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(samples(17 * BATCH), BATCH, shuffle=True)
        model, optimizer, loader = hands.prepare(model, optimizer, loader)
        losses, batches = list[float](), iter(loader)
        for number, backwards in enumerate((2, 2, 2, 3, 2, 2, 3, 1)):
            for place in range(backwards):
                x, y = next(batches)
                loss = F.cross_entropy(model(x), y) / backwards
                how = {} if hands.session is None else {"is_last": HINTS[hint](place)}
                hands.backward(loss, **how)
                losses.append(hands.mean(loss))
                if (number, place) == (6, 1):
                    optimizer.zero_grad()
            if clips:
                losses.append(hands.clip(model, 0.1))
            optimizer.step()
            optimizer.zero_grad()
        return losses, seen(model)


MADE = [
    *((hint, "zero-2") for hint in HINTS),
    ("guessed", "zero-1"),
    ("always", "data of 4"),
    ("guessed", "data of 4"),
    ("guessed", "hybrid"),
]


@pytest.mark.parametrize(("hint", "name"), MADE)
def test_what_is_said_of_a_backward_changes_nothing(ranks: RankPool, hint: str, name: str) -> None:
    loop, plan = partial(accumulating, hint=hint, clips=name == "zero-1"), PLANS[name]
    expected = ranks.run(1, plainly, loop)[0]
    for found in ranks.run(plan.mesh.world_size, under, plan, loop):
        assert_alike(found, expected)


class Sometimes(nn.Module):
    """Has a layer that only some ranks' samples go through."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made, goes = self.first(x), (x[:, :1] > 0.8).to(x.dtype)
        return self.head(made + goes * self.second(made) if bool(goes.any()) else made)


def two_models(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """One backward reaches both, in an order that is not the same on all ranks."""
    with fp64():
        torch.manual_seed(0)
        encoder, decoder = Sometimes(), Sometimes()
        coding, decoding = (torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (encoder, decoder))
        loader = DataLoader(samples(48), 4)
        encoder, coding, decoder, decoding, loader = hands.prepare(encoder, coding, decoder, decoding, loader)
        losses = list[float]()
        for x, _ in loader:
            loss = (decoder(encoder(x).tanh()) - x).square().mean()
            hands.backward(loss)
            for each in (coding, decoding):
                each.step()
                each.zero_grad()
            losses.append(hands.mean(loss))
        return losses, []


@pytest.mark.parametrize("name", ["data", "zero-1", "zero-2"])
def test_models_of_one_backward_are_reduced_in_one_order(ranks: RankPool, name: str) -> None:
    for loop in (two_models, adversaries):
        expected = ranks.run(1, plainly, loop)[0]
        for found in ranks.run(2, under, PLANS[name], loop):
            assert_alike(found, expected)


def begun(zero: int) -> list[int]:
    """Buckets that are under way behind each backward of steps of two."""
    plan = Plan(mesh=MeshPlan(shard=2), data_parallel=DataParallelPlan(zero=zero))  # type: ignore[arg-type]
    counts = list[int]()
    with weft.session(quiet=True, record=False, plan=plan) as session:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = session.prepare(model, optimizer)
        for number in range(8):
            session.backward(model(torch.ones(4, 6)).mean())
            (store,) = session.state(model)._parallel.stores.stores  # pyright: ignore[reportPrivateUsage]
            assert isinstance(store, BucketReducer)
            counts.append(sum(state.launched for state in store._states))  # pyright: ignore[reportPrivateUsage]
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return counts


def test_only_the_last_backward_begins_reductions(ranks: RankPool) -> None:
    """It is known from the third step on, when two have had as many."""
    for zero in (1, 2):
        for counts in ranks.run(2, begun, zero):
            assert counts[:5] == [0] * 5
            assert counts[6] == 0
            assert counts[5] > 0
            assert counts[7] > 0


def compressed() -> str:
    plan = Plan(mesh=MeshPlan(replicate=2), data_parallel=DataParallelPlan(compression="int8"))
    with weft.session(quiet=True, record=False, plan=plan, compression=("int8",)) as session:
        model = Net()
        model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(3):  # guesses nothing
            session.backward(model(torch.ones(4, 6)).mean())
            session.backward(model(torch.ones(4, 6)).mean())
            optimizer.step()
            optimizer.zero_grad()
        session.backward(model(torch.ones(4, 6)).mean(), is_last=True)
        with pytest.raises(RecipeError) as caught:
            session.backward(model(torch.ones(4, 6)).mean())
        return str(caught.value)


def test_compressed_gradients_are_sent_once(ranks: RankPool) -> None:
    for told in ranks.run(2, compressed):
        assert "a backward that was said to be the last" in told

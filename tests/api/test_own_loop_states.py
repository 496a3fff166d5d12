"""What a loop saves and loads by `optimizer.state_dict()` is plain PyTorch's, and what it cannot be is refused."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import BATCH, PLANS, Hands, Net, fp64, plainly, samples, under
from pool import RankPool
from torch import Tensor
from torch.utils.data import DataLoader

from weft.errors import RecipeError

KINDS = {"adam": torch.optim.AdamW, "sgd": partial(torch.optim.SGD, momentum=0.9)}
Halves = tuple[dict[str, Any], dict[str, Any]]


def half(hands: Hands, *, kind: str, given: Halves | None, late: bool = False) -> tuple[list[float], list[Tensor]]:
    """Three steps of a classifier, from where `given` says, which is loaded behind the first forward if `late`; at the
    end what the script would save."""
    with fp64():
        torch.manual_seed(0)
        model = Net()
        optimizer = KINDS[kind]([{"params": model.parameters(), "lr": 1e-2}])
        if given is not None:
            model.load_state_dict(given[0])
        loader = DataLoader(samples(24), BATCH)
        model, optimizer, loader = hands.prepare(model, optimizer, loader)
        if given is not None and not late:
            optimizer.load_state_dict(copy.deepcopy(given[1]))
        losses = list[float]()
        for x, y in loader:
            outputs = model(x)
            if given is not None and late and not losses:
                optimizer.load_state_dict(copy.deepcopy(given[1]))
            loss = F.cross_entropy(outputs, y)
            hands.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(hands.mean(loss))
        found: Any = (model.state_dict(), optimizer.state_dict()) if given is None else []
        return losses, found


def going_on(plan: str, *, kind: str, given: Halves, late: bool) -> list[float]:
    return under(PLANS[plan], partial(half, kind=kind, given=given, late=late))[0]


def saving(plan: str, *, kind: str) -> Any:
    return under(PLANS[plan], partial(half, kind=kind, given=None))[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", ["alone", "data", "zero-1", "zero-3"])
def test_a_plain_state_goes_on_under_a_plan(ranks: RankPool, plan: str, kind: str) -> None:
    given: Any = plainly(partial(half, kind=kind, given=None))[1]
    wanted, _ = plainly(partial(half, kind=kind, given=given))
    for late in (False, True) if plan != "zero-3" else (False,):
        for losses in ranks.run(PLANS[plan].mesh.world_size, going_on, plan, kind=kind, given=given, late=late):
            assert losses == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_saved_under_a_plan_is_plain_pytorchs(ranks: RankPool, kind: str) -> None:
    wanted: Any = plainly(partial(half, kind=kind, given=None))[1]
    for weights, state in ranks.run(2, saving, "data", kind=kind):
        assert {**state, "state": None} == {**wanted[1], "state": None}
        _close(weights.values(), wanted[0].values())
        for number, kept in wanted[1]["state"].items():
            _close([torch.as_tensor(state["state"][number][key]) for key in kept], map(torch.as_tensor, kept.values()))


def test_a_share_of_the_state_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RecipeError, match=r"would hold this rank's share of the states only. Write `session.save"):
        ranks.run(2, saving, "zero-1", kind="adam")


def _close(found: Any, wanted: Any) -> None:
    pairs: Sequence[tuple[Tensor, Tensor]] = list(zip(found, wanted, strict=True))
    for one, other in pairs:
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)

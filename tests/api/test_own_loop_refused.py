"""What a loop of its own steps cannot do is refused with the line to write; nothing speaks of `state.step`."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_loops import PLANS, Net, samples
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import MeshPlan, Plan
from weft.errors import DataError, PlanError, RecipeError, WeftError


@pytest.fixture
def session() -> Iterator[weft.Session]:
    with weft.session(quiet=True, record=False) as opened:
        yield opened


def prepared(session: weft.Session, model: nn.Module | None = None) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Net().to(torch.get_default_dtype()) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.prepare(model, optimizer, DataLoader(samples(), 8, collate_fn=of_dtype))


def of_dtype(rows: list[Any]) -> tuple[Tensor, Tensor]:
    x, y = torch.utils.data.default_collate(rows)
    return x.to(torch.get_default_dtype()), y


def loss_of(model: nn.Module, loader: Any) -> Tensor:
    x, y = next(iter(loader))
    return F.cross_entropy(model(x), y)


def backward_of_its_own(model: nn.Module, loader: Any) -> None:
    loss_of(model, loader).backward()


def says(error: type[WeftError], text: str, act: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text) as caught:
        act()
    assert "state.step" not in str(caught.value)


def test_steps_that_would_be_wrong(session: weft.Session) -> None:
    model, optimizer, loader = prepared(session)
    says(RecipeError, "has had its first forward", lambda: session.backward(torch.ones((), requires_grad=True)))
    says(RecipeError, "has no state yet", lambda: session.state(model))
    says(RecipeError, r"Write `session.backward\(loss\)`", partial(backward_of_its_own, model, loader))
    optimizer.zero_grad()
    says(DataError, "wants a scalar, and got a tensor of", lambda: session.backward(model(samples()[:3][0].float())))
    says(RecipeError, "has no gradient", lambda: session.backward(loss_of(model, loader).detach()))
    loss = loss_of(model, loader)
    optimizer.zero_grad()
    session.backward(loss)
    says(RecipeError, r"step\(closure\)", partial(optimizer.step, float))
    says(RecipeError, "of the 8 parameters", lambda: session.clip_grad_norm_(model.head.parameters(), 1.0))  # type: ignore[union-attr, operator]
    optimizer.step()
    says(RecipeError, "second optimizer.step", optimizer.step)
    session.backward(loss_of(model, loader))
    says(RecipeError, r"nothing has cleared them since. Call\s+optimizer.zero_grad", optimizer.step)
    optimizer.zero_grad()
    optimizer.step()  # without gradients, which changes nothing
    session.backward(loss_of(model, loader))
    assert float(session.clip_grad_norm_(model, 1.0)) > 0
    says(RecipeError, "came after the gradients of this step were reduced", lambda: session.backward(loss))
    optimizer.step()
    says(RecipeError, "in a model that this session has prepared", lambda: session.prepare(model))


def test_optimizers_that_are_not_prepared(session: weft.Session) -> None:
    model, _, loader = prepared(session)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    model.head.weight.grad = torch.ones_like(model.head.weight)  # type: ignore[union-attr]
    says(RecipeError, "another optimizer", other.step)
    session.prepare(other)
    says(RecipeError, "2 of the optimizers", lambda: loss_of(model, loader))


def test_the_loops_gradients_are_parts_of_a_sum(ranks: RankPool) -> None:
    for told in ranks.run(2, clipped_by_torch):
        assert "session.clip_grad_norm_(model, 1.0)" in told[0]
        assert told[1] == "cleared"


def clipped_by_torch() -> list[str]:
    with weft.session(quiet=True, record=False, plan=Plan(mesh=MeshPlan(replicate=2))) as session:
        model, optimizer, loader = prepared(session)
        session.backward(loss_of(model, loader))
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(RecipeError) as caught:
            optimizer.step()
        optimizer.zero_grad()
        session.backward(loss_of(model, loader))
        optimizer.step()
        for parameter in model.parameters():
            parameter.grad = None  # in place of zero_grad()
        session.backward(loss_of(model, loader))
        optimizer.step()
        return [str(caught.value), "cleared"]


def cut_in_stages() -> str:
    plan = Plan(mesh=MeshPlan(pipeline=2))
    with weft.session(quiet=True, record=False, plan=plan) as session, pytest.raises(PlanError) as caught:
        prepared(session)
    return str(caught.value)


def test_plans_that_no_such_loop_can_have(ranks: RankPool) -> None:
    for told in ranks.run(2, cut_in_stages):
        assert "no rank can call it as a whole" in told
        assert "loss=…" in told


def other_forward() -> str:
    with pytest.raises(WeftError) as caught:
        _apart()
    return str(caught.value)


def _apart() -> None:
    with weft.session(quiet=True, record=False, plan=Plan(mesh=MeshPlan(replicate=2))) as session:
        model, _, loader = prepared(session)
        loss_of(model, loader) if session.rank == 0 else session.gather(torch.ones(1))


def test_ranks_that_do_different_things_say_so(ranks: RankPool) -> None:
    for told in ranks.run(2, other_forward):
        assert "session.gather()" in told
        assert "a pass through loader 1" in told


def test_a_model_leaves_as_it_came(ranks: RankPool) -> None:
    for plain in ranks.run(2, left):
        assert plain


def left() -> bool:
    """Plain before its first forward, and after the session."""
    with weft.session(plan=PLANS["data"], permit=("fp64",), quiet=True, record=False) as session:
        torch.set_default_dtype(torch.float64)
        model = Net()
        kinds = [type(each) for each in model.modules()]
        model, optimizer, loader = prepared(session, model)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            copied(samples().tensors[0])  # which begins nothing
            assert b"weft" not in pickle.dumps(copied)
        session.backward(loss_of(model, loader))
        optimizer.step()
    torch.set_default_dtype(torch.float32)
    assert [type(each) for each in model.modules()] == kinds
    weights = [type(each) for each in model.parameters()]
    own = [name for each in model.modules() for name, value in vars(each).items() if "weft" in type(value).__module__]
    assert not {*own, "_call_impl", "zero_grad"} & {name for each in model.modules() for name in vars(each)}
    return weights == [nn.Parameter] * len(weights) and b"weft" not in pickle.dumps(model)

"""Steps whose forwards, losses and backwards a loop writes itself: the same under every plan, or refused."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import RankPool
from session_places import agent, as_launched
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError, PlanError, RecipeError, WeftError

BATCH, LENGTH, VOCABULARY, STEPS = 8, 5, 11, 3


class Block(nn.Module):
    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class Policy(nn.Module):
    """Embeds tokens; gives logits and a value, of which a loss may use one alone."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList(Block(8, dropout) for _ in range(2))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied
        self.value = nn.Linear(8, 1)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x), self.value(x).squeeze(-1)


def policy(dropout: float) -> Policy:
    torch.manual_seed(0)
    return Policy(dropout).double()


def loader() -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    rows = [
        {
            "tokens": torch.randint(0, VOCABULARY, (LENGTH,), generator=draw),
            "other": torch.randint(0, VOCABULARY, (LENGTH,), generator=draw),
            "mask": torch.rand(LENGTH, generator=draw) < 0.1 + 0.1 * (number % 8),
        }
        for number in range(32)
    ]
    return DataLoader(rows, batch_size=BATCH, shuffle=True)  # type: ignore[arg-type]


def losses_of(model: nn.Module, part: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A sum over masked tokens, a mean over samples that joins two forwards, and one of the values alone."""
    logits, values = model(part["tokens"])
    others, _ = model(part["other"])
    masked = F.cross_entropy(logits.flatten(0, 1), part["other"].flatten(), reduction="none")
    pulled = (logits.mean(1) - others.mean(1)).square().mean()
    return (masked * part["mask"].flatten()).sum(), pulled, values.square().mean()


def plan_for(data: int = 1, size: int = 2, zero: int = 0, tensor: int = 1, shares: Any = None) -> Plan:
    mesh = MeshPlan(shard=data, tensor=tensor) if zero else MeshPlan(replicate=data, tensor=tensor)
    return Plan(
        mesh=mesh,
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=size, per_step=shares or BATCH // size // data),
        compute=ComputePlan(precision="fp64"),
    )


def manual_loop(plan: Plan, folder: str, dropout: float) -> tuple[list[float], list[float], Tensor]:
    """Losses, gradient norms, and a weight after the last step."""
    model, found, norms = policy(dropout), list[float](), list[float]()
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        split = {"*.up": "column", "*.down": "row"} if plan.mesh.tensor > 1 else ()
        state = session.prepare(
            model,
            optimizer,
            loader(),
            loss=lambda outputs, batch: outputs[1].mean(),
            inputs={"tokens": "tokens"},
            split=split,
            max_grad_norm=1.0,
        )
        for batch in state.batches(STEPS):
            with state.manual_step(batch) as step:
                tokens = step.total(batch["mask"].sum())
                for part in step.parts():
                    masked, pulled, value = losses_of(state.model, part)
                    step.backward(masked, of=tokens, retain_graph=True)
                    step.backward(pulled + value)
            found.append(step.event.loss)
            norms.append(step.event.gradient_norm)
        return found, norms, logits_of(state)


def logits_of(state: Any) -> Tensor:
    tokens = torch.arange(LENGTH).expand(4, LENGTH)
    return state.predict([{"tokens": tokens}], outputs=lambda outputs, batch: outputs[0])


def plain_loop() -> tuple[list[float], list[float], Tensor]:
    """The same in plain torch, with each whole batch at once."""
    model, found, norms = policy(0.0), list[float](), list[float]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in batches():
        masked, pulled, value = losses_of(model, batch)
        loss = masked / batch["mask"].sum() + pulled + value
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        found.append(loss.item())
    return found, norms, model(torch.arange(LENGTH).expand(4, LENGTH))[0].detach()


def batches() -> list[dict[str, Tensor]]:
    """The batches of one process, as a session gives them."""
    with weft.session(plan=plan_for(size=BATCH), permit=("fp64",), record=False, quiet=True) as session:
        model = policy(0.0)
        optimizer = torch.optim.SGD(model.parameters())
        state = session.prepare(model, optimizer, loader(), loss=lambda o, b: o[1].mean(), inputs={"tokens": "tokens"})
        return list(state.batches(STEPS))


PLANS = {
    "parts": plan_for(),
    "uneven parts": plan_for(2, 1, shares=(5, 3)),
    "data": plan_for(2),
    "zero-1": plan_for(2, 1, zero=1),
    "zero-2": plan_for(2, 1, zero=2),
    "zero-3": plan_for(2, 2, zero=3),
    "zero-3 of 4": plan_for(4, 1, zero=3),
    "tensor": plan_for(1, 4, tensor=2),
    "data and tensor": plan_for(2, 2, zero=1, tensor=2),
}


def assert_alike(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=1e-10, atol=1e-12)


def test_a_manual_step_is_plain_torchs(ranks: RankPool, tmp_path) -> None:
    (found,) = ranks.run(1, manual_loop, plan_for(size=BATCH), str(tmp_path), 0.0)
    assert_alike(found, ranks.run(1, plain_loop)[0])


@pytest.mark.parametrize("name", PLANS)
def test_a_manual_step_is_the_same_under_every_plan(ranks: RankPool, tmp_path, name) -> None:
    """With dropout, which differs between the two forwards of a part."""
    (alone,) = ranks.run(1, manual_loop, plan_for(size=BATCH), str(tmp_path / "1"), 0.2)
    plan = PLANS[name]
    for found in ranks.run(plan.mesh.world_size, manual_loop, plan, str(tmp_path / "2"), 0.2):
        assert_alike(found, alone)


def prepared(session: weft.Session, dropout: float = 0.0) -> Any:
    model = policy(dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.prepare(model, optimizer, loader(), loss=mean_value, inputs={"tokens": "tokens"})


def mean_value(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    return outputs[1].mean(1).sum(), len(outputs[1])


def test_the_first_forward_of_a_part_is_that_of_a_step_and_the_next_drops_others(tmp_path) -> None:
    plan = plan_for(size=4)
    with weft.session(plan=plan, permit=("fp64",), folder=tmp_path, quiet=True) as session:
        state = prepared(session, dropout=0.5)
        (batch,), firsts = state.batches(1), list[float]()
        with state.manual_step(batch) as step:
            for part in step.parts():
                with torch.no_grad():
                    first, second = (state.model(part["tokens"])[1].mean() for _ in range(2))
                    state.model.eval()
                    state.model(part["tokens"])  # in evaluation, which draws nothing and counts for nothing
                    state.model.train()
                assert not torch.equal(first, second)
                step.backward(state.model(part["tokens"])[1].mean())
                firsts.append(float(first))
        again = prepared(session, dropout=0.5)
        assert again.step(batch).loss == pytest.approx(sum(firsts) / 2, rel=1e-12)
        assert step.event.count == BATCH


def slip(kind: str, folder: str) -> str:
    """What a session says of a loop that does something which cannot be kept; weights are as they were after it."""
    plan = plan_for(zero=3, data=2) if kind == "raw backward under zero-3" else plan_for(data=2, size=2)
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session, dropout=0.1 if kind == "rows" else 0.0)
        for batch in state.batches(1):
            state.step(batch)  # gradients of a step that went well are no mistake of the next
        (batch,) = state.batches(1)
        before = logits_of(state)
        try:
            _slipped(kind, state, batch)
        except (WeftError, ValueError) as error:
            after = logits_of(state)
            assert torch.equal(before, after)
            (again,) = state.batches(1)  # the session goes on
            with state.manual_step(again) as step:
                for part in step.parts():
                    step.backward(state.model(part["tokens"])[1].square().mean())
            assert step.event.gradient_norm > 0
            return f"{type(error).__name__}: {error}"
    return "nothing was said"


def _slipped(kind: str, state: Any, batch: Any) -> None:
    if kind == "backward outside a part":
        with state.manual_step(batch) as step:
            step.backward(state.model(batch["tokens"])[1].mean())
    with state.manual_step(batch) as step:
        if kind == "event inside":
            print(step.event)
        for part in step.parts():
            logits, values = state.model(torch.cat([part["tokens"]] * 2) if kind == "rows" else part["tokens"])
            loss = values.square().mean()
            if kind.startswith("raw backward"):
                loss.backward()
            elif kind == "optimizer":
                state.optimizer.step()
            elif kind == "draw":
                loss = loss + torch.rand(()).to(loss)
            elif kind == "not a scalar":
                step.backward(values)
            elif kind == "no gradient":
                step.backward(loss.detach())
            elif kind == "a bare total":
                step.backward(loss, of=3)
            elif kind == "an error of the user's":
                step.backward(loss)
                raise ValueError("mine")
            elif kind == "a step inside":
                state.step(batch)
            step.backward(loss)
            if kind == "clipped":
                nn.utils.clip_grad_norm_(state.model.parameters(), 1e-3)
            elif kind == "zeroed":
                state.model.zero_grad()
            if kind == "left early":
                break
        if kind == "twice":
            list(step.parts())


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("backward outside a part", r"belongs to a part: write it in `for part in step\.parts\(\)"),
        ("event inside", r"has its event after the block"),
        ("rows", r"called with 4 rows where the part has 2 samples, and it draws"),
        ("raw backward", r"Write step\.backward\(loss\) in place of loss\.backward\(\)"),
        ("raw backward under zero-3", r"Write step\.backward\(loss\) in place of loss\.backward\(\)"),
        ("optimizer", r"optimizer\.step\(\)"),
        ("draw", r"drew from torch's generator.*Draw by state\.randn"),
        ("not a scalar", r"wants a scalar, and got a tensor of \(2, 5\)"),
        ("no gradient", r"this loss has no gradient"),
        ("a bare total", r"of=3\) wants what step\.total"),
        ("an error of the user's", r"ValueError: mine"),
        ("clipped", r"was changed inside a manual step, as clip_grad_norm_"),
        ("zeroed", r"was changed inside a manual step"),
        ("a step inside", r"state\.step\(\) was called inside a manual step of the same model"),
        ("left early", r"has taken 1 of the 2 parts"),
        ("twice", r"gone through already"),
    ],
)
def test_what_a_manual_step_cannot_keep_is_refused_and_changes_nothing(ranks: RankPool, tmp_path, kind, told) -> None:
    import re

    for text in ranks.run(2, slip, kind, str(tmp_path)):
        assert re.search(told, text, re.DOTALL), text


def refused_plan(plan: Plan, folder: str) -> str:
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        (batch,) = state.batches(1)
        with pytest.raises(PlanError) as caught, state.manual_step(batch):
            pass
        return str(caught.value)


def test_plans_under_which_no_rank_can_call_the_model_say_so(ranks: RankPool, tmp_path) -> None:
    for text in ranks.run(2, refused_plan, plan_for(2, 1, zero=3, shares=(5, 3)), str(tmp_path)):
        assert "ranks with 3 and 5 parts" in text
        assert "data_parallel.zero = 2" in text


def of_a_whole_batch(folder: str) -> str:
    def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
        return outputs.softmax(0).square().sum(), len(outputs)

    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with weft.session(plan=plan_for(2, BATCH // 2), permit=("fp64",), folder=folder, quiet=True) as session:
        model = nn.Linear(4, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, DataLoader(rows, batch_size=BATCH), loss=loss)  # type: ignore[arg-type]
        (batch,) = state.batches(1)
        with pytest.raises(PlanError) as caught, state.manual_step(batch):
            pass
        return str(caught.value)


def test_a_loss_of_the_whole_batch_has_no_parts(ranks: RankPool, tmp_path) -> None:
    for text in ranks.run(2, of_a_whole_batch, str(tmp_path)):
        assert "is no sum over samples" in text
        assert "Use state.step(batch)" in text


def test_statistics_of_a_step_that_is_given_up_are_put_back(tmp_path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plan = plan_for(size=BATCH)
    with weft.session(plan=plan, permit=("fp64",), folder=tmp_path, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, DataLoader(rows, batch_size=BATCH), loss=lambda o, b: o.mean())  # type: ignore[arg-type]
        (batch,) = state.batches(1)
        before = state.model[1].running_mean.clone()
        with pytest.raises(ZeroDivisionError), state.manual_step(batch) as step:  # noqa: PT012
            for part in step.parts():
                step.backward(state.model(part).square().mean())
            raise ZeroDivisionError
        assert torch.equal(state.model[1].running_mean, before)


def test_totals_that_are_no_numbers_are_refused(tmp_path) -> None:
    with weft.session(plan=plan_for(size=BATCH), permit=("fp64",), folder=tmp_path, quiet=True) as session:
        state = prepared(session)
        (batch,) = state.batches(1)
        with pytest.raises(DataError, match="finite"), state.manual_step(batch) as step:
            step.total(float("nan"))
        with pytest.raises(RecipeError, match="several forwards"), state.manual_step(batch) as step:
            raise RecipeError("several forwards")  # a user's own comes through as it is


def _some_ranks_backward(folder: str) -> None:
    with weft.session(plan=plan_for(2, 2, zero=3), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        (batch,) = state.batches(1)
        with state.manual_step(batch) as step:
            for part in step.parts():
                loss = state.model(part["tokens"])[1].mean()
                if session.rank == 0:
                    step.backward(loss)


def some_ranks_backward(folder: str, port: int) -> str:
    with as_launched(port):
        try:
            _some_ranks_backward(folder)
        except WeftError as error:
            text = str(error)
        gc.collect()  # of the groups that the traceback held
    return text


def test_a_backward_of_some_ranks_alone_is_named_where_it_exchanges_gradients(ranks: RankPool, tmp_path) -> None:
    with agent() as port:
        found = ranks.run(2, some_ranks_backward, str(tmp_path), port)
    for text in found:
        assert "the ranks do different things: rank 0 is in step.backward() at test_session_manual.py:" in text


def two_models(plan: Plan, folder: str) -> list[float]:
    """A critic takes steps inside a generator's block, and is judged there by a loader of the loop's own."""
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        made, critic = prepared(session), prepared(session)
        found: list[float] = []
        for number, batch in enumerate(made.batches(STEPS)):
            for _ in range(number):
                critic.step(batch)
            with made.manual_step(batch) as step:
                found += [critic.step(batch).loss, critic.evaluate(DataLoader(loader().dataset, batch_size=5))]
                for part in step.parts():
                    values = made.model(part["tokens"])[1]
                    with critic.frozen():
                        step.backward((values - critic.model(part["tokens"])[1]).square().mean())
            found.append(step.event.loss)
        return found


@pytest.mark.filterwarnings("ignore:state.batches")
def test_another_models_steps_and_evaluations_go_inside_a_block(ranks: RankPool, tmp_path) -> None:
    (alone,) = ranks.run(1, two_models, plan_for(size=BATCH), str(tmp_path / "1"))
    for found in ranks.run(2, two_models, plan_for(2), str(tmp_path / "2")):
        assert found == pytest.approx(alone, rel=1e-10)


def losses_with(plan: Plan, folder: str, *, zeroed: bool) -> list[float]:
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state, found = prepared(session), list[float]()
        for batch in state.batches(STEPS):
            if zeroed:
                state.model.zero_grad()  # sets gradients to None, which are views of what is reduced
            found.append(state.step(batch).loss)
        return found


@pytest.mark.parametrize("zero", [0, 1, 2])
def test_gradients_that_were_set_to_none_are_trained_on(ranks: RankPool, tmp_path, zero) -> None:
    plan = plan_for(2, 2, zero=zero)
    untouched, zeroed = (
        ranks.run(2, losses_with, plan, str(tmp_path / str(way)), zeroed=way)[0] for way in (False, True)
    )
    assert zeroed == untouched
    assert len(set(untouched)) == STEPS

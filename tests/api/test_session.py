"""A loop of one's own: the same on any number of ranks, resumed exactly, and what cannot be right is refused."""

from __future__ import annotations

import contextlib
import copy
import io
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError, DataError, RecipeError, WeftError
from weft.model.families import CutTable

BATCH = 12


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)).double()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x[:, :3].square())


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def plan_for(world: int, zero: int, shares: tuple[int, ...] | None = None) -> Plan:
    per_step: Any = shares if shares is not None else BATCH // 2 // world
    axes: dict[str, int] = {"shard": world} if zero == 3 else {"replicate": world}
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=2, per_step=per_step),
        compute=Plan().compute.__class__(precision="fp64"),
    )


def loop(plan: Plan, folder: str, epochs: int, resume: bool = False) -> tuple[list[float], float, int]:
    """Losses of all steps, an evaluation over an uneven set, and the number of steps done."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    losses: list[float] = []
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn, max_grad_norm=1.0)
        if resume:
            state.load()
        for _ in range(epochs):
            for batch in state.batches():
                losses.append(state.step(batch).loss)
                scheduler.step()
        validation = state.evaluate(DataLoader(samples(), batch_size=16))
        state.save()
        assert state.model is model
    return losses, validation, state.steps


@pytest.mark.parametrize(
    ("world", "zero", "shares"), [(2, 1, None), (3, 2, None), (2, 3, None), (2, 0, (1, 5)), (3, 1, (3, 2, 1))]
)
def test_a_loop_is_the_same_on_any_number_of_ranks(ranks, tmp_path, world, zero, shares) -> None:
    alone = ranks.run(1, loop, plan_for(1, 0), str(tmp_path / "alone"), 2)[0]
    together = ranks.run(world, loop, plan_for(world, zero, shares), str(tmp_path / "together"), 2)
    assert len(alone[0]) == 10  # as len(loader) says: 50 samples in batches of 12 run on over the end of a pass
    for losses, validation, _ in together:
        assert losses == pytest.approx(alone[0], rel=1e-12)
        assert validation == pytest.approx(alone[1], rel=1e-12)


@pytest.mark.parametrize(("world", "zero"), [(1, 0), (2, 1), (2, 3)])
def test_a_resumed_loop_goes_on_bit_for_bit(ranks, tmp_path, world, zero) -> None:
    whole = ranks.run(world, loop, plan_for(world, zero), str(tmp_path / "whole"), 2)[0]
    first = ranks.run(world, loop, plan_for(world, zero), str(tmp_path / "cut"), 1)[0]
    second = ranks.run(world, loop, plan_for(world, zero), str(tmp_path / "cut"), 1, resume=True)[0]
    assert first[0] + second[0] == whole[0]
    assert second[1:] == whole[1:]


def adversaries(plan: Plan, folder: str) -> list[float]:
    """A generator and a critic in one loop, each frozen while the other learns."""
    torch.manual_seed(1)
    maker, critic = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True)
    losses: list[float] = []
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:

        def fool(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
            return -critic_state.model(outputs).sum(), len(outputs)

        def tell(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
            with torch.no_grad():
                made = maker_state.model(batch[0])
            return (critic_state.model(made) - outputs).square().sum(), len(outputs)

        maker_state = session.prepare(maker, torch.optim.SGD(maker.parameters(), lr=0.05), loader, loss=fool)
        critic_state = session.prepare(critic, torch.optim.SGD(critic.parameters(), lr=0.05), loader, loss=tell)
        for batch in maker_state.batches():
            with critic_state.frozen():
                losses.append(maker_state.step(batch).loss)
            losses.append(critic_state.step(batch).loss)
    return losses


def test_two_models_learn_against_each_other(ranks, tmp_path) -> None:
    alone = ranks.run(1, adversaries, plan_for(1, 0), str(tmp_path / "a"))[0]
    for losses in ranks.run(2, adversaries, plan_for(2, 1), str(tmp_path / "b")):
        assert losses == pytest.approx(alone, rel=1e-12)


def plain_loop() -> list[float]:
    """The same loop by hand, without dropout: what the one-process session must equal."""
    model = build().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses: list[float] = []
    data = samples().tensors
    for first in range(0, 48, BATCH):
        x, y = (tensor[first : first + BATCH] for tensor in data)
        loss = (model(x) - y).square().sum() / BATCH
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def test_one_process_equals_a_loop_by_hand(tmp_path) -> None:
    model = build().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    loader = DataLoader(samples(), batch_size=BATCH)
    with weft.session(plan=plan_for(1, 0), permit=("fp64",), folder=tmp_path, quiet=True) as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn, max_grad_norm=1.0)
        losses = [state.step(batch).loss for batch in state.batches(4)]
    assert losses == pytest.approx(plain_loop(), rel=1e-12)


def test_a_scalar_loss_is_a_mean_and_is_said_to_be(tmp_path) -> None:
    def mean(outputs: Tensor, batch: list[Tensor]) -> Tensor:
        return (outputs - batch[1]).square().sum() / len(outputs)

    found: list[list[float]] = []
    for loss in (loss_fn, mean):
        model = build().eval()
        loader = DataLoader(samples(), batch_size=BATCH)
        with weft.session(plan=plan_for(1, 0), permit=("fp64",), folder=tmp_path, quiet=True) as session:
            state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2), loader, loss=loss)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                found.append([state.step(batch).loss for batch in state.batches(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-12)
    assert "taken as the mean over the batch's samples" in str(seen[0].message)


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Any]:
    with weft.session(folder=tmp_path, permit=("fp32",), quiet=True) as made:
        yield made


def refuse(session: Any, match: str, kind: type[WeftError], **changes: Any) -> None:
    model = build().float()
    given: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loader": DataLoader(samples(), batch_size=BATCH),
        "loss": loss_fn,
    } | changes
    if callable(given["optimizer"]):
        given["optimizer"] = given["optimizer"](model)
    with pytest.raises(kind, match=match):
        session.prepare(given.pop("model"), given.pop("optimizer"), given.pop("loader"), **given)


def test_what_cannot_be_prepared_is_refused_with_the_fix(session) -> None:
    other = build()
    refuse(session, "is no parameter of the model", RecipeError, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
    refuse(
        session,
        "trainable parameters .* are in none of the optimizer's groups",
        RecipeError,
        optimizer=lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1),
    )
    refuse(session, "does not say its batch_size", DataError, loader=[samples().tensors])
    words = DataLoader([{"text": "a"}, {"text": "b"}], batch_size=2)  # type: ignore[arg-type]
    refuse(session, r"none of the batch's fields \(text\) is an argument", RecipeError, loader=words)


def test_a_share_of_another_size_is_refused(session) -> None:
    model = build().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (tensor.float() for tensor in samples().tensors)
    state = session.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=BATCH), loss=loss_fn)
    with pytest.raises(DataError, match="this rank's share of a step is 12 of 12 samples, and the batch has 5"):
        state.step([x[:5], y[:5]])


def test_a_stepped_optimizer_is_refused(session) -> None:
    model = build().float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = (tensor.float() for tensor in samples().tensors)
    (copy.deepcopy(model)(x) - y).sum().backward()
    (model(x) - y).sum().backward()
    optimizer.step()
    with pytest.raises(RecipeError, match="has taken steps already"):
        session.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=BATCH), loss=loss_fn)


class Entry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(11, 6), nn.Embedding(11, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.a(tokens) + 3 * self.b(tokens)


class Tail(nn.Module):
    def __init__(self, entry: Entry) -> None:
        super().__init__()
        self.hb, self.ha = nn.Linear(6, 11, bias=False), nn.Linear(6, 11, bias=False)
        self.ha.weight, self.hb.weight = entry.a.weight, entry.b.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return self.ha(hidden) + 2 * self.hb(hidden.tanh())


class TwiceTied(nn.Module):
    """Two ties between the first and the last stage, registered in opposite orders."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))
        self.tail = Tail(self.entry)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.entry(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.tail(hidden)


def tied_twice(pipeline: int, folder: str, *, by_hand: bool = True) -> list[tuple[float, float]]:
    torch.manual_seed(0)
    model = TwiceTied().double()
    tokens = torch.randint(0, 11, (2, 48), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(TensorDataset(tokens[0], tokens[1]), batch_size=BATCH)
    plan = Plan(
        mesh=MeshPlan(pipeline=pipeline),
        microbatch=MicrobatchPlan(size=4, per_step=3),
        compute=Plan().compute.__class__(precision="fp64"),
    )

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)

    table = CutTable(entry="entry", blocks=("blocks.0", "blocks.1"), tail=("tail",))
    cut = table if by_hand else None
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, loader, loss=loss, cut=cut)
        return [(step.loss, step.gradient_norm) for step in map(state.step, state.batches(4))]


def test_two_ties_between_the_same_stages_are_summed_each_with_its_own(ranks, tmp_path) -> None:
    alone = ranks.run(1, tied_twice, 1, str(tmp_path / "a"))[0]
    for by_hand in (True, False):  # by looking, too
        for found in ranks.run(2, tied_twice, 2, str(tmp_path / f"{by_hand}"), by_hand=by_hand):
            assert found == [pytest.approx(pair, rel=1e-12) for pair in alone]


def strays(zero: int, folder: str) -> list[float]:
    """A backward outside a step, between two steps."""
    model = build().eval()
    loader = DataLoader(samples(), batch_size=BATCH)
    norms: list[float] = []
    with weft.session(plan=plan_for(2, zero), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        for batch in state.batches(3):
            with contextlib.suppress(RecipeError):  # it is refused
                (1e4 * state.model(batch[0]).sum()).backward()
            norms.append(state.step(batch).gradient_norm)
    return norms


def test_a_backward_outside_a_step_leaves_no_trace(ranks, tmp_path) -> None:
    expected = ranks.run(2, strays, 0, str(tmp_path / "0"))[0]
    assert max(expected) < 100
    for zero in (1, 2):
        assert ranks.run(2, strays, zero, str(tmp_path / str(zero)))[0] == pytest.approx(expected, rel=1e-12)


def uneven_evaluation(world: int, folder: str) -> float:
    model = build().eval()
    plan = Plan(
        mesh=MeshPlan(shard=world),
        data_parallel=DataParallelPlan(zero=3 if world > 1 else 0),
        microbatch=MicrobatchPlan(size=1, per_step=8 // world),
        compute=Plan().compute.__class__(precision="fp64"),
    )
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        state = session.prepare(model, optimizer, DataLoader(samples(), batch_size=8), loss=loss_fn)
        x, y = samples().tensors
        return state.evaluate(DataLoader(TensorDataset(x[:14], y[:14]), batch_size=8))


def test_an_uneven_validation_set_is_no_deadlock_under_zero3(ranks, tmp_path) -> None:
    alone = ranks.run(1, uneven_evaluation, 1, str(tmp_path / "a"))[0]
    for found in ranks.run(2, uneven_evaluation, 2, str(tmp_path / "b")):
        assert found == pytest.approx(alone, rel=1e-12)


def test_a_load_that_fails_and_counts_below_one_change_nothing(tmp_path) -> None:
    def weighted(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, float]:
        return 0.01 * (outputs - batch[1]).square().sum(), 0.01 * len(outputs)

    found: list[list[tuple[float, float]]] = []
    for attempt, loss in enumerate((loss_fn, loss_fn, weighted)):
        model = build().eval()
        loader = DataLoader(samples(), batch_size=BATCH)
        folder = tmp_path / str(attempt)
        with weft.session(plan=plan_for(1, 0), permit=("fp64",), folder=folder, quiet=True) as session:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            state = session.prepare(model, optimizer, loader, loss=loss)
            if attempt == 1:
                with pytest.raises(CheckpointError, match="holds no checkpoint"):
                    state.load()
            found.append([(step.loss, step.gradient_norm) for step in map(state.step, state.batches(3))])
    assert found[1] == found[0]
    assert found[2] == [pytest.approx(pair, rel=1e-9) for pair in found[0]]


class Batches:
    """A loader that only iterates."""

    batch_size = 4

    def __init__(self) -> None:
        x, y = samples().tensors
        self.all = [[x[at : at + 4].float(), y[at : at + 4].float()] for at in range(0, 48, 4)]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return iter(self.all)


def test_a_loader_that_only_iterates_goes_on_after_a_load(session) -> None:
    model = build().float()
    loader = Batches()
    state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader, loss=loss_fn)
    for number, batch in enumerate(state.batches()):
        state.step(batch)
        if number == 2:
            break
    state.save()
    state.load()
    assert torch.equal(next(iter(state.batches()))[0], loader.all[3][0])


def test_a_model_is_prepared_once_and_a_loader_can_be_gone_through_again(session) -> None:
    model = build().float()
    session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), Batches(), loss=loss_fn)
    again = torch.optim.SGD(model.parameters(), lr=0.01)
    with pytest.raises(RecipeError, match="are in a model that this session has prepared already"):
        session.prepare(model, again, Batches(), loss=loss_fn)
    refuse(session, "which can be gone through only once", DataError, loader=iter(Batches()), batch_size=4)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """A dataset that augments at random, as images are flipped and cropped."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(6, dtype=torch.float64), torch.full((3,), float(index), dtype=torch.float64)


def augmented(world: int, folder: str, resume: bool) -> list[float]:
    model = build().eval()
    losses: list[float] = []
    with weft.session(plan=plan_for(world, 0), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        state = session.prepare(model, optimizer, DataLoader(Noisy(), batch_size=BATCH, shuffle=True), loss=loss_fn)
        if resume:
            state.load()
        for batch in state.batches(2):
            losses.append(state.step(batch).loss)
            if not resume and state.steps == 1:
                state.save()
    return losses


def test_augmentation_is_the_same_on_every_world_and_after_a_resume(ranks, tmp_path) -> None:
    alone = ranks.run(1, augmented, 1, str(tmp_path / "a"), False)[0]
    assert ranks.run(2, augmented, 2, str(tmp_path / "b"), False)[0] == pytest.approx(alone, rel=1e-12)
    assert ranks.run(1, augmented, 1, str(tmp_path / "a"), True)[0][0] == alone[1]


def test_a_sampler_that_repeats_samples_is_followed_not_replaced(session) -> None:
    x, y = (tensor.float() for tensor in samples().tensors)
    data = TensorDataset(x, y)
    sampler = torch.utils.data.RandomSampler(data, replacement=True, num_samples=96)
    model = build().float()
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), loader, loss=loss_fn)
    assert sum(1 for _ in state.batches()) == 8


class Counting(nn.Module):
    """Counts its forwards, as a user's module may."""

    def __init__(self, *, holds_lock: bool = False) -> None:
        super().__init__()
        self.body = build().float()
        self.calls = 0
        self.lock = threading.Lock() if holds_lock else None  # which cannot be copied

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)


def chosen_automatically(folder: str, holds_lock: bool) -> tuple[Plan, int, bool, str]:
    model = Counting(holds_lock=holds_lock)
    loader = DataLoader(TensorDataset(torch.randn(24, 6), torch.randn(24, 3)), batch_size=BATCH)
    optimizer, before = torch.optim.AdamW(model.parameters()), torch.get_rng_state()
    with contextlib.redirect_stdout(io.StringIO()) as told, weft.session(folder=folder) as session:
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        described = model.calls
        same = torch.equal(before, torch.get_rng_state())
        for batch in state.batches():
            state.step(batch)
        return state.plan, described, same, told.getvalue()


@pytest.mark.parametrize("holds_lock", [False, True])
def test_auto_is_searched_and_leaves_the_model_as_it_was(ranks, tmp_path, holds_lock) -> None:
    for plan, calls, same, told in ranks.run(2, chosen_automatically, str(tmp_path), holds_lock):
        assert (plan.mesh.data, plan.mesh.tensor, plan.mesh.pipeline) == (2, 1, 1)
        assert calls == 0
        assert same
        # What cannot be copied cannot be described; then plans are compared by its weights, which is said.
        assert not told or "predicted" in told
        assert not told or ("cannot be described" in told) == holds_lock

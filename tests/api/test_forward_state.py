"""What a forward or a loss changes by itself: kept as one process keeps it, or refused in a sentence that names it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MemoryPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import PlanError, RecipeError

BATCH, STEPS = 8, 4


class Codebook(nn.Module):
    """A vector quantiser whose codes are moving averages, in buffers or in weights without gradients."""

    def __init__(self, *, in_weights: bool = False) -> None:
        super().__init__()
        codes = torch.randn(8, 4)
        if in_weights:
            self.codes = nn.Parameter(codes, requires_grad=False)
        else:
            self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        codes: Tensor = self.codes
        chosen = (x[:, None] - codes).square().sum(2).argmin(1)
        if self.training:
            with torch.no_grad():
                hits = nn.functional.one_hot(chosen, 8).to(x)
                self.counts.mul_(0.9).add_(hits.sum(0), alpha=0.1)
                codes.mul_(0.9).add_(hits.T @ x / self.counts[:, None], alpha=0.1)
        return x + (codes[chosen] - x).detach()


class Bank(nn.Module):
    """Keeps what it made of earlier samples in a list, and adds their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(6, 4), list[Tensor]()

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        made = made + torch.cat(self.kept).mean(0) if self.kept else made
        self.kept = [*self.kept, made.detach()][-3:]
        return made


class Warm(nn.Module):
    """Counts its forwards in a number; from the fifth on it does something else."""

    def __init__(self, after: int = 5) -> None:
        super().__init__()
        self.layer, self.calls, self.after = nn.Linear(6, 4), 0, after

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        return self.layer(x) * (2.0 if self.calls >= self.after else 1.0)


class Rows(nn.Module):
    """Rows of a table that its forward keeps short."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.layer = nn.Embedding(16, 4, max_norm=0.5), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.rows((4 * x[:, 0]).long() % 16)


class Lazy(nn.Module):
    """Builds a table when it is first asked, and remembers what it last saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(6, 4), None
        self.register_buffer("angles", torch.zeros(0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
            self.angles = self.table.cos()
        self.seen = x.detach()
        return self.layer(x * self.table + self.angles)


class Teacher(nn.Module):
    """A second layer whose weights follow the first one's with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.slow = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, own in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
                slow.lerp_(own, 0.1)
        return self.layer(x) + self.slow(x)


class Fading(nn.Module):
    """Dropout whose rate falls from forward to forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.rate = nn.Linear(6, 4), 0.5

    def forward(self, x: Tensor) -> Tensor:
        self.rate *= 0.9
        return nn.functional.dropout(self.layer(x), self.rate, self.training)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.codebook = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), Codebook()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.codebook(self.layer(x))


class Stack(nn.Module):
    """Blocks that follow one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _spectral() -> nn.Module:
    """By hooks: the class that a parametrization makes of a module lives as long as its process."""
    return nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 16)), nn.Tanh(), nn.Linear(16, 4))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "codebook": lambda: nn.Sequential(nn.Linear(6, 4), Codebook(), nn.Linear(4, 4)),
    "codebook in weights": lambda: nn.Sequential(nn.Linear(6, 4), Codebook(in_weights=True), nn.Linear(4, 4)),
    "stack": Stack,
    "bank": Bank,
    "warm": Warm,
    "rows": Rows,
    "lazy": Lazy,
    "spectral": _spectral,
    "teacher": Teacher,
    "counted": lambda: Warm(10**9),
}


def build(kind: str) -> nn.Module:
    torch.manual_seed(5)
    return MODELS[kind]().double()


def batches() -> list[list[Tensor]]:
    x = torch.randn(BATCH * STEPS, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return [[rows, rows[:, :4].square()] for rows in x.split(BATCH)]


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def in_plain_torch(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = build(kind)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses: list[float] = []
    for batch in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(batch[0]), batch)[0] / BATCH
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, dict(model.state_dict())


def plan_for(
    world: int, *, zero: int = 0, per_step: int = 1, tensor: int = 1, pipeline: int = 1, **memory: Any
) -> Plan:
    data = world // tensor // pipeline
    axes: dict[str, int] = {"shard": data} if zero == 3 else {"replicate": data}
    return Plan(
        mesh=MeshPlan(tensor=tensor, pipeline=pipeline, **axes),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=BATCH // data // per_step, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
        memory=MemoryPlan(**memory),
    )


def trained(kind: str, plan: Any, folder: str, *, spread: bool = True, steps: int = STEPS) -> Any:
    """Losses and the model's state after a few steps."""
    permit, prove = ("fp64",), "auto" if spread else "never"  # which would find it before the net that is looked at
    with weft.session(plan, permit=permit, folder=folder, prove=prove, quiet=True) as session:
        session._nets = replace(session._nets, changed_state=spread, coupled_samples=spread)
        model = build(kind)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        x, y = (torch.cat(each) for each in zip(*batches(), strict=True))
        state = session.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=BATCH), loss=loss_fn)
        losses = [state.step(batch).loss for batch in state.batches(steps)]
        is_cut = state.plan.data_parallel.zero == 3 or state.plan.mesh.tensor > 1 or state.plan.mesh.pipeline > 1
        held = dict(state.model.named_buffers()) if is_cut else model.state_dict()
        return losses, {name: value.clone() for name, value in held.items() if name in in_plain_torch(kind)[1]}


def check_equal(found: Any, kind: str) -> None:
    losses, state = in_plain_torch(kind)
    assert found[0] == pytest.approx(losses, rel=1e-10)
    for name, value in found[1].items():
        torch.testing.assert_close(value, state[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", list(MODELS))
def test_one_process_with_the_whole_batch_keeps_all_that_plain_torch_keeps(kind: str, tmp_path: Path) -> None:
    check_equal(trained(kind, plan_for(1), str(tmp_path)), kind)


SAMPLES = {
    "codebook": r"the forward of 1 in Sequential changes its buffers codes and counts by the samples that it is given",
    "codebook in weights": r"the forward of 1 in Sequential changes its weight codes by the samples",
    "bank": r"the forward of Bank changes its attribute kept by the samples",
    "rows": r"the forward of rows in Rows changes its weight weight, as nn\.Embedding\(max_norm=…\) does",
}


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("kind", SAMPLES)
def test_data_ranks_are_refused_where_samples_leave_something_behind(
    kind: str, zero: int, ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(PlanError, match=SAMPLES[kind]):
        ranks.run(2, trained, kind, plan_for(2, zero=zero), str(tmp_path))


@pytest.mark.parametrize("kind", ["codebook", "codebook in weights", "bank", "warm", "spectral", "teacher", "fading"])
def test_accumulation_is_refused_where_every_forward_leaves_something_behind(kind: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"changes its .* in every forward, .* Use microbatch\.per_step = 1"):
        trained(kind, plan_for(1, per_step=2), str(tmp_path))


@pytest.mark.parametrize("kind", ["rows", "lazy", "counted"])
def test_accumulation_goes_on_where_nothing_differs(kind: str, tmp_path: Path) -> None:
    check_equal(trained(kind, plan_for(1, per_step=2), str(tmp_path)), kind)


def test_weights_of_which_ranks_hold_parts_are_not_written_by_forwards(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Teacher changes its weights weight and bias, and under ZeRO-3"):
        ranks.run(2, trained, "teacher", plan_for(2, zero=3), str(tmp_path / "a"))
    for found in ranks.run(2, trained, "teacher", plan_for(2, zero=1), str(tmp_path / "b")):
        check_equal(found, "teacher")


class Queue:
    """A loss that remembers, as an object."""

    def __init__(self) -> None:
        self.seen = deque[Tensor](maxlen=2)

    def __call__(self, outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        loss, count = loss_fn(outputs, batch)
        loss = loss + sum((outputs.mean(0) - each).square().sum() for each in self.seen) * len(outputs)
        self.seen.append(outputs.detach().mean(0))
        return loss, count


def closure() -> Callable[[Tensor, list[Tensor]], tuple[Tensor, Any]]:
    """A loss that remembers, in a variable around it."""
    seen = [torch.zeros((), dtype=torch.float64)]

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Any]:
        found, count = loss_fn(outputs, batch)
        seen[0] = 0.9 * seen[0] + 0.1 * found.detach() / count
        return found * (1 + seen[0]), count

    return loss


def late() -> Callable[[Tensor, list[Tensor]], tuple[Tensor, Any]]:
    """A loss that begins another term after some calls."""
    calls = 0

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, Any]:
        nonlocal calls
        calls += 1
        found, count = loss_fn(outputs, batch)
        return found * (2.0 if calls > 3 else 1.0), count

    return loss


LOSSES: dict[str, Callable[[], Any]] = {"seen": Queue, "closure": closure, "calls": late}


def with_loss(kind: str, plan: Plan, folder: str) -> list[float]:
    with weft.session(plan, permit=("fp64",), folder=folder, quiet=True) as session:
        model = build("lazy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), batch_size=BATCH)
        state = session.prepare(model, optimizer, loader, loss=LOSSES[kind]())
        return [state.step(batch).loss for batch in state.batches(STEPS)]


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_that_remember(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    model, loss = build("lazy"), LOSSES[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []
    for batch in batches():
        optimizer.zero_grad()
        found = loss(model(batch[0]), batch)[0] / BATCH
        found.backward()
        optimizer.step()
        losses.append(float(found.detach()))
    assert with_loss(kind, plan_for(1), str(tmp_path / "a")) == pytest.approx(losses, rel=1e-10)
    with pytest.raises(PlanError, match=r"the loss changes its attribute .* Use microbatch\.per_step = 1"):
        with_loss(kind, plan_for(1, per_step=2), str(tmp_path / "b"))
    if kind == "calls":
        for found in ranks.run(2, with_loss, kind, plan_for(2), str(tmp_path / "c")):
            assert found == pytest.approx(losses, rel=1e-10)
    else:
        with pytest.raises(PlanError, match=r"the loss changes its attribute seen by the samples that it is given"):
            ranks.run(2, with_loss, kind, plan_for(2), str(tmp_path / "c"))


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("kind", ["lazy", "spectral", "warm", "counted"])
def test_ranks_go_on_where_samples_change_nothing(kind: str, zero: int, ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, trained, kind, plan_for(2, zero=zero), str(tmp_path)):
        check_equal(found, kind)


@pytest.mark.parametrize("kind", ["codebook", "rows", "bank"])
def test_auto_refuses_ranks_where_samples_leave_something_behind(kind: str, ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=SAMPLES[kind]):
        ranks.run(2, trained, kind, "auto", str(tmp_path))


@pytest.mark.parametrize("kind", ["codebook", "spectral", "warm"])
def test_auto_takes_the_whole_batch_at_once(kind: str, tmp_path: Path) -> None:
    check_equal(trained(kind, "auto", str(tmp_path)), kind)


def test_tensor_ranks_that_see_the_whole_batch_go_on(ranks: RankPool, tmp_path: Path) -> None:
    for found in ranks.run(2, trained, "stack", plan_for(2, tensor=2), str(tmp_path)):
        check_equal(found, "stack")


@pytest.mark.parametrize("per_step", [1, 2])
def test_a_pipeline_goes_on_unless_it_accumulates(per_step: int, ranks: RankPool, tmp_path: Path) -> None:
    plan = plan_for(2, pipeline=2, per_step=per_step)
    if per_step == 1:
        for found in ranks.run(2, trained, "stack", plan, str(tmp_path)):
            check_equal(found, "stack")
    else:
        with pytest.raises(PlanError, match=r"blocks\.0\.codebook in Stack changes its buffers codes and counts"):
            ranks.run(2, trained, "stack", plan, str(tmp_path))


def test_recomputation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"recompute full runs forwards again in the backward"):
        trained("stack", plan_for(1, recompute="full"), str(tmp_path))


class Hidden(nn.Module):
    """Begins to keep the mean of what it sees in its third forward, which no trial before training shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(6))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.mean.copy_(x.detach().mean(0))
        return self.layer(x)


MODELS |= {"hidden": Hidden, "fading": Fading}


def frozen_edited(zero: int, folder: str) -> None:
    """Rank 1 alone edits a frozen weight."""
    with weft.session(plan_for(2, zero=zero), permit=("fp64",), folder=folder, quiet=True) as session:
        model = build("codebook in weights")
        model[1] = nn.Linear(4, 4).double().requires_grad_(False)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
        loader = DataLoader(TensorDataset(*map(torch.cat, zip(*batches(), strict=True))), batch_size=BATCH)
        state = session.prepare(model, optimizer, loader, loss=loss_fn)
        for batch in state.batches(STEPS):
            state.step(batch)
            if session.rank == 1:
                with torch.no_grad():
                    model[1].weight.add_(1.0)


def test_buffers_that_part_while_training_are_seen_after_a_few_steps(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^mean differs between the ranks: .* No optimizer updates it"):
        ranks.run(2, trained, "hidden", plan_for(2), str(tmp_path), steps=5)


@pytest.mark.parametrize("spread", [False])
def test_and_so_is_what_the_first_look_would_have_found(spread: bool, ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"^1\.codes differs between the ranks"):
        ranks.run(2, trained, "codebook", plan_for(2), str(tmp_path), spread=spread)


@pytest.mark.parametrize("zero", [0, 1])
def test_a_frozen_weight_that_one_rank_edits_is_seen(zero: int, ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"1\.weight.* differs between|differs between the ranks: nothing on rank 0, 1\.weight"
    ):
        ranks.run(2, frozen_edited, zero, str(tmp_path))

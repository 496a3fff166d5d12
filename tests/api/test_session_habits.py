"""What a loop brings along from DDP, FSDP and Accelerate: it trains as on one process, or hears the line to write."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import RankPool
from test_session_traps import BATCH, build, loss_fn, plan_for, prepared, samples, session_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset, WeightedRandomSampler

from weft.errors import DataError, RecipeError

SIZE = 40


def rank() -> int:
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


class Own(Sampler[int]):
    """An order of one's own; on rank 1 the fifth batch is another where `drifts`."""

    def __init__(self, drifts: bool = False) -> None:
        self.drifts = drifts

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[int]:
        order = random.Random(3).sample(range(SIZE), SIZE)
        return iter(order[:32] + order[:8] if self.drifts and rank() else order)


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(list(zip(*samples(SIZE).tensors, strict=True)))


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


LOADERS: dict[str, Callable[[], Any]] = {
    "own sampler": lambda: DataLoader(samples(SIZE), batch_size=BATCH, sampler=Own()),
    "weighted": lambda: DataLoader(
        samples(SIZE), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator())
    ),
    "replacement": lambda: DataLoader(
        samples(SIZE), batch_size=BATCH, sampler=RandomSampler(samples(SIZE), True, SIZE, generator())
    ),
    "iterable": lambda: DataLoader(Rows(), batch_size=BATCH),
}


def losses_of(folder: str, which: str) -> list[float]:
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with session_of(folder, plan_for(world)) as session:
        state = prepared(session, build(), LOADERS[which]())
        return [state.step(batch).loss for _ in range(2) for batch in state.batches(4)]


@pytest.mark.parametrize("which", LOADERS)
def test_loaders_with_an_order_of_their_own(ranks: RankPool, tmp_path: Path, which: str) -> None:
    alone = losses_of(str(tmp_path / "a"), which)
    for losses in ranks.run(2, losses_of, str(tmp_path / "b"), which):
        assert losses == pytest.approx(alone, rel=1e-10)


class Noisy(IterableDataset[Any]):
    """Draws from generators of its own, and of Python."""

    def __init__(self) -> None:
        self.own, self.other = random.Random(1), np.random.default_rng(2)

    def __iter__(self) -> Iterator[Any]:
        for x, y in zip(*samples(SIZE).tensors, strict=True):
            yield x + self.own.random() + random.random(), y * self.other.random()


DRAWING: dict[str, Callable[[], Any]] = {
    **{name: LOADERS[name] for name in ("weighted", "replacement")},
    "noisy": lambda: DataLoader(Noisy(), batch_size=BATCH),
}


def _of_plain_torch(which: str) -> list[float]:
    random.seed(7)
    model, losses = build(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _, batch in zip(range(4), DRAWING[which](), strict=False):
        optimizer.zero_grad()
        total, count = loss_fn(model(batch[0]), batch)
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


def _drawing(folder: str, which: str) -> list[float]:
    random.seed(7)
    with session_of(folder, plan_for(torch.distributed.get_world_size())) as session:
        state = prepared(session, build(), DRAWING[which]())
        return [state.step(batch).loss for batch in state.batches(4)]


@pytest.mark.parametrize("which", DRAWING)
def test_a_look_at_the_first_batch_moves_no_generator(ranks: RankPool, tmp_path: Path, which: str) -> None:
    right = _of_plain_torch(which)
    for world in (1, 2):
        for losses in ranks.run(world, _drawing, str(tmp_path / str(world)), which):
            assert losses == pytest.approx(right, rel=1e-10)


class Distance(nn.Module):
    """Takes two of a batch's three entries."""

    def __init__(self) -> None:
        super().__init__()
        self.one = build()

    def forward(self, one: Tensor, other: Tensor, scale: float = 2.0) -> Tensor:
        return scale * (self.one(one) - self.one(other))


def _of_pairs(folder: str | None) -> list[float]:
    x, y = samples().tensors
    loader = DataLoader(TensorDataset(x, x.flip(0), y), batch_size=BATCH)
    model, losses = Distance(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)

    def loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
        return (outputs - batch[2]).square().sum(), len(outputs)

    if folder is not None:
        with session_of(folder, plan_for(torch.distributed.get_world_size())) as session:
            state = prepared(session, model, loader, optimizer=optimizer, loss=loss)
            return [state.step(batch).loss for batch in state.batches(4)]
    for _, batch in zip(range(4), loader, strict=False):
        optimizer.zero_grad()
        total, count = loss(model(batch[0], batch[1]), batch)
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    return losses


def test_a_tuple_gives_a_forward_all_that_it_cannot_do_without(ranks: RankPool, tmp_path: Path) -> None:
    right = _of_pairs(None)
    for world in (1, 2):
        for losses in ranks.run(world, _of_pairs, str(tmp_path / str(world))):
            assert losses == pytest.approx(right, rel=1e-10)


@pytest.mark.parametrize("number", [2, 3, 7])
def test_steps_of_a_loader_that_only_iterates_run_on_into_its_next_pass(tmp_path: Path, number: int) -> None:
    rows = samples(24).tensors
    batches = [list(one) for one in zip(*(part.split(BATCH) for part in rows), strict=True)]
    with session_of(tmp_path / "run") as session:
        state = prepared(session, build(), batches, batch_size=BATCH)
        seen = []
        for batch in state.batches(number):
            seen.append(float(batch[0].sum()))
            state.step(batch)
        path = state.save()
        seen += [float(batch[0].sum()) for batch in state.batches(1)]
    expected = [float(batches[step % 3][0].sum()) for step in range(number + 1)]
    assert seen == pytest.approx(expected, rel=1e-12)
    with session_of(tmp_path / "again") as session:
        state = prepared(session, build(), batches, batch_size=BATCH)
        assert state.load(path) == number
        assert float(next(state.batches(4))[0].sum()) == pytest.approx(expected[number], rel=1e-12)


def test_steps_that_a_loader_has_no_batches_for_are_refused(tmp_path: Path) -> None:
    class Once:
        """An iterable that is empty from its third pass on: `prepare` looks at one batch."""

        passes = 0

        def __iter__(self) -> Iterator[Any]:
            self.passes += 1
            return iter([list(samples(BATCH).tensors)] if self.passes < 3 else [])

    with session_of(tmp_path) as session:
        state = prepared(session, build(), Once(), batch_size=BATCH)
        with pytest.raises(DataError, match=r"yielded no batch in pass \d, and \d more steps .* Give an iterable"):
            list(state.batches(3))


def drifting(folder: str) -> None:
    with session_of(folder, plan_for(2)) as session:
        state = prepared(session, build(), DataLoader(samples(SIZE), batch_size=BATCH, sampler=Own(drifts=True)))
        for batch in state.batches(4):
            state.step(batch)
        fifth = next(state.batches())
        with pytest.raises(DataError, match=r"batch of this step differs between the ranks: .* on rank 0, .* rank 1"):
            state.step(fifth)


def test_any_batch_that_differs_between_ranks_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, drifting, str(tmp_path))


def own_loader(folder: str) -> None:
    """A loop over a loader, in place of `state.batches()`, where no rank has a share."""
    torch.manual_seed(rank())
    with session_of(folder, plan_for(2, tensor=2)) as session:
        state = prepared(session, build(), split={"0": "column", "2": "row"})
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(rank())).tolist()
        with pytest.raises(DataError, match="the batch of this step differs between the ranks"):
            state.step(next(iter(DataLoader(samples(SIZE), batch_size=BATCH, sampler=order))))


def test_tensor_ranks_train_on_one_batch(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, own_loader, str(tmp_path))


@pytest.mark.parametrize(("number", "match"), [(3, "batch 2 of the loader is not the one"), (5, "")])
def test_a_resume_goes_on_in_the_order_that_was_saved(tmp_path: Path, number: int, match: str) -> None:
    """After five batches a pass is through, and the next may have any order."""

    def loader(seed: int) -> Any:
        given = torch.Generator().manual_seed(seed)
        sampler = WeightedRandomSampler([1.0] * SIZE, SIZE, generator=given)
        return DataLoader(samples(SIZE), batch_size=BATCH, sampler=sampler)

    with session_of(tmp_path) as session:
        state = prepared(session, build(), loader(1))
        for batch in state.batches():
            state.step(batch)
            if state.steps == number and number < 5:
                break
        state.save()
    for seed, refused in ((1, ""), (2, match)):
        with session_of(tmp_path) as session:
            state = prepared(session, build(), loader(seed))
            assert state.load() == number
            if refused:
                with pytest.raises(DataError, match=refused):
                    next(state.batches())
            else:
                state.step(next(state.batches()))


def test_a_loader_that_ends_before_the_saved_place_is_refused(tmp_path: Path) -> None:
    for number, wanted in ((SIZE, 3), (16, 0)):
        with session_of(tmp_path) as session:
            state = prepared(session, build(), DataLoader(samples(number), batch_size=BATCH, sampler=range(number)))
            if wanted:
                for batch in state.batches(wanted):
                    state.step(batch)
                state.save()
                continue
            state.load()
            with pytest.raises(DataError, match="the loader has 2 batches, and the saved run had taken 3"):
                next(state.batches())


def test_what_workers_would_have_done_is_said(tmp_path: Path) -> None:
    with session_of(tmp_path) as session:
        with pytest.raises(DataError, match="worker_init_fn would not be called"):
            prepared(session, build(), DataLoader(samples(), batch_size=BATCH, worker_init_fn=print))
        loader = DataLoader(samples(), batch_size=BATCH)
        loader.num_workers = 3  # without starting any
        with pytest.warns(UserWarning, match="num_workers = 3 are not started"):
            session_loader_says(loader)


def session_loader_says(loader: Any) -> None:
    from weft.api.batches.stream import BatchStream

    BatchStream(loader, 1, lambda fields: None).warn_of_workers()


# ── models ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class AnyArguments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return self.inner(*args, **kwargs)


def inside(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(build()))


WRAPPED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "ddp": (lambda: DistributedDataParallel(build()), r"wrapped in DistributedDataParallel\. .* model\.module"),
    "a part in ddp": (lambda: inside(DistributedDataParallel), "0 is wrapped in DistributedDataParallel"),
    "dp": (lambda: nn.DataParallel(build()), r"wrapped in DataParallel\. Give session\.prepare model\.module"),
    "compiled": (lambda: torch.compile(build(), backend="eager"), r"before torch\.compile: plan\.compute\.compile"),
    "fsdp2": (lambda: fully_shard(build()), r"is a DTensor: the model is sharded already"),
    "any arguments": (AnyArguments, r"Say which goes where: session\.prepare\(…, inputs="),
}


def wrapped(folder: str, which: str) -> None:
    make, match = WRAPPED[which]
    model = make()
    with session_of(folder, plan_for(2)) as session, pytest.raises(RecipeError, match=match):
        prepared(session, model)


@pytest.mark.parametrize("which", WRAPPED)
def test_a_model_that_is_wrapped_already_is_refused_with_what_to_give(
    ranks: RankPool, tmp_path: Path, which: str
) -> None:
    ranks.run(2, wrapped, str(tmp_path), which)


def test_what_could_not_train_is_refused(tmp_path: Path) -> None:
    model = build()
    model[0].requires_grad_(False)
    with session_of(tmp_path) as session:
        state = prepared(session, model)
        batch = next(state.batches())
        for off in (torch.no_grad(), torch.inference_mode()):
            with off, pytest.raises(RecipeError, match=r"inside torch\.no_grad\(\)"):
                state.step(batch)
        state.step(batch)
        model[0].requires_grad_(True)
        with pytest.raises(RecipeError, match=r"0\.weight was frozen when session\.prepare"):
            state.step(batch)


class Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.dropout, self.how = build(), nn.Dropout(0.3), how

    def forward(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            return self.inner[2](self.dropout(self.inner[1](self.inner[0](x))))

        if self.how == "none":
            return run(x)
        return checkpoint(run, x.requires_grad_(), use_reentrant=self.how == "reentrant")  # type: ignore[no-any-return]


def checkpointing(folder: str, how: str) -> list[float]:
    world = torch.distributed.get_world_size()
    with session_of(folder, plan_for(world)) as session:
        state = prepared(session, Checkpointed(how))
        return [state.step(batch).loss for batch in state.batches(3)]


@pytest.mark.parametrize("how", ["new", "reentrant"])
def test_a_models_own_checkpoints_keep_their_dropout(ranks: RankPool, tmp_path: Path, how: str) -> None:
    alone = ranks.run(1, checkpointing, str(tmp_path / "a"), "none")[0]
    for number in (1, 2):
        for losses in ranks.run(number, checkpointing, str(tmp_path / str(number)), how):
            assert losses == pytest.approx(alone, rel=1e-10)

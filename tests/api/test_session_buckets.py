"""Batch samplers whose batches differ in size and length: exact means, keyed draws, epochs and resumes under every
plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError
from weft.model.families import CutTable

WORDS, CLASSES, ROWS, BUDGET = 17, 3, 41, 24
LARGEST = 8
"""Samples of the largest batch."""
CUT = CutTable(entry="words", blocks=("blocks.0", "blocks.1"), tail=("head",))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(8, 8, bias=False), nn.Dropout(0.2)

    def forward(self, found: Tensor) -> Tensor:
        return found + self.drop(self.inner(found)).tanh()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, CLASSES, bias=False)

    def forward(self, found: Tensor) -> Tensor:
        return self.inner(found).sum(1)


class Net(nn.Module):
    """Reads padded words; what is padding makes no difference."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = nn.Embedding(WORDS, 8, padding_idx=0)
        self.blocks = nn.ModuleList(Block() for _ in "ab")
        self.head = Head()
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        found = self.words(tokens)
        for block in self.blocks:
            found = block(found)
        return self.head(found)


class Sentences(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draw = torch.Generator().manual_seed(index)
        length = 2 + index % 11
        return torch.randint(1, WORDS, (length,), generator=draw), index % CLASSES


class TokenBudget(Sampler[list[int]]):
    """Sentences of like length in batches of at most so many words, in another order in each pass."""

    def __init__(self) -> None:
        self.passes = 0

    def _batches(self) -> list[list[int]]:
        found: list[list[int]] = [[]]
        for index in sorted(range(ROWS), key=lambda index: (index % 11, index)):
            if (2 + index % 11) * (len(found[-1]) + 1) > BUDGET:
                found.append([])
            found[-1].append(index)
        return found

    def __len__(self) -> int:
        return len(self._batches())

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(7)).tolist()
        return iter([batches[place] for place in order])


def collate(samples: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
    tokens = pad_sequence([tokens for tokens, _ in samples], batch_first=True)
    return {"tokens": tokens, "labels": torch.tensor([label for _, label in samples])}


def loss_fn(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


PLANS: dict[str, tuple[dict[str, int], int, int, Any]] = {
    "1 in one piece": ({}, 0, 8, 1),
    "1": ({}, 0, 4, 2),
    "2": ({"replicate": 2}, 0, 2, 2),
    "2 uneven": ({"replicate": 2}, 0, 2, (1, 3)),
    "2 zero 1": ({"replicate": 2}, 1, 4, 1),
    "2 zero 3": ({"shard": 2}, 3, 1, 4),
    "2 stages": ({"pipeline": 2}, 0, 2, 4),
    "4": ({"replicate": 4}, 0, 1, 2),
    "4 uneven": ({"replicate": 4}, 0, 1, (1, 1, 4, 2)),
    "2 x 2 stages": ({"pipeline": 2, "replicate": 2}, 0, 2, 2),
}
SMALL = {
    "1 of six": ({}, 0, 6, 1),
    "2 of six": ({"replicate": 2}, 0, 3, 1),
    "2 stages of six": ({"pipeline": 2}, 0, 2, 3),
}
"""Plans for batches of six, where some have more."""


def plan_for(kind: str) -> Plan:
    axes, zero, micro, per_step = (PLANS | SMALL)[kind]
    mesh: dict[str, Any] = dict(axes)
    return Plan(
        mesh=MeshPlan(**mesh),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=micro, per_step=per_step),
        compute=ComputePlan(precision="fp64"),
    )


def size_for(kind: str) -> int:
    plan = plan_for(kind)
    return plan.microbatch.size * sum(plan.microbatch.shares(plan.mesh.data))


def prepared(session: weft.Session, kind: str) -> weft.TrainState:
    model = Net()
    loader = DataLoader(Sentences(), batch_sampler=TokenBudget(), collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    size = size_for(kind)
    return session.prepare(
        model, optimizer, loader, loss=loss_fn, cut=CUT, max_grad_norm=1.0, batch_size=None if size == LARGEST else size
    )


def trained(kind: str, folder: str) -> tuple[list[tuple[float, float, float]], list[int], Any]:
    """Loss, norm and count of each step of two passes, the samples of each share, and rows drawn and gathered."""
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session, kind)
        steps, sizes, rows = list[tuple[float, float, float]](), list[int](), list[Any]()
        for epoch in state.epochs(2):
            assert len(epoch) == len(TokenBudget())
            for batch in epoch:
                sizes.append(len(batch["labels"]))
                rows.append(state.gather(state.randn(batch, 2)))
                event = state.step({"tokens": batch["tokens"].clone(), "labels": batch["labels"].clone()})
                steps.append((event.loss, event.gradient_norm, event.count))
            assert state.steps == (epoch.number + 1) * len(epoch)
        return steps, sizes, rows


@pytest.mark.parametrize("kind", [*list(PLANS)[1:], *list(SMALL)[1:]])
def test_batches_of_any_size_are_shared_out_exactly(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    one_process = "1 of six" if kind in SMALL else "1 in one piece"
    ((alone, sizes, rows),) = ranks.run(1, trained, one_process, str(tmp_path / "alone"))
    assert min(sizes) == 1
    assert max(sizes) == LARGEST
    assert [count for *_, count in alone] == sizes
    assert sum(sizes) == 2 * ROWS
    found = ranks.run(plan_for(kind).mesh.world_size, trained, kind, str(tmp_path / "together"))
    for steps, _, drawn in found:
        assert steps == [pytest.approx(one, rel=1e-10) for one in alone]
        assert all(torch.equal(a, b) for a, b in zip(drawn, rows, strict=True))
    if set((PLANS | SMALL)[kind][0]) == {"replicate"}:
        assert [sum(each) for each in zip(*(own for _, own, _ in found), strict=True)] == sizes


def resumed(kind: str, folder: str) -> tuple[list[float], list[float]]:
    given: dict[str, Any] = {"permit": ("fp64",), "quiet": True}
    with weft.session(plan_for(kind), folder=Path(folder) / "whole", **given) as session:
        state = prepared(session, kind)
        whole = [state.step(batch).loss for epoch in state.epochs(2) for batch in epoch]
    at = len(TokenBudget()) + 3
    with weft.session(plan_for(kind), folder=Path(folder) / "part", **given) as session:
        state = prepared(session, kind)
        part = [state.step(batch).loss for batch in state.batches()]
        part += [state.step(batch).loss for batch in state.batches(3)]
        state.save()
    with weft.session(plan_for(kind), folder=Path(folder) / "part", **given) as session:
        state = prepared(session, kind)
        assert state.load() == at
        numbers = [epoch.number for epoch in state.epochs(2) if part.extend(state.step(b).loss for b in epoch) is None]
        assert numbers == [1]
    return whole, part


@pytest.mark.parametrize("kind", ["2 uneven", "2 stages"])
def test_a_resume_in_the_middle_of_a_pass_is_exact(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    for whole, part in ranks.run(2, resumed, kind, str(tmp_path)):
        assert part == whole


def ahead(folder: str) -> tuple[list[float], list[float], str]:
    """Steps over batches that were taken before them, as they came; of new objects nobody knows which they are."""
    with weft.session(plan_for("1"), permit=("fp64",), folder=folder, quiet=True) as session:
        one, other = prepared(session, "1"), prepared(session, "1")
        plain = [one.step(batch).loss for batch in one.batches(4)]
        taken = list(other.batches(4))
        found = [other.step(batch).loss for batch in taken]
        again = list(one.batches(3))
        assert len({len(batch["labels"]) for batch in again}) > 1
        with pytest.raises(DataError) as refused:
            one.step({name: value.clone() for name, value in again[0].items()})
        return plain, found, str(refused.value)


def test_batches_may_be_taken_ahead(ranks: RankPool, tmp_path: Path) -> None:
    for plain, found, refused in ranks.run(1, ahead, str(tmp_path)):
        assert found == plain
        assert "its batch is a new object, so that nobody knows which of them it is" in refused


def whole_batches(folder: str, what: str) -> str:
    model: nn.Module = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6) if what == "norm" else nn.Tanh(), nn.Linear(6, 1)
    )
    rows = torch.randn(13, 4, generator=torch.Generator().manual_seed(0))
    batches = [rows[:8], rows[8:9]]
    loader = DataLoader(list(rows), batch_sampler=[list(range(8)), [8]])  # type: ignore[arg-type]
    with weft.session(folder=folder, quiet=True, settings={"microbatch.size": 4}) as session:
        state = session.prepare(
            model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=lambda out, batch: (out.sum(), len(out))
        )
        first, second = state.batches()
        assert len(state.gather(first)) == len(batches[0])
        state.step(first)
        return str(state.step(second).count)


def test_what_needs_its_whole_share_is_refused_where_a_rank_has_none(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, whole_batches, str(tmp_path / "plain"), "plain") == ["1.0", "1.0"]
    with pytest.raises(DataError, match=r"BatchNorm1d\) takes .* a batch of 1 samples .* 2 data ranks .* have 2 to 8"):
        ranks.run(2, whole_batches, str(tmp_path / "norm"), "norm")


class Endless(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0]


def test_a_sampler_that_does_not_say_its_length_needs_a_size(tmp_path: Path) -> None:
    model = Net()
    loader = DataLoader(Sentences(), batch_sampler=Endless(), collate_fn=collate)
    with weft.session(folder=tmp_path, permit=("fp64",), quiet=True) as session:
        with pytest.raises(DataError, match="does not say its batch_size"):
            session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn, batch_size=1)
        assert [state.step(batch).count for batch in state.batches(3)] == [1.0] * 3

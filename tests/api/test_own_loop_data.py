"""Loaders of loops that keep their own steps: the same to look at, and each rank has its rows of every batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from own_loops import PLANS as ALL_PLANS
from own_loops import Hands, Net, plainly, under
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

import weft
from weft.errors import DataError, RecipeError
from weft.run.launch.launcher import launch_script

ROWS = 22


class Drawing(Dataset[tuple[Tensor, str]]):
    """Samples that are augmented by three generators, when they are read."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, str]:
        drawn = torch.rand(2) + random.random() + np.random.rand()
        return torch.tensor([float(index), *drawn.tolist()]), f"sample {index}"


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(ROWS).tolist()
        return iter([torch.tensor([float(index)]) for index in order])


def masked(samples: list[tuple[Tensor, str]]) -> dict[str, Any]:
    """A collate function that draws for the whole batch."""
    rows = torch.stack([row for row, _ in samples])
    return {"rows": rows, "texts": [text for _, text in samples], "mask": torch.rand(len(rows)) < 0.5}


def loaders(workers: int) -> dict[str, DataLoader[Any]]:
    plain = TensorDataset(torch.arange(ROWS, dtype=torch.float32)[:, None])
    own = {"num_workers": workers}
    seeded = torch.Generator().manual_seed(3)
    return {
        "shuffled": DataLoader(plain, 5, shuffle=True, **own),  # type: ignore[arg-type]
        "last dropped": DataLoader(plain, 5, shuffle=True, drop_last=True, generator=seeded, **own),  # type: ignore[arg-type]
        "batch sampler": DataLoader(plain, batch_sampler=BatchSampler(RandomSampler(plain), 4, False), **own),  # type: ignore[arg-type]
        "drawing": DataLoader(Drawing(), 5, shuffle=True, **own),  # type: ignore[arg-type]
        "masked": DataLoader(Drawing(), 5, collate_fn=masked, **own),  # type: ignore[arg-type]
        "stream": DataLoader(Stream(), 5),
    }


def gone_through(hands: Hands, workers: int = 0) -> tuple[list[float], list[Tensor]]:
    """All batches of two passes, put together."""
    found = list[Tensor]()
    torch.manual_seed(0)
    for loader in loaders(workers).values():
        prepared = hands.prepare(loader)
        assert isinstance(prepared, DataLoader)
        assert prepared.dataset is loader.dataset
        assert prepared.batch_size == loader.batch_size
        for _ in range(2):
            for batch in prepared:
                fields = list(batch.values()) if isinstance(batch, dict) else [batch]
                tensors = [one for each in fields for one in (each if isinstance(each, list) else [each])]
                found += [hands.gather(each) for each in tensors if isinstance(each, Tensor)]
                texts = [each for each in tensors if isinstance(each, str)]
                found += [hands.gather(torch.tensor([int(text.split()[1]) for text in texts]))] if texts else []
    return [], found


def test_one_process_sees_plain_pytorchs_batches(ranks: RankPool) -> None:
    """Where nothing is drawn, bit for bit; what samples draw is keyed by their place."""
    found = ranks.run(1, under, ALL_PLANS["alone"], gone_through)[0][1]
    expected = ranks.run(1, plainly, gone_through)[0][1]
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
    same = sum(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert same >= 10 + 8 + 12 + 10  # shuffled, last dropped, batch sampler, stream


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_see_the_batches_of_one_process(ranks: RankPool, world: int) -> None:
    expected = ranks.run(1, under, ALL_PLANS["alone"], gone_through)[0][1]
    plan = ALL_PLANS["data" if world == 2 else "data of 4"]
    for _, found in ranks.run(world, under, plan, gone_through):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


WORKERS = """
import weft
from own_loops import PLANS, Hands
from test_own_loop_data import gone_through

found = []
for workers in (0, 2):
    with weft.session(plan=PLANS["data"], permit=("fp64",), quiet=True, record=False) as session:
        found.append(gone_through(Hands(session), workers)[1])
assert len(found[0]) == len(found[1])
assert all(one.equal(other) for one, other in zip(*found))
"""


def test_workers_read_what_the_loop_reads(tmp_path: Path) -> None:
    here = Path(__file__).parent
    paths = f"import sys; sys.path[:0] = [{str(here)!r}, {str(here.parent / 'support')!r}]\n"
    (tmp_path / "workers.py").write_text(paths + WORKERS)
    assert launch_script(str(tmp_path / "workers.py"), [], num_processes=2) == 0


def resumed(hands: Hands) -> tuple[list[float], list[Tensor]]:
    """A pass that is left in its middle, and the rest of it in another loader."""
    torch.manual_seed(0)
    first, second = (loaders(0)["drawing"] for _ in range(2))
    first, second = hands.prepare(first, second)
    for _ in first:
        pass
    seen = [hands.gather(batch[0]) for batch in first]
    state = None
    for number, _ in enumerate(first):
        if number == 1:
            state = first.state_dict()
            break
    torch.manual_seed(5)
    third = [hands.gather(batch[0]) for batch in second]
    second.load_state_dict(state)
    rest = [hands.gather(batch[0]) for batch in second]
    again = [hands.gather(batch[0]) for batch in second]
    assert len(seen) == len(third) == len(again) == 5
    return [], rest


def test_a_pass_is_resumed_in_its_middle(ranks: RankPool) -> None:
    (expected,) = ranks.run(1, under, ALL_PLANS["alone"], resumed)
    assert len(expected[1]) == 3
    for _, found in ranks.run(2, under, ALL_PLANS["data"], resumed):
        assert all(torch.equal(one, other) for one, other in zip(found, expected[1], strict=True))


def other_data(hands: Hands) -> Any:
    assert hands.session is not None
    rows = torch.ones(8, 2) * (1 + hands.session.rank)
    with pytest.raises(DataError) as caught:
        next(iter(hands.prepare([rows])))
    return [0.0], [torch.tensor("other batches on other ranks" in str(caught.value))]


def test_batches_that_differ_between_ranks_are_refused(ranks: RankPool) -> None:
    for _, (said,) in ranks.run(2, under, ALL_PLANS["data"], other_data):
        assert said


def test_what_is_no_thing_of_a_loop_is_refused() -> None:
    with weft.session(quiet=True, record=False) as session:
        with pytest.raises(RecipeError, match="was given a int, and prepares models"):
            session.prepare(Net(), 3)
        shared = torch.utils.data.DistributedSampler(TensorDataset(torch.ones(8)), 2, 0)
        with pytest.raises(DataError, match="has a DistributedSampler"):
            session.prepare(DataLoader(TensorDataset(torch.ones(8)), 2, sampler=shared))
        with pytest.raises(RecipeError, match=r"session.prepare\(…, max_grad_norm=…\) belongs to a loss"):
            session.prepare(nn.Linear(2, 2), max_grad_norm=1.0)  # type: ignore[call-overload]

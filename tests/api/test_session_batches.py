"""Batches of every shape that loaders give: texts, nested containers, numbers, lists of tensors of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader

import weft
from weft.config.plan import ComputePlan, DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import DataError

BATCH, STEPS, SAMPLES = 8, 3, 40
WORDS = ("a", "bb", "ccc", "dddd")


def plan_of(kind: str) -> Plan:
    mesh = {"data": {"replicate": 2}, "zero3": {"shard": 2}, "tensor": {"tensor": 2}, "pipeline": {"pipeline": 2}}
    size = {"one": BATCH, "tensor": BATCH}.get(kind, BATCH // 2)
    return Plan(
        mesh=MeshPlan(**mesh.get(kind, {})),
        data_parallel=DataParallelPlan(zero=3 if kind == "zero3" else 0),
        microbatch=MicrobatchPlan(size=size, per_step=BATCH // size if kind in ("pipeline", "accumulation") else 1),
        compute=ComputePlan(precision="fp64"),
    )


def rows() -> Tensor:
    return torch.randn(SAMPLES, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Pair(NamedTuple):
    x: Tensor
    text: Any


@dataclass
class Held:
    pair: Pair
    weight: float
    names: tuple[str, ...]


def nested(samples: list[int]) -> Any:
    x = rows()[samples]
    texts = [WORDS[number % 4] for number in samples]
    return {
        "in": {"views": (x, 2 * x), "text": texts},
        "scale": 0.5,
        "note": None,
        "y": x[:, :4],
        "kinds": ["u", "v", "w"],
    }


def held(samples: list[int]) -> Any:
    x = rows()[samples]
    return Held(Pair(x, [WORDS[number % 4] for number in samples]), 0.5, ("u", "v", "w"))


def detected(samples: list[int]) -> Any:
    """Images of several sizes, and what is in each."""
    images = [rows()[number, : 2 + number % 4] for number in samples]
    return images, [{"boxes": rows()[number, :4], "name": WORDS[number % 4]} for number in samples]


def texts(samples: list[int]) -> Any:
    return [WORDS[number % 4] * (1 + number % 3) for number in samples]


class Net(nn.Module):
    """Reads what it is given, in the shape that the loader gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, given: Any, more: Any = None) -> Tensor:
        return self.layers(self.read(given))

    def read(self, given: Any) -> Tensor:
        if isinstance(given, Mapping):
            return given["views"][0] + given["views"][1] + lengths(given["text"])
        if isinstance(given, Pair):
            return given.x + lengths(given.text)
        if isinstance(given, Tensor):
            return given
        if isinstance(given[0], str):
            return lengths(given).expand(-1, 6)
        return torch.stack([nn.functional.pad(image, (0, 6 - len(image))) for image in given])


def lengths(given: Any) -> Tensor:
    return torch.tensor([len(text) for text in given], dtype=torch.float64)[:, None]


def build() -> nn.Module:
    torch.manual_seed(5)
    return Net().double()


def loss_fn(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
    if isinstance(batch, Mapping):
        assert batch["note"] is None
        assert batch["kinds"] == ["u", "v", "w"]
        wanted = batch["y"] + batch["scale"] * lengths(batch["in"]["text"])
    elif isinstance(batch, Held):
        assert batch.names == ("u", "v", "w")
        wanted = batch.pair.x[:, :4] * batch.weight + lengths(batch.pair.text)
    elif isinstance(batch[0], str):
        wanted = lengths(batch).expand(-1, 4)
    else:
        wanted = torch.stack([each["boxes"] * len(each["name"]) for each in batch[1]])
    return (outputs - wanted).square().sum(), len(outputs)


class Iterated:
    """A loader with an order of its own."""

    batch_size = BATCH

    def __init__(self, collate: Callable[[list[int]], Any]) -> None:
        self.collate = collate

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, SAMPLES, BATCH):
            yield self.collate(list(range(start, start + BATCH)))


GIVEN: Mapping[Any, tuple[dict[str, str], Callable[[Any], Any]]] = {
    nested: ({"given": "in"}, lambda batch: batch["in"]),
    held: ({"given": "pair"}, lambda batch: batch.pair),
    detected: ({"given": "0", "more": "1"}, lambda batch: batch[0]),
    texts: ({"given": "0"}, lambda batch: batch),
}


def trained(collate: Any, kind: str, iterated: bool, folder: str) -> tuple[list[float], float, Tensor]:
    model = build()
    loader: Any = DataLoader(range(SAMPLES), batch_size=BATCH, collate_fn=collate)  # type: ignore[arg-type]
    loader = Iterated(collate) if iterated else loader
    with weft.session(plan=plan_of(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        state = session.prepare(model, optimizer, loader, loss=loss_fn, inputs=GIVEN[collate][0])
        losses = [state.step(batch).loss for batch in state.batches(STEPS)]
        return losses, state.evaluate(loader), state.predict(loader, outputs=lambda outputs, batch: outputs)


@pytest.mark.parametrize("iterated", [False, True], ids=["indexed", "iterated"])
@pytest.mark.parametrize("collate", [nested, held, detected, texts])
def test_batches_of_any_shape_train_as_in_plain_pytorch(
    ranks: RankPool, tmp_path: Path, collate: Any, iterated: bool
) -> None:
    model, losses = build(), list[float]()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    whole = list(Iterated(collate))
    for batch in whole[:STEPS]:
        total, count = loss_fn(model(GIVEN[collate][1](batch)), batch)
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    with torch.no_grad():
        outputs = [model(GIVEN[collate][1](batch)) for batch in whole]
    evaluated = sum(loss_fn(*pair)[0].item() for pair in zip(outputs, whole, strict=True)) / SAMPLES
    for kind in ("one", "accumulation", "data") if iterated else ("one", "accumulation", "data", "zero3", "tensor"):
        world = 1 if kind in ("one", "accumulation") else 2
        for found in ranks.run(world, trained, collate, kind, iterated, str(tmp_path / kind)):
            assert found[0] == pytest.approx(losses, rel=1e-10), kind
            assert found[1] == pytest.approx(evaluated, rel=1e-10), kind
            torch.testing.assert_close(found[2], torch.cat(outputs), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        ({"x": torch.ones(4, 2), "y": torch.ones(3)}, "different numbers of samples"),
        ({"x": torch.ones(2, 2), "y": [torch.ones(2), torch.ones(2)]}, "entry y .* cannot be told"),
        ({"x": torch.ones(2, 2), "y": object()}, "entry y of the batch is a object, which cannot be shared out"),
        ({"scale": 2.0}, "nothing in it with an entry for each sample"),
        (torch.tensor(1.0), "without samples along dim 0"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, batch: Any, match: str) -> None:
    model = build()
    loader = Iterated(lambda samples: batch)
    with weft.session(plan=plan_of("one"), permit=("fp64",), folder=tmp_path, quiet=True) as session:
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        with pytest.raises(DataError, match=match):
            session.prepare(model, optimizer, loader, loss=loss_fn)


class Short:
    """Batches of 51 rows, where the largest would have 52."""

    batch_size = 52

    def __iter__(self) -> Iterator[Any]:
        x = torch.ones(51, 6, dtype=torch.float64)
        yield [x, x[:, :4]]


def sizes_of_shares(folder: str) -> int:
    model = nn.Linear(6, 4).double()
    plan = Plan(
        mesh=MeshPlan(replicate=2),
        microbatch=MicrobatchPlan(size=26, per_step=1),
        compute=ComputePlan(precision="fp64"),
    )
    with weft.session(plan=plan, permit=("fp64",), folder=folder, quiet=True) as session:

        def loss(outputs: Tensor, batch: Any) -> tuple[Tensor, int]:
            return (outputs - batch[1]).square().sum(), len(outputs)

        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), Short(), loss=loss)
        batch = next(state.batches())
        state.step(batch)
        return len(batch[0])


def test_51_rows_on_two_ranks_are_26_and_25(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, sizes_of_shares, str(tmp_path)) == [26, 25]

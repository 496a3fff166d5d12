"""What a session gives back: metrics, predictions, gathered rows, epochs, and the states of attached objects."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from session_places import agent, as_launched
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import weft
from weft.config.document import JsonObject
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import CheckpointError, CollectiveError, DataError, PlanError, RecipeError
from weft.model.families import CutTable

BATCH, WIDTH, CLASSES = 12, 6, 3


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(WIDTH, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(2))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, rows: Tensor) -> Tensor:
        rows = self.stem(rows)
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows)


CUT = CutTable(entry="stem", blocks=("blocks.0", "blocks.1"), tail=("head",))


def samples(size: int = 50) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    return TensorDataset(rows, rows[:, :CLASSES].argmax(-1))


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch[1], reduction="sum"), len(outputs)


def plan_for(kind: str) -> Plan:
    world = int(kind.split()[-1])
    axes: dict[str, Any] = {{"data": "replicate", "zero3": "shard"}.get(kind.split()[0], kind.split()[0]): world}
    per_step: Any = BATCH // 2 if kind.split()[0] in ("tensor", "pipeline") else BATCH // 2 // world
    if kind == "uneven 2":
        axes, per_step = {"replicate": 2}, (1, 5)
    return Plan(
        mesh=MeshPlan(**axes),
        data_parallel=DataParallelPlan(zero=3 if "zero3" in kind else 0),
        microbatch=MicrobatchPlan(size=2, per_step=per_step),
        compute=Plan().compute.__class__(precision="fp64"),
    )


PLANS = ("data 2", "uneven 2", "zero3 2", "pipeline 2", "tensor 2")


class Told:
    """A metric that is told batch by batch, as those of torchmetrics are."""

    sync_on_compute = True

    def __init__(self) -> None:
        self.seen: list[int] = []

    def reset(self) -> None:
        self.seen = []

    def update(self, predictions: Tensor, targets: Tensor) -> None:
        assert len(predictions) == len(targets)
        self.seen += predictions.argmax(-1).eq(targets).int().tolist()

    def compute(self) -> Tensor:
        assert not self.sync_on_compute, "every rank has seen all samples already"
        return torch.tensor(sum(self.seen) / len(self.seen))


def prepared(session: Any, loader: Any = None) -> Any:
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    split = {"stem": "column", "blocks.0.0": "row"} if session._planning.plan.mesh.tensor > 1 else {}
    loader = DataLoader(samples(), batch_size=BATCH, shuffle=True) if loader is None else loader
    return session.prepare(model, optimizer, loader, loss=loss_fn, cut=CUT, split=split)


def results(kind: str, folder: str, sizes: list[int]) -> dict[str, Any]:
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        for batch in state.batches(3):
            state.step(batch)
        batches = [tuple(part) for part in zip(*(field.split(sizes) for field in samples().tensors), strict=True)]
        told = Told()
        values = state.evaluate(batches, {"told": told, "errors": lambda p, t: p.argmax(-1).ne(t).sum()})
        plain = state.evaluate(batches)
        logits = state.predict(batches)
        pairs = state.predict(batches, outputs=lambda outputs, batch: {"best": outputs.argmax(-1), "row": batch[0]})
        assert told.sync_on_compute
        return {"values": values, "plain": plain, "logits": logits, **pairs}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", PLANS)
def test_results_are_those_of_one_process(ranks: RankPool, tmp_path: Path, kind: str, seed: int) -> None:
    """Over drawn batches, some of them smaller than a share and larger than a global batch."""
    draw = random.Random(f"{kind} {seed}")
    sizes: list[int] = []
    while sum(sizes) < 50:
        sizes.append(min(draw.choice((1, 2, 5, 12, 17, 25)), 50 - sum(sizes)))
    (alone,) = ranks.run(1, results, "data 1", str(tmp_path / "alone"), sizes)
    assert alone["logits"].shape == (50, CLASSES)
    assert torch.equal(alone["row"], samples().tensors[0])
    assert alone["values"]["loss"] == pytest.approx(alone["plain"], rel=1e-14)
    assert alone["values"]["errors"] == 50 - round(50 * alone["values"]["told"])
    for found in ranks.run(2, results, kind, str(tmp_path / "together"), sizes):
        assert found["values"] == pytest.approx(alone["values"], rel=1e-12)
        assert found["plain"] == pytest.approx(alone["plain"], rel=1e-12)
        torch.testing.assert_close(found["logits"], alone["logits"], rtol=1e-12, atol=1e-14)
        assert torch.equal(found["best"], alone["best"])
        assert torch.equal(found["row"], alone["row"])
    lines = (tmp_path / "together" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines if '"evaluation"' in line]
    assert told[0]["metrics"] == {"told": pytest.approx(0.5, abs=0.5), "errors": alone["values"]["errors"]}


def gathered(kind: str, folder: str) -> list[Any]:
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        (batch,) = state.batches(1)
        first, labels = state.gather((batch[0], batch[1]))
        flags = state.gather({"is": batch[1] > 0})["is"]
        with pytest.raises(DataError, match="put different things together"):
            state.gather({"a": batch[1]} if session.rank else {"b": batch[1]})
        with pytest.raises(DataError, match=r"of shape \(\) as 1 for \d+ samples"):
            state.gather((batch[1], torch.tensor(1.0)))
        return [first, labels, flags]


@pytest.mark.parametrize("kind", ["data 2", "uneven 2"])
def test_rows_are_gathered_in_the_order_of_the_batch(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    one, other = ranks.run(2, gathered, kind, str(tmp_path))
    for ours, theirs in zip(one, other, strict=True):
        assert torch.equal(ours, theirs)
    assert one[0].shape == (BATCH, WIDTH)
    assert torch.equal(one[0][:, :CLASSES].argmax(-1), one[1])
    assert one[2].dtype == torch.bool
    assert torch.equal(one[2], one[1] > 0)


class Counts:
    """Says all that a state may be made of."""

    def __init__(self, start: int) -> None:
        self.state: dict[str, Any] = {
            "best": math.inf, "seen": Counter({3: 1, 5: start}), "pair": (1, None), "names": {"a", "b"}, 7: [1.5, True],
            "average": torch.full((3, 2), float(start)), "bits": torch.tensor([True, False]),
        }  # fmt: skip

    def state_dict(self) -> dict[Any, Any]:
        return self.state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        self.state = state


def carried(kind: str, folder: str, epochs: int, *, loads: bool) -> list[Any]:
    """Rates of all steps, numbers and lengths of epochs, and the counter's state."""
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(state.optimizer, T_0=3, T_mult=2)
        counts = Counts(0 if loads else 4)
        state.attach(scheduler=scheduler, counts=counts)
        if loads:
            state.load()
        rates: list[float] = []
        numbers: list[tuple[int, int]] = []
        for epoch in state.epochs(epochs):
            numbers.append((epoch.number, len(epoch)))
            for batch in epoch:
                rates.append(state.step(batch).learning_rate)
                scheduler.step()
        state.save()
        return [rates, numbers, counts.state]


@pytest.mark.parametrize("kind", ["data 1", "data 2", "zero3 2"])
def test_what_is_attached_goes_on_where_it_was(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    world = int(kind[-1])
    whole = ranks.run(world, carried, kind, str(tmp_path / "whole"), 4, loads=False)[0]
    first = ranks.run(world, carried, kind, str(tmp_path / "cut"), 2, loads=False)[0]
    second = ranks.run(world, carried, kind, str(tmp_path / "cut"), 4, loads=True)[0]
    assert first[0] + second[0] == whole[0]
    assert [*first[1], *second[1]] == whole[1] == [(number, 5) for number in range(4)]
    tensors = [{key: value for key, value in each[2].items() if isinstance(value, Tensor)} for each in (first, second)]
    rest = [{key: value for key, value in each[2].items() if not isinstance(value, Tensor)} for each in (first, second)]
    assert rest[0] == rest[1]
    assert [type(value) for value in rest[0].values()] == [type(value) for value in rest[1].values()]
    for ours, theirs in zip(tensors[0].values(), tensors[1].values(), strict=True):
        assert torch.equal(ours, theirs)


def refused(kind: str, folder: str) -> None:
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        with pytest.raises(RecipeError, match=r"rates is a list, which has no state_dict\(\)"):
            state.attach(rates=[1])
        state.attach(counts=Counts(1))
        with pytest.raises(RecipeError, match="another object is attached as counts"):
            state.attach(counts=Counts(1))
        state.save()
        bad = Counts(1)
        bad.state = {"call": {"it": len}}
        state.attach(bad=bad)
        with pytest.raises(CheckpointError, match=r"bad\.call\.it is a builtin_function_or_method"):
            state.save()
        bad.state = {"call": 1.0}
        with pytest.raises(CheckpointError, match=r"holds no state for what is attached as bad.*after state\.load\(\)"):
            state.load()
        with pytest.raises(RecipeError, match=r"epoch 0 was left before its last step"):
            for _ in state.epochs(2):
                pass
        with pytest.raises(RecipeError, match=r"state\.epochs\(-1\)"):
            state.epochs(-1)
        with pytest.raises(RecipeError, match=r"the metric 'a' is a int"):
            state.evaluate([samples().tensors], {"a": 3})
        with pytest.raises(RecipeError, match=r"must return \(predictions, targets\)"):
            state.evaluate([samples().tensors], {"a": len}, outputs=lambda outputs, batch: outputs)
        with pytest.raises(DataError, match=r"of shape \(3,\) for 2 samples"):
            state.predict([samples(4).tensors], outputs=lambda outputs, batch: outputs.sum(0))
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        with pytest.raises(CheckpointError, match=r"is attached as counts.*state\.attach\(counts=…\) before"):
            state.load()


def test_what_cannot_be_had_is_refused_on_one_process(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(1, refused, "data 1", str(tmp_path))


def differing(kind: str, folder: str) -> None:
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        state.attach(counts=Counts(session.rank))
        with pytest.raises(RecipeError, match=r"the state of what is attached as counts differs between the ranks"):
            state.save()
        with pytest.raises(
            DataError, match=r"batch 0 of the loader that is run through differs between the ranks: 4 samples"
        ):
            state.predict([samples(4 + 4 * session.rank).tensors][: 1 + session.rank])


def test_what_differs_between_ranks_is_named(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, differing, "data 2", str(tmp_path))


def parts_of_logits(kind: str, folder: str) -> None:
    # Nobody trains here: by this loss, which knows nothing of parts of logits, no proof would hold.
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, prove="never", quiet=True) as session:
        model = Net().double()
        model.head = nn.Linear(16, 4).double()
        state = session.prepare(
            model,
            torch.optim.AdamW(model.parameters()),
            DataLoader(samples(), batch_size=BATCH),
            loss=loss_fn,
            split={"head": "column"},
            vocabulary_head="head",
        )
        with pytest.raises(PlanError, match=r"part of the logits of head.*vocabulary_head= out"):
            state.predict([samples(4).tensors])


def test_parts_of_logits_are_no_predictions(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(2, parts_of_logits, "tensor 2", str(tmp_path))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return zip(*(field[:36] for field in samples().tensors), strict=True)


def streamed(kind: str, folder: str, *, loads: bool) -> list[tuple[int, int]]:
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session, DataLoader(Stream(), batch_size=BATCH))
        if loads:
            state.load()
        found: list[tuple[int, int]] = []
        for epoch in state.epochs(4 if loads else 2):
            with pytest.raises(DataError, match="only iterates"):
                len(epoch)
            found.append((epoch.number, sum(1 for batch in epoch if state.step(batch))))
        state.save()
        return found


def test_epochs_of_a_loader_that_only_iterates(ranks: RankPool, tmp_path: Path) -> None:
    found = ranks.run(2, streamed, "data 2", str(tmp_path), loads=False)[0]
    found += ranks.run(2, streamed, "data 2", str(tmp_path), loads=True)[0]
    assert found == [(number, 3) for number in range(4)]


def in_turn(folder: str, *, fails: bool) -> float:
    with weft.session(plan_for("data 2"), permit=("fp64",), folder=folder, quiet=True) as session:
        session.print("said once", session.rank)
        with session.first():
            if session.rank == 0:
                time.sleep(0.5)
                if fails:
                    raise OSError("the disk is full")
                Path(folder, "made").write_text("whole")
            return Path(folder, "made").stat().st_mtime


def test_one_rank_goes_first(ranks: RankPool, tmp_path: Path) -> None:
    tmp_path.joinpath("made").unlink(missing_ok=True)
    times = ranks.run(2, in_turn, str(tmp_path), fails=False)
    assert times[0] == times[1]


def failing_first(folder: str, port: int) -> str:
    with as_launched(port):
        try:
            in_turn(folder, fails=True)
        except (OSError, CollectiveError) as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_who_waits_hears_that_the_first_failed(ranks: RankPool, tmp_path: Path) -> None:
    with agent() as port:
        one, other = ranks.run(2, failing_first, str(tmp_path), port)
    assert one == "OSError: the disk is full"
    assert "rank 0 has left the group (OSError: the disk is full), while this one was in session.first()" in other


def hostile(kind: str, folder: str, attached: Any) -> str:
    """What loading says of a save whose attached states are something else, under a valid digest."""
    with weft.session(plan_for(kind), permit=("fp64",), folder=folder, quiet=True) as session:
        state = prepared(session)
        state.attach(counts=Counts(1))
        document = JsonObject(Path("manifest.json"), CheckpointError, "Take another.", {"attached": attached})
        try:
            state._attached.check(document)
        except CheckpointError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("attached", [[], 3, "counts", {"counts": {"call": []}}, {"counts": {"tuple": 3}}])
def test_what_no_save_wrote_is_refused(ranks: RankPool, tmp_path: Path, attached: Any) -> None:
    (said,) = ranks.run(1, hostile, "data 1", str(tmp_path), attached)
    assert "attached" in said
    assert said.endswith("Take another.")

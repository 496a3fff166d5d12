"""A user's function that hears what happens in a session, on every rank and where the loop stands."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.events import CheckpointEvent, EpochEvent, EvaluationEvent, Event, FailureEvent, OnEvent, StepEvent

ROWS, BATCH = 20, 8
STEPS_PER_EPOCH = 3


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(4.0 * ROWS).view(ROWS, 4) / ROWS), batch_size=BATCH)


def prepared(session: weft.Session, data: Any = None) -> weft.TrainState:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return session.prepare(model, optimizer, loader() if data is None else data, loss=loss_fn)


def opened(folder: str, on_event: OnEvent) -> Any:
    ranks = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    plan = Plan(mesh=MeshPlan(replicate=ranks), microbatch=MicrobatchPlan(size=BATCH // ranks, per_step=1))
    return weft.session(plan, folder=folder, quiet=True, on_event=on_event)


# ── what it hears ─────────────────────────────────────────────────────────────────────────────────────────────────────


def heard(folder: str) -> list[tuple[str, int, int]]:
    """Kind, step and model of what happens in two epochs, of which the function evaluates and saves after each."""
    told: list[tuple[str, int, int]] = []

    def on_event(event: Event, model: int) -> None:
        told.append((event.kind, getattr(event, "step", -1), model))
        if isinstance(event, EpochEvent):
            assert state.steps == event.step == (event.number + 1) * STEPS_PER_EPOCH
            state.evaluate(loader())
            state.save()
            assert told[-1][0] == "epoch", "what the function does itself is told after it"

    with opened(folder, on_event) as session:
        state, other = prepared(session), prepared(session)
        for _ in range(2):
            for batch in state.batches():
                state.step(batch)
                assert ("step", state.steps, 1) in told, "told when the step is through"
        for batch in other.batches(1):
            other.step(batch)
    return told


def test_every_rank_hears_everything_in_one_order(ranks: RankPool, tmp_path: Path) -> None:
    told = ranks.run(2, heard, str(tmp_path))
    assert told[0] == told[1]
    assert [one[0] for one in told[0]].count("rate") == 7
    kinds = [one for one in told[0] if one[0] in ("start", "step", "epoch", "evaluation", "checkpoint", "end")]
    assert kinds[-2:] == [("end", 6, 1), ("end", 1, 2)]
    ends = [("evaluation", 3, 1), ("checkpoint", 3, 1)]
    assert kinds[:-2] == [
        *(("start", 0, 1), ("start", 0, 2)),
        *(("step", 1, 1), ("step", 2, 1), ("step", 3, 1), ("epoch", 3, 1), *ends),
        *(("step", 4, 1), ("step", 5, 1), ("step", 6, 1), ("epoch", 6, 1)),
        *((kind, 6, model) for kind, _, model in ends),
        ("step", 1, 2),
    ]


def passes(folder: str) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []

    def on_event(event: Event, model: int) -> None:
        if isinstance(event, EpochEvent):
            found.append((event.number, event.step))

    batches = [rows for (rows,) in loader()]
    with opened(folder, on_event) as session:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = session.prepare(model, optimizer, batches, loss=loss_fn, batch_size=BATCH)
        for epoch in state.epochs(2):
            for batch in epoch:
                state.step(batch)
    return found


def test_passes_of_a_list_are_epochs_too(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, passes, str(tmp_path)) == [[(0, 3), (1, 6)]] * 2


# ── what it raises ────────────────────────────────────────────────────────────────────────────────────────────────────


class Enough(Exception):
    """Of the user's own."""


def raising(folder: str) -> tuple[int, list[str]]:
    kinds: list[str] = []

    def on_event(event: Event, model: int) -> None:
        kinds.append(event.kind)
        if isinstance(event, StepEvent) and event.step == 2:
            raise Enough(f"after step {event.step}")

    with opened(folder, on_event) as session:
        state = prepared(session)
        batches = state.batches()
        state.step(next(batches))
        with pytest.raises(Enough, match="after step 2"):
            state.step(next(batches))
        state.step(next(batches))  # the step before it was a whole one
        state.save()
        assert isinstance(state.evaluate(loader()), float)
        steps = state.steps
    return steps, kinds


def test_what_it_raises_comes_out_of_the_call_that_it_was_told_of(ranks: RankPool, tmp_path: Path) -> None:
    for steps, kinds in ranks.run(2, raising, str(tmp_path)):
        assert steps == 3
        assert kinds.count("step") == 3
        assert {"checkpoint", "evaluation", "end"} <= set(kinds)


def fail(folder: str, on_event: OnEvent) -> None:
    with opened(folder, on_event) as session:
        prepared(session)
        raise ValueError("of the loop")


def failing(folder: str, raises: bool) -> tuple[list[str], list[str]]:
    """What it hears of an error that ends the session, and what is warned of."""
    texts: list[str] = []

    def on_event(event: Event, model: int) -> None:
        if isinstance(event, FailureEvent):
            texts.append(f"{event.error}: {event.text}")
            if raises:
                raise Enough("in the function")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(ValueError, match="of the loop"):
            fail(folder, on_event)
    return texts, [str(one.message) for one in caught if "on_event" in str(one.message)]


def test_it_hears_of_the_error_that_ends_the_session(tmp_path: Path) -> None:
    assert failing(str(tmp_path / "a"), raises=False) == (["ValueError: of the loop"], [])
    texts, told = failing(str(tmp_path / "b"), raises=True)
    assert texts == ["ValueError: of the loop"]
    assert told == ["on_event raised Enough: in the function, while the session ended by an error."]


def test_events_have_what_they_are_about(tmp_path: Path) -> None:
    found: list[Event] = []

    def on_event(event: Event, model: int) -> None:
        found.append(event)

    def rows(outputs: Tensor, targets: Tensor) -> int:
        return len(outputs)

    with opened(str(tmp_path), on_event) as session:
        state = prepared(session)
        losses = [state.step(batch).loss for batch in state.batches()]
        value = state.evaluate(loader(), {"rows": rows})
        path = state.save()
    assert [event.loss for event in found if isinstance(event, StepEvent)] == losses
    (evaluation,) = [event for event in found if isinstance(event, EvaluationEvent)]
    assert (evaluation.validation_loss, evaluation.metrics["rows"]) == (value["loss"], ROWS)
    assert [event.path for event in found if isinstance(event, CheckpointEvent)] == [str(path)]

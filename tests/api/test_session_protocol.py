"""Ranks that do different things in a session: drawn programs of calls end soon, right or with an error that names the
methods and ranks; a setting that differs is named with its values.  Nothing hangs, nothing is silent."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from session_places import agent, as_launched
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan
from weft.errors import WeftError

METHODS = ("step", "step", "step", "save", "evaluate", "predict", "gather", "load", "export", "raise")
SECONDS = 10.0
"""In which every session must have ended; `collective_timeout_seconds` is far more."""


def _loss(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def _session(folder: Path, zero: int) -> Any:
    plan = Plan(
        mesh=MeshPlan(shard=2) if zero == 3 else MeshPlan(replicate=2),
        data_parallel=DataParallelPlan(zero=zero),  # type: ignore[arg-type]
        microbatch=MicrobatchPlan(size=2, per_step=1),
    )
    return weft.session(plan=plan, folder=folder, quiet=True)


def _prepare(session: Any, rows: int = 16, lr: float = 0.1) -> Any:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    loader = DataLoader(TensorDataset(torch.ones(rows, 4)), batch_size=4)
    return session.prepare(model, torch.optim.SGD(model.parameters(), lr=lr), loader, loss=_loss)


def _do(state: Any, method: str, folder: Path, number: int) -> None:
    if method == "step":
        state.step(next(state.batches()))
    elif method == "evaluate":
        state.evaluate(DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=4))
    elif method == "predict":
        state.predict(DataLoader(TensorDataset(torch.ones(6, 4)), batch_size=4))
    elif method == "gather":
        state.gather(torch.ones(2, 3))
    elif method == "export":
        state.export(folder / f"export-{number}")
    elif method == "raise":
        raise ValueError("of the loop")
    else:
        getattr(state, method)()


def _programs(seed: int) -> list[list[str]]:
    """What each of two ranks calls after a first save: mostly the same, with one change on one of them."""
    draw = random.Random(seed)
    common = [draw.choice(METHODS[:-1]) for _ in range(draw.randint(2, 5))]
    programs = [list(common), list(common)]
    changed, place = draw.choice(programs), draw.randrange(len(common))
    match draw.choice(["none", "skip", "insert", "replace", "raise"]):
        case "skip":
            del changed[place]
        case "insert":
            changed.insert(place, draw.choice(METHODS))
        case "replace":
            changed[place] = draw.choice(METHODS)
        case "raise":
            changed[place] = "raise"
        case _:
            pass
    return programs


def _play(folder: str, port: int, seeds: list[int]) -> list[tuple[str, str, float]]:
    """Per program: the kind of error, its text and the seconds taken; one process plays all, session after session."""
    found: list[tuple[str, str, float]] = []
    with as_launched(port) as rank:
        for seed in seeds:
            begun, own = time.monotonic(), Path(folder) / str(seed)
            try:
                with _session(own, seed % 4) as session:
                    state = _prepare(session)
                    state.step(next(state.batches()))
                    state.save()
                    for number, method in enumerate(_programs(seed)[rank]):
                        _do(state, method, own, number)
                found.append(("", "", time.monotonic() - begun))
            except (WeftError, ValueError) as error:
                found.append((type(error).__name__, str(error), time.monotonic() - begun))
        gc.collect()  # of the groups that tracebacks held
    return found


def _is_right(seed: int, results: tuple[tuple[str, str, float], ...]) -> bool:
    """Whether the ends of a program on both ranks are what its calls deserve."""
    first, second = _programs(seed)
    kinds = [kind for kind, _, _ in results]
    if any(seconds > SECONDS for _, _, seconds in results):
        return False
    if first == second:
        return kinds == ["", ""]
    shorter = min(len(first), len(second))
    at = next((n for n in range(shorter) if first[n] != second[n]), shorter)
    methods = ["the end of the session" if n is None else n for n in (_at(first, at), _at(second, at))]
    if "raise" in methods:
        raised = methods.index("raise")
        text = results[1 - raised][1]
        return kinds[raised] == "ValueError" and f"rank {raised} has left the group (ValueError: of the loop)" in text
    return all(
        kind == "CollectiveError"
        and all(f"rank {rank} is in {_spelt(name)}" in text for rank, name in enumerate(methods))
        for kind, text, _ in results
    )


def _at(program: list[str], place: int) -> str | None:
    """A program's call there; None where it has ended."""
    return program[place] if place < len(program) else None


def _spelt(name: str) -> str:
    return name if " " in name else f"state.{name}() at test_session_protocol.py:"


@pytest.mark.parametrize("first", [0, 100])
def test_drawn_programs_end_right_or_name_methods_and_ranks(ranks: RankPool, tmp_path: Path, first: int) -> None:
    seeds = list(range(first, first + 8))
    with agent() as port:
        found = ranks.run(2, _play, str(tmp_path), port, seeds, timeout=100)
    wrong = {
        seed: (_programs(seed), ends)
        for seed, *ends in zip(seeds, *found, strict=True)
        if not _is_right(seed, tuple(ends))
    }
    assert not wrong


def _differ(folder: str, port: int, kind: str) -> str:
    with as_launched(port) as rank:
        odd = rank == 1
        try:
            with _session(Path(folder), 1) as session:
                state = _prepare(
                    session,
                    rows=20 if odd and kind == "rows" else 16,
                    lr=0.2 if odd and kind == "lr at prepare" else 0.1,
                )
                before = state.model.weight.detach().clone()
                if odd and kind == "lr":
                    state.optimizer.param_groups[0]["lr"] = 0.05
                if odd and kind == "betas":
                    state.optimizer.param_groups[0]["momentum"] = 0.9
                try:
                    state.step(next(state.batches()))
                except WeftError:
                    assert torch.equal(state.model.weight, before)  # refused before anything has changed
                    raise
                rows = 10 if odd and kind == "evaluate" else 6
                state.evaluate(DataLoader(TensorDataset(torch.ones(rows, 4)), batch_size=4))
        except WeftError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("rows", "the number of samples in the loader differs between the ranks: 16 on rank 0, 20 on rank 1"),
        ("lr at prepare", "SGD's lr (group 0) differs between the ranks: 0.1 on rank 0, 0.2 on rank 1"),
        ("lr", "SGD's lr (group 0) differs between the ranks: 0.1 on rank 0, 0.05 on rank 1"),
        ("betas", "SGD's momentum (group 0) differs between the ranks: 0 on rank 0, 0.9 on rank 1"),
        ("evaluate", "batch 1 of the loader that is run through differs between the ranks: 2 samples ("),
        ("nothing", ""),
    ],
)
def test_what_differs_between_ranks_is_named_on_all_of_them(
    ranks: RankPool, tmp_path: Path, kind: str, text: str
) -> None:
    with agent() as port:
        for found in ranks.run(2, _differ, str(tmp_path), port, kind, timeout=30):
            assert found.startswith(text)
            assert bool(found) == bool(text)

"""A session leaves the folder that a train leaves, unless it is told not to."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import torch
from metrics_lines import STEP_KEYS
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import DataParallelPlan, MeshPlan, MicrobatchPlan, Plan, load_plan
from weft.errors import LaunchError, WeftError

PLAN = Plan(
    mesh=MeshPlan(replicate=2), data_parallel=DataParallelPlan(zero=1), microbatch=MicrobatchPlan(size=2, per_step=2)
)


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def lines(folder: Path, kind: str) -> list[dict[str, Any]]:
    found = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


def loop(folder: str | None, home: str, how: str = "", record: bool = True) -> list[float]:
    losses: list[float] = []
    loader = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=8)
    with chdir(home), weft.session(plan=PLAN, folder=folder, quiet=True, record=record) as session:
        for model in [nn.Linear(4, 4) for _ in range(2 if how == "two" else 1)]:
            state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
            if how == "resume":
                assert state.load() == 2
            for batch in state.batches():
                losses.append(state.step(batch).loss)
            state.evaluate(loader)
            state.save()
        if how == "raises" and session.rank == 1:
            raise ValueError("of the loop")
    return losses


def test_two_ranks_leave_the_folder_of_a_train(ranks: Any, tmp_path: Path) -> None:
    losses = ranks.run(2, loop, None, str(tmp_path))[0]
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith(("session-", "pytest-"))  # the second under python -m pytest
    assert load_plan(folder / "plan.toml") == PLAN
    steps = lines(folder, "step")
    assert [step["loss"] for step in steps] == losses
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        assert set(step) == STEP_KEYS
        assert step["communication"]["data"]["bytes"] > 0
        assert step["samples_per_second"] > 0
        assert step["learning_rate"] == pytest.approx(0.1)
    (evaluation,), (save,) = lines(folder, "evaluation"), lines(folder, "checkpoint")
    assert evaluation["step"] == 2
    assert Path(save["path"]).parent == folder / "checkpoints"
    for rank in (0, 1):
        assert f"rank {rank} INFO weft: step    2  saved" in (folder / f"rank-{rank}.log").read_text()


def test_a_resumed_session_goes_on_in_its_folder_and_each_model_has_one(ranks: Any, tmp_path: Path) -> None:
    home = tmp_path / "one"
    ranks.run(2, loop, str(home), str(tmp_path), "two")
    assert [step["step"] for step in lines(home, "step")] == [1, 2]
    assert [step["step"] for step in lines(home / "model-2", "step")] == [1, 2]
    ranks.run(2, loop, str(home), str(tmp_path), "resume")
    assert [step["step"] for step in lines(home, "step")] == [1, 2, 3, 4]


def test_without_a_record_only_saves_are_left(ranks: Any, tmp_path: Path) -> None:
    ranks.run(2, loop, None, str(tmp_path), "", False)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["session"]
    assert {path.name for path in (tmp_path / "runs" / "session").iterdir()} == {"checkpoints", "owner.json"}


def test_the_error_that_a_rank_leaves_with_is_in_its_log(ranks: Any, tmp_path: Path) -> None:
    with pytest.raises((ValueError, WeftError)):
        ranks.run(2, loop, str(tmp_path / "a"), str(tmp_path), "raises")
    text = (tmp_path / "a" / "rank-1.log").read_text()
    assert "rank 1 ERROR weft: rank 1 on host" in text
    assert "stopped: ValueError: of the loop" in text
    assert lines(tmp_path / "a", "step")


def _refused(folder: str) -> str:
    try:
        loop(folder, str(Path(folder).parents[1]))
    except LaunchError as error:
        return str(error)
    return ""


def test_a_folder_that_cannot_be_made_is_the_error_of_all_ranks(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    texts = ranks.run(2, _refused, str(tmp_path / "file" / "run"))
    assert texts[0] == texts[1]
    assert "Give a folder that is writable" in texts[0]


def tracked(folder: str, fails_at: int | None) -> tuple[list[tuple[str, float, int]], list[float]]:
    told: list[tuple[str, float, int]] = []

    def track(name: str, value: float, step: int) -> None:
        if fails_at is not None and step >= fails_at:
            raise ConnectionError("the tracker is gone")
        told.append((name, value, step))

    losses: list[float] = []
    loader = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=8)
    with weft.session(plan=PLAN, folder=folder, quiet=True, track=track) as session:
        for _ in range(2):
            model = nn.Linear(4, 4)
            state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
            losses += [state.step(batch).loss for batch in state.batches()]
            state.evaluate(loader, {"rows": lambda outputs, targets: len(outputs)})
    return told, losses


def test_a_tracker_is_told_of_every_number_on_rank_0(ranks: Any, tmp_path: Path) -> None:
    (told, losses), (silent, _) = ranks.run(2, tracked, str(tmp_path), None)
    assert not silent
    for prefix, own in (("", losses[:2]), ("model-2/", losses[2:])):
        found = {name: [] for name, _, _ in told}
        for name, value, step in told:
            found[name].append((step, value))
        assert found[f"{prefix}train/loss"] == [(1, own[0]), (2, own[1])]
        assert found[f"{prefix}train/learning_rate"] == [(1, pytest.approx(0.1)), (2, pytest.approx(0.1))]
        assert found[f"{prefix}evaluation/rows"] == [(2, 16.0)]
        assert found[f"{prefix}rate/samples_per_second"][0][1] > 0
        assert found[f"{prefix}communication/data/bytes"][0][1] > 0
        assert f"{prefix}seconds/backward" in found or f"{prefix}seconds/forward_backward" in found
    assert all(type(value) is float for _, value, _ in told)


def test_a_tracker_that_fails_is_asked_no_more(ranks: Any, tmp_path: Path) -> None:
    (told, losses), _ = ranks.run(2, tracked, str(tmp_path), 2)
    assert {step for _, _, step in told} == {1}
    assert len(losses) == 4
    assert "the tracker is gone" in (tmp_path / "rank-0.log").read_text()

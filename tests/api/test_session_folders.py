"""Two that would write in one folder: the second is refused before it touches anything, and what an earlier run saved
stays until that is loaded."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan
from weft.errors import LaunchError, WeftError
from weft.run.checkpoint import SaveError

ROWS = torch.arange(64.0, dtype=torch.float64).view(16, 4) / 64

HOLD = """
import sys, time
sys.path[:0] = {tests!r}
from test_session_folders import train
train({folder!r}, 1, then=lambda: (print("saved", flush=True), time.sleep(120)))
"""


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def train(
    folder: str, steps: int, world: int = 1, *, load: str = "", record: bool = True, then: object = None
) -> tuple[int, str]:
    """Take steps and save; return the step at which the run is, and the error of the save."""
    torch.manual_seed(0)
    plan = Plan(mesh=MeshPlan(replicate=world), microbatch=MicrobatchPlan(size=4 // world))
    with weft.session(plan=plan, folder=folder, record=record, quiet=True) as session:
        model = nn.Linear(4, 4).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(TensorDataset(ROWS.float()), batch_size=4)
        state = session.prepare(model.float(), optimizer, loader, loss=loss_fn)
        if load:
            state.load(None if load == "latest" else load)
        for batch in state.batches(steps):
            state.step(batch)
        problem = ""
        try:
            state.save()
        except WeftError as error:
            problem = f"{type(error).__name__}: {error}"
        if callable(then):
            then()
        return state.steps, problem


def refused(folder: str, world: int) -> str:
    try:
        return train(folder, 1, world)[1]
    except LaunchError as error:
        return f"{type(error).__name__}: {error}"


def content(folder: Path) -> dict[str, bytes]:
    """The files of a run, but those in which its own process notes where its time goes."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("telemetry.sqlite"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def running(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A session in a process of its own that has saved, and goes on."""
    here = Path(__file__).parent
    tests = [str(here), str(here.parent / "support")]
    script = HOLD.format(tests=tests, folder=str(folder))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "saved\n"
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_a_second_session_is_refused_on_all_ranks_and_a_killed_one_is_followed_at_once(
    ranks: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    with running(folder) as process:
        before = content(folder)
        for texts in (ranks.run(2, refused, str(folder), 2), [refused(str(folder), 1)]):
            for text in texts:
                assert text.startswith(f"LaunchError: {folder} is in use by process {process.pid} on host ")
                assert f"Wait until that has ended, stop it (kill {process.pid}), or give another folder." in text
                assert "recipe" not in text
        assert content(folder) == before
    with caplog.at_level(logging.WARNING):
        assert train(str(folder), 2, load="latest") == (3, "")
    (line,) = (record.getMessage() for record in caplog.records if "was left by" in record.getMessage())
    assert f"was left by process {process.pid} on host" in line
    assert "has ended: this run takes the folder over" in line
    assert line in (folder / "rank-0.log").read_text()


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("record", [True, False])
def test_a_new_session_leaves_the_saves_of_an_old_one(
    ranks: RankPool, tmp_path: Path, world: int, record: bool
) -> None:
    folder = str(tmp_path / "run")
    saves = tmp_path / "run" / "checkpoints"
    assert ranks.run(world, train, folder, 4, world, record=record) == [(4, "")] * world
    before = content(saves)
    for _, problem in ranks.run(world, train, folder, 1, world, record=record):
        assert problem.startswith("SaveError: the checkpoint of step 1 was not saved: ")
        assert "holds saves of an earlier run (the newest: step-000004), and this run began anew" in problem
        assert "Load one before the first step to go on with it, or give another folder" in problem
    assert content(saves) == before
    assert ranks.run(world, train, folder, 1, world, load="latest", record=record) == [(5, "")] * world
    assert (saves / "latest").read_text() == "step-000005\n"
    assert {path.name for path in saves.iterdir()} == {"latest", "step-000004", "step-000005"}


def test_what_was_loaded_from_elsewhere_replaces_nothing_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    here, there = str(tmp_path / "here"), str(tmp_path / "there")
    train(here, 4)
    train(there, 1)
    with caplog.at_level(logging.WARNING):
        _, problem = train(here, 1, load=f"{there}/checkpoints/step-000001")
    assert "holds saves of an earlier run" in problem
    assert train(here, 1, load=f"{here}/checkpoints/step-000004") == (5, "")


def test_the_first_step_says_that_a_save_will_be_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(str(tmp_path), 4)
    with caplog.at_level(logging.WARNING):
        train(str(tmp_path), 1)
    (line,) = (record.getMessage() for record in caplog.records if "will be refused" in record.getMessage())
    assert "state.load() before the first step to go on with it, or give weft.session another folder" in line


def test_without_a_record_the_second_is_refused_at_its_first_save(tmp_path: Path) -> None:
    texts: list[str] = []

    def second() -> None:
        texts.append(train(str(tmp_path), 1, record=False)[1])

    train(str(tmp_path), 1, record=False, then=second)
    assert "is in use by this process" in texts[0]
    assert "Earlier checkpoints are as they were" in texts[0]


def test_a_session_that_was_taken_for_dead_names_no_checkpoint(tmp_path: Path) -> None:
    saves = tmp_path / "checkpoints"
    with pytest.raises(SaveError, match=r"no longer this run's folder: .*owner\.json has been taken away"):
        train_and_lose(str(tmp_path))
    assert {path.name for path in saves.iterdir()} == {"latest", "step-000001"}


def train_and_lose(folder: str) -> None:
    with weft.session(plan=Plan(microbatch=MicrobatchPlan(size=4)), folder=folder, quiet=True) as session:
        model = nn.Linear(4, 4)
        loader = DataLoader(TensorDataset(ROWS.float()), batch_size=4)
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        for number, batch in enumerate(state.batches(2)):
            state.step(batch)
            state.save()
            if number == 0:
                (Path(folder) / "owner.json").unlink(missing_ok=True)  # by what took this run for dead


@pytest.mark.parametrize("how", ["ends", "raises"])
def test_the_folder_is_given_back_at_the_end(ranks: RankPool, tmp_path: Path, how: str) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="of the loop") if how == "raises" else _nothing():
            ranks.run(2, leave, str(tmp_path), how)
    assert '"token": 2' in (tmp_path / "owner.json").read_text()
    assert '"ended": true' in (tmp_path / "owner.json").read_text()


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def leave(folder: str, how: str) -> None:
    def then() -> None:
        if how == "raises":
            raise ValueError("of the loop")

    train(folder, 1, 2, then=then)

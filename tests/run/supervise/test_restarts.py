"""Ranks that fail in a training: which start again, from where, and that the losses are those of an undisturbed run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from s3_server import S3Server

import weft
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    ModelRecipe,
    OnFailure,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import CheckpointError, LaunchError, NotFiniteError, WeftError
from weft.run.checkpoint.inspect import list_checkpoints
from weft.run.launch.launcher import ForkServer, RankError

STEPS, SAVE_EVERY, AT = 12, 3, 8


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        (folder / f"{number}.txt").write_text(
            "".join(f"text {number} says {line * number % 97}\n" for line in range(200))
        )
    return folder


def recipe_of(corpus: Path, folder: Path, on_failure: OnFailure, **fault: Any) -> Recipe:
    source = DataSource(source=str(corpus))
    return Recipe(
        model=ModelRecipe(
            factory="faulty_models:build",
            arguments={**fault, **({"mark": str(folder / "mark")} if fault else {})},
            sequence_length=16,
            loss="tokens",
            propose_split=False,
        ),
        data=DataRecipe(train=(source,), cache=str(corpus.parent / "cache"), validation_fraction=0.2),
        batch=BatchRecipe(global_batch_size=4),
        optimizer=OptimizerRecipe(learning_rate=1e-2),
        run=RunRecipe(steps=STEPS, save_every=SAVE_EVERY, on_failure=on_failure),
    )


@pytest.fixture(scope="module")
def expected(corpus: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    """Losses of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    recipe = recipe_of(corpus, folder, OnFailure())
    return train(recipe, folder, fork_server).losses


def train(recipe: Recipe, folder: Path, fork_server: ForkServer, **keywords: Any) -> weft.RunResult:
    return weft.train(
        recipe,
        processes=2,
        folder=folder / "run",
        fork_server=fork_server,
        prove="never",
        quiet=True,
        zero=0,
        **keywords,
    )


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "run" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == kind]


QUICK = OnFailure(hang_seconds=3.0)
"""On a machine with other work a step of these may take a second."""


@pytest.mark.parametrize(
    ("fault", "where", "rank", "on_failure", "kind"),
    [
        ("kill", "forward", 1, OnFailure(), "killed"),
        ("kill", "backward", 0, OnFailure(), "killed"),
        ("segfault", "forward", 0, OnFailure(), "killed"),
        ("exit", "backward", 1, OnFailure(), "error"),
        ("raise", "forward", 1, OnFailure(), "error"),
        ("raise", "backward", 0, OnFailure(), "error"),
        ("wait", "forward", 1, QUICK, "hang"),
        ("wait", "backward", 0, QUICK, "hang"),
        ("compute", "forward", 1, QUICK, "hang"),
        ("interpreter", "forward", 0, QUICK, "hang"),
        ("stop", "forward", 1, QUICK, "hang"),
        ("device memory", "forward", 1, OnFailure(device_memory="restart"), "device_memory"),
        ("host memory", "backward", 0, OnFailure(host_memory="restart"), "host_memory"),
    ],
)
def test_a_rank_that_fails_once_costs_only_the_steps_since_the_last_save(
    corpus: Path,
    expected: tuple[float, ...],
    fork_server: ForkServer,
    tmp_path: Path,
    fault: str,
    where: str,
    rank: int,
    on_failure: OnFailure,
    kind: str,
) -> None:
    recipe = recipe_of(corpus, tmp_path, on_failure, fault=fault, where=where, rank=rank, step=AT)
    result = train(recipe, tmp_path, fork_server)
    assert result.losses == expected  # bit for bit: the same plan
    generation, *more = events(tmp_path, "generation")
    assert all(one["failure"] == kind == "hang" for one in more)  # on a busy machine a step may take three seconds
    assert (generation["number"], generation["rank"], generation["failure"]) == (2, rank, kind)
    # A rank that a signal had stopped is continued when the job is ended: the step is finished, and saved.
    finished = AT if fault == "stop" else AT - 1
    assert generation["failed_step"] == finished + 1
    saved = finished - finished % SAVE_EVERY if fault != "stop" else AT
    assert saved <= generation["restored_step"] <= finished  # a snapshot in memory may have come after the save
    assert result.export is not None


@pytest.mark.parametrize(
    ("fault", "policy", "error", "text"),
    [
        ("kill", "killed", RankError, 'killed by SIGKILL.*run.on_failure.killed = "stop" in the recipe'),
        ("raise", "error", RankError, "ValueError: a width of 7 was not expected"),
        ("wait", "hang", RankError, "rank 1 of 2 on host .* stopped: Hang: no progress for .* in step 8"),
        ("device memory", "device_memory", RankError, 'out of memory.*run.on_failure.device_memory = "stop"'),
        ("host memory", "host_memory", RankError, "can't allocate memory"),
    ],
)
def test_a_policy_of_stop_stops(
    corpus: Path,
    fork_server: ForkServer,
    tmp_path: Path,
    fault: str,
    policy: str,
    error: type[WeftError],
    text: str,
) -> None:
    stop: dict[str, Any] = {policy: "stop", "hang_seconds": 2.0 if fault == "wait" else None}
    recipe = recipe_of(corpus, tmp_path, OnFailure(**stop), fault=fault, rank=1, step=AT)
    with pytest.raises(error, match=f"(?s){text}"):
        train(recipe, tmp_path, fork_server)
    assert not events(tmp_path, "generation")
    # The saved state is there, and the fault is over: the run can be gone on with.
    resumed = weft.train(
        recipe, resume=tmp_path / "run", fork_server=fork_server, prove="never", quiet=True, zero=0, processes=2
    )
    assert resumed.steps == STEPS


def test_a_fault_that_comes_back_ends_the_run_and_names_the_batch(
    corpus: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path, OnFailure(max_restarts=2), fault="kill", rank=0, step=AT, times=9)
    began = time.monotonic()
    with pytest.raises(
        RankError, match=r"(?s)killed by SIGKILL.*Restarting 2 times in a row.*after step [67].*samples 28 to 31"
    ):
        train(recipe, tmp_path, fork_server)
    assert [event["num_restarts"] for event in events(tmp_path, "generation")] == [1, 2]
    assert time.monotonic() - began > 1.0  # it waited before the second restart


def test_an_error_that_comes_back_is_not_tried_a_third_time(
    corpus: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path, OnFailure(), fault="raise", rank=1, step=AT, times=9)
    with pytest.raises(
        RankError, match=r"(?s)ValueError.*The same error came at step 8 after a restart.*samples 28 to 31"
    ):
        train(recipe, tmp_path, fork_server)
    assert len(events(tmp_path, "generation")) == 1


def test_an_error_before_the_first_step_and_wrong_input_stop_at_once(
    corpus: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    recipe = recipe_of(corpus, tmp_path, OnFailure(), fault="raise", rank=1, step=1, times=9)
    recipe = replace(
        recipe, optimizer=OptimizerRecipe(learning_rate=1e30), run=replace(recipe.run, max_skipped_steps=0)
    )
    with pytest.raises(WeftError):
        train(recipe, tmp_path, fork_server)
    diverging = recipe_of(corpus, tmp_path, OnFailure())
    diverging = replace(
        diverging,
        optimizer=OptimizerRecipe(name="sgd", learning_rate=1e30),
        run=replace(diverging.run, max_skipped_steps=0),
    )
    with pytest.raises(NotFiniteError, match="1 steps in a row"):
        train(diverging, tmp_path / "second", fork_server)
    assert not events(tmp_path / "second", "generation")


def test_a_slow_step_is_no_hang(corpus: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path, OnFailure(), fault="slow", rank=1, step=AT)
    train(recipe, tmp_path, fork_server)
    assert not events(tmp_path, "generation")


def test_a_killed_parent_of_the_ranks_is_replaced(corpus: Path, tmp_path: Path, expected: tuple[float, ...]) -> None:
    """The fork server dies with the job that it carried; the run starts another."""
    recipe = recipe_of(corpus, tmp_path, OnFailure(), fault="wait", rank=1, step=AT)
    with ForkServer(preload=("weft.run.worker",)) as fork_server:

        def strike() -> None:
            until = time.monotonic() + 30
            while not (tmp_path / "mark.1").exists() and time.monotonic() < until:
                time.sleep(0.02)
            os.kill(fork_server.pid, signal.SIGKILL)

        thread = threading.Thread(target=strike)
        thread.start()
        try:
            assert train(recipe, tmp_path, fork_server).losses == expected
        finally:
            thread.join()


def stored(recipe: Recipe, steps: int) -> Recipe:
    return replace(recipe, run=replace(recipe.run, steps=steps, checkpoints="s3://bucket/models"))


def test_a_run_goes_on_from_the_store_with_the_losses_of_one_that_was_never_stopped(
    corpus: Path,
    expected: tuple[float, ...],
    fork_server: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    recipe = recipe_of(corpus, tmp_path, OnFailure())
    with S3Server() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(CheckpointError, match="its bucket does not exist"):
            train(stored(recipe, 7), tmp_path, fork_server)
        assert not (tmp_path / "run").exists()
        server.make_bucket("bucket")
        first = train(stored(recipe, 7), tmp_path, fork_server)
        assert [entry.step for entry in list_checkpoints("s3://bucket/models/run")] == [7, 6]
        shutil.rmtree(first.folder / "checkpoints")  # as on another machine
        files = fsspec.filesystem("s3", use_listings_cache=False, skip_instance_cache=True)
        files.pipe_file("bucket/models/run/step-000007/rank-00000-0000.safetensors", b"damaged")
        with pytest.raises(LaunchError, match="is there already and not empty"):
            train(stored(recipe, 7), tmp_path, fork_server)
        result = weft.train(
            stored(recipe, STEPS),
            processes=2,
            resume=first.folder,
            fork_server=fork_server,
            prove="never",
            quiet=True,
            zero=0,
        )
        assert (*first.losses[:6], *result.losses) == expected
        assert list_checkpoints("s3://bucket/models/run")[0].step == STEPS
        shutil.rmtree(first.folder)
        with pytest.raises(CheckpointError, match=r"holds saves of an earlier run .the newest: step-000012"):
            train(stored(recipe, 7), tmp_path, fork_server)
    assert "never-printed" not in capfd.readouterr().err + (tmp_path / "run" / "recipe.toml").read_text()

"""A training that goes on under other plans while it runs: the losses are those of the run that was left alone."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from weft.config.plan import MeshPlan
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    DecoderShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import LaunchError, PlanError
from weft.events import RunFolder
from weft.run.launch.launcher import ForkServer
from weft.run.supervise.replan import PlanRequest, ask_for_plan

STEPS = 150
SHAPE = DecoderShape(
    num_layers=4, hidden_size=48, num_heads=4, num_kv_heads=2, vocabulary_size=300, sequence_length=48, dropout=0.1
)
PLANS = {
    "data 2": weft.Plan.ddp(replicate=2),
    "tensor 2": weft.Plan.tensor(2),
    "pipeline 2": weft.Plan.pipeline(2),
    "ZeRO-3": weft.Plan.fsdp(shard=2),
    "data 1": weft.Plan.ddp(replicate=1),
    "data 4": weft.Plan.ddp(replicate=4),
    "tensor 2 × data 2": replace(weft.Plan.tensor(2), mesh=MeshPlan(tensor=2, replicate=2)),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(6):
        lines = (f"text {number} says {line * number % 97}\n" for line in range(200))
        (folder / f"{number}.txt").write_text("".join(lines))
    return folder


def recipe_of(corpus: Path, model: ModelRecipe | None = None) -> Recipe:
    return Recipe(
        model=model or ModelRecipe(reference="decoder", shape=SHAPE),
        data=DataRecipe(
            train=(DataSource(source=str(corpus)),), cache=str(corpus.parent / "cache"), validation_fraction=0.2
        ),
        batch=BatchRecipe(global_batch_size=8),
        optimizer=OptimizerRecipe(learning_rate=1e-3),
        run=RunRecipe(steps=STEPS),
    )


@contextmanager
def running(
    recipe: Recipe, folder: Path, fork_server: ForkServer, plan: str = "data 2"
) -> Iterator[Future[weft.RunResult]]:
    """A training in a thread beside this test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(
            weft.train, recipe, PLANS[plan], folder=folder, fork_server=fork_server, prove="never", quiet=True
        )


def wait_for_step(folder: Path, step: int, run: Future[weft.RunResult]) -> None:
    metrics = folder / "metrics.jsonl"
    until = time.monotonic() + 60
    while time.monotonic() < until and not run.done():
        if metrics.is_file() and any(line.get("step", 0) >= step for line in lines_of(metrics)):
            return
        time.sleep(0.01)
    assert not run.done(), run.result()


def lines_of(metrics: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def generations(folder: Path) -> list[dict[str, object]]:
    return [line for line in lines_of(folder / "metrics.jsonl") if line["kind"] == "generation"]


def near(losses: Sequence[float], expected: Sequence[float]) -> bool:
    return len(losses) == len(expected) and all(
        abs(loss - other) <= 2e-5 * abs(other) for loss, other in zip(losses, expected, strict=True)
    )


@pytest.fixture(scope="module")
def expected(corpus: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    """Losses of the run that nobody touches."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    with running(recipe_of(corpus), folder, fork_server) as run:
        return run.result().losses


@pytest.mark.parametrize("seed", range(3))
def test_losses_are_those_of_the_run_that_was_left_alone(
    corpus: Path, expected: tuple[float, ...], fork_server: ForkServer, tmp_path: Path, seed: int
) -> None:
    draw, folder = random.Random(seed), tmp_path / "run"
    names = [*draw.sample(["tensor 2", "pipeline 2", "ZeRO-3", "data 1"], 3), "data 2"]
    assert near(losses_under(["data 2", *names], draw, recipe_of(corpus), folder, fork_server), expected)


@pytest.mark.parametrize("seed", range(10))
def test_so_are_those_of_four_ranks_in_a_chain_of_plans(
    corpus: Path, expected: tuple[float, ...], fork_server: ForkServer, tmp_path: Path, seed: int
) -> None:
    names = ["data 4", "tensor 2 × data 2", "pipeline 2", "data 4"]
    losses = losses_under(names, random.Random(seed), recipe_of(corpus), tmp_path / "run", fork_server)
    assert near(losses, expected)


def losses_under(
    names: Sequence[str], draw: random.Random, recipe: Recipe, folder: Path, fork_server: ForkServer
) -> Sequence[float]:
    """The losses of a run that begins under the first plan and goes on under one after another, at drawn steps."""
    with running(recipe, folder, fork_server, names[0]) as run:
        step = 0
        for name in names[1:]:
            step += draw.randrange(3, 12)
            wait_for_step(folder, step, run)
            assert ask_for_plan(RunFolder(folder), PLANS[name]).startswith("accepted  the ranks go on under it")
            done = len(generations(folder)) + 1
            until = time.monotonic() + 60
            while len(generations(folder)) < done and time.monotonic() < until and not run.done():
                time.sleep(0.01)
        result = run.result()
    changes = generations(folder)
    assert str(changes[0]["cause"]).split(" → ")[0] == names[0]
    assert [change["failure"] for change in changes] == ["replan"] * (len(names) - 1)
    assert not result.stopped_early
    return result.losses


def test_a_plan_that_does_not_fit_is_refused_and_the_run_goes_on(
    corpus: Path, expected: tuple[float, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with running(recipe_of(corpus), folder, fork_server) as run:
        wait_for_step(folder, 3, run)
        with pytest.raises(PlanError, match=r"(?s)mesh.tensor = 3 does not divide num_heads = 4.*The run goes on"):
            ask_for_plan(RunFolder(folder), weft.Plan.tensor(3))
        assert run.result().losses == expected
    assert not generations(folder)
    with pytest.raises(LaunchError, match="no training runs in .* --resume"):
        ask_for_plan(RunFolder(folder), PLANS["tensor 2"])


def test_under_a_plan_that_fails_at_its_start_the_run_goes_back(
    corpus: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    model = ModelRecipe(
        factory="faulty_models:build",
        arguments={"fault": "alone"},
        sequence_length=16,
        loss="tokens",
        propose_split=False,
    )
    folder = tmp_path / "run"
    recipe = recipe_of(corpus, model)
    recipe = replace(recipe, run=replace(recipe.run, steps=800))  # of a few milliseconds each
    with running(recipe, folder, fork_server) as run:
        wait_for_step(folder, 3, run)
        ask_for_plan(RunFolder(folder), PLANS["data 1"])
        result = run.result()
    causes = [str(change["cause"]) for change in generations(folder)]
    assert causes == ["data 2 → data 1, as was asked for", "data 1 → data 2, since no step could be done under data 1"]
    assert result.steps == 800
    assert "replicate = 2" in (folder / "plan.toml").read_text()


def test_a_run_goes_on_with_fewer_and_with_more_devices(
    corpus: Path, expected: tuple[float, ...], fork_server: ForkServer, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path / "run")
    with running(recipe_of(corpus), folder.path, fork_server) as run:
        for step, devices, said in ((3, 1, "data 2 → data 1"), (12, 3, "data 1 → data 3"), (24, 2, "data 3 → data 2")):
            wait_for_step(folder.path, step, run)
            assert ask_for_plan(folder, PlanRequest(num_devices=devices)).startswith(f"plan      {said}\naccepted ")
            if devices == 2:
                break
            wait_for_generation(folder.path, run, devices)
            with pytest.raises(PlanError, match=f"has {devices} devices? already"):
                ask_for_plan(folder, PlanRequest(num_devices=devices))
        result = run.result()
    assert [change["world_size"] for change in generations(folder.path)] == [1, 3, 2]
    assert near(result.losses, expected)


def wait_for_generation(folder: Path, run: Future[weft.RunResult], world_size: int) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until and not run.done():
        if [*(change["world_size"] for change in generations(folder))][-1:] == [world_size]:
            return
        time.sleep(0.01)
    assert not run.done(), run.result()

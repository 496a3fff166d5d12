"""A rank that fails again and again: the run goes on without its device, with the losses of an undisturbed run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shrink_kit import STEPS, events, near, recipe_of, train, write_corpus

import weft
from weft.config.plan import load_plan
from weft.config.recipe import OnFailure
from weft.errors import PlanError, RecipeError
from weft.events import RunFolder
from weft.run.launch.launcher import ForkServer, RankError
from weft.run.supervise import GenerationFailure, Restart, RestartPolicy, Shrink, Stop

SHRINK = OnFailure(killed="shrink", error="shrink", hang="shrink", host_memory="shrink", max_restarts=5)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def expected(corpus: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, ...]:
    """Losses of the run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    return train(recipe_of(corpus, folder), folder, fork_server, weft.Plan.ddp(replicate=3)).losses


@pytest.mark.parametrize(
    ("fault", "times", "plan", "after"),
    [
        ("kill", 2, weft.Plan.ddp(replicate=3), [3, 2]),
        ("host memory", 1, weft.Plan.fsdp(shard=2), [1]),
    ],
)
def test_the_run_goes_on_with_fewer_ranks(
    corpus: Path,
    expected: tuple[float, ...],
    fork_server: ForkServer,
    tmp_path: Path,
    fault: str,
    times: int,
    plan: weft.Plan,
    after: list[int],
) -> None:
    recipe = recipe_of(
        corpus, tmp_path, fault={"fault": fault, "rank": 1, "step": 8, "times": times}, on_failure=SHRINK
    )
    result = train(recipe, tmp_path, fork_server, plan)
    assert result.steps == STEPS
    assert near(result.losses, expected)
    generations = events(tmp_path, "generation")
    assert [generation["world_size"] for generation in generations] == after
    *_, last = generations
    assert last["plan_change"].startswith(f"data {plan.mesh.data} → data {after[-1]}, since ")
    assert last["rank"] == 1
    kept = load_plan(tmp_path / "run" / "plan.toml")
    assert (kept.mesh.world_size, kept.global_batch_size) == (after[-1], 6)
    terminal = RunFolder(tmp_path / "run").launcher_log.read_text()
    assert f"shrink    generation {len(after) + 1}: {after[-1]} rank" in terminal


def test_a_run_does_not_shrink_below_its_least(corpus: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    fault = {"fault": "kill", "rank": 1, "step": 8, "times": 9}
    recipe = recipe_of(corpus, tmp_path, fault=fault, on_failure=SHRINK, min_devices=2)
    with pytest.raises(
        RankError,
        match=r"(?s)killed by SIGKILL.*cannot go on with fewer ranks, since rank 1 failed twice in a row:"
        r" run\.min_devices = 2 in the recipe, and 1 would be left",
    ):
        train(recipe, tmp_path, fork_server, weft.Plan.ddp(replicate=2))
    assert [generation["world_size"] for generation in events(tmp_path, "generation")] == [2]


def test_bounds_of_devices_hold_for_every_plan(corpus: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    recipe = recipe_of(corpus, tmp_path, max_devices=2)
    with pytest.raises(PlanError, match=r"makes 3 ranks \(data 3\), and the recipe has run.max_devices = 2"):
        train(recipe, tmp_path, fork_server, weft.Plan.ddp(replicate=3))
    with pytest.raises(RecipeError, match="max_devices = 1 is less than min_devices = 2"):
        recipe_of(corpus, tmp_path, min_devices=2, max_devices=1)


def failure(kind: Any = "killed", rank: int = 1, step: int = 8) -> GenerationFailure:
    return GenerationFailure(kind=kind, rank=rank, host="a", cause="because", step=step, phase="")


def test_when_a_policy_shrinks() -> None:
    policy = RestartPolicy(SHRINK, 0, 4)
    assert isinstance(policy.decide(failure(rank=1), 2), Restart)
    assert isinstance(policy.decide(failure(rank=2), 2), Restart)  # another rank
    decision = policy.decide(failure(rank=2), 2)
    assert decision == Shrink(2, "since rank 2 failed twice in a row")
    policy.shrunk()
    # With a new step saved between them it takes three.
    assert isinstance(policy.decide(failure(rank=0), 4), Restart)
    assert isinstance(policy.decide(failure(rank=0, step=12), 8), Restart)
    assert policy.decide(failure(rank=0, step=22), 16) == Shrink(0, "since rank 0 failed 3 times in a row")


def test_an_error_of_the_batch_is_no_broken_device() -> None:
    policy = RestartPolicy(SHRINK, 0, 4)
    assert isinstance(policy.decide(failure("error"), 2), Restart)
    assert isinstance(policy.decide(failure("error"), 2), Shrink)
    policy.shrunk()
    decision = policy.decide(failure("error"), 2)
    assert isinstance(decision, Stop)
    assert "on fewer devices. The batch of step 8 is samples 28 to 31" in decision.reason

"""Steps that decide where predictions cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weft.api import TimedPlan, decide_by_trials, step_seconds, time_plans
from weft.api.training.time_trials import _fit_together, _key, close_rivals
from weft.cli._read import read_choice
from weft.config.cluster import Cluster
from weft.config.plan import MeshPlan, MicrobatchPlan, PipelineParallelPlan, Plan
from weft.config.recipe import Recipe, parse_recipe
from weft.model.description import facts_of, profile_of
from weft.planning.search import PlanChoice, choose_plan
from weft.run.launch.launcher import ForkServer

RECIPE = """[model]
reference = "mlp"
num_layers = 2
input_size = 16
hidden_size = 32
num_classes = 3
[batch]
global_batch_size = 8
[run]
steps = 100
"""


def chosen(recipe: Recipe) -> tuple[PlanChoice, Cluster]:
    facts, machine = facts_of(recipe), Cluster.detect()
    choice = choose_plan(recipe, machine, facts, 2, profile=profile_of(recipe))
    # Two that predictions do not tell apart: the chosen one, and the same with another ZeRO stage.
    first = choice.rivals[0]
    assert first.plan is not None
    settings = first.plan.data_parallel
    one, other = (replace(first.plan, data_parallel=replace(settings, zero=zero)) for zero in (1, 0))
    return replace(choice, plan=one, rivals=(replace(first, plan=one), replace(first, plan=other))), machine


def lasting(seconds: float, choice: PlanChoice) -> int:
    """Steps of a run that is predicted to take so long: rivals are tried from 500 s on, compilation from 2,300 s."""
    return int(seconds / choice.rivals[0].prediction.step_seconds)


def test_the_fastest_is_taken_and_remembered(tmp_path: Path, fork_server: ForkServer) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    assert choice.plan.data_parallel.zero != 0
    assert len(close_rivals(choice)) == 2
    told: list[str] = []
    steps = lasting(1000, choice)
    decided = decide_by_trials(
        recipe, choice, machine, log=told.append, folder=tmp_path, steps=steps, fork_server=fork_server
    )
    assert [line.split(":")[0] for line in told] == ["trial     1 of 2", "trial     2 of 2"]
    why = next(why for key, why in decided.reasons.items() if key.startswith("mesh."))
    assert why.startswith("measured ")
    assert why.count("ZeRO-") == 1
    (kept,) = tmp_path.glob("*.json")
    kept.write_text('{"seconds": [[2.0, 4.0], [0.5, 3.0]]}')
    again = decide_by_trials(recipe, choice, machine, log=told.append, folder=tmp_path, steps=steps)
    assert len(told) == 2  # nothing was run again
    assert again.plan.data_parallel.zero == 0
    assert "measured 500 ms per step, data 2 ZeRO-1 fp32: 2 s" in again.reasons.values()


def test_nothing_is_tried_where_it_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    told: list[str] = []
    assert decide_by_trials(recipe, choice, machine, log=told.append, folder=tmp_path, steps=10) is choice
    alone, steps = replace(choice, rivals=choice.rivals[:1]), lasting(1000, choice)
    assert decide_by_trials(recipe, alone, machine, log=told.append, folder=tmp_path, steps=steps) is alone
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert decide_by_trials(recipe, choice, machine, log=told.append, folder=tmp_path, steps=steps) is choice
    assert told == []
    assert not [*tmp_path.iterdir()]


# Seconds of a step and of the first one: as it is, in one microbatch, compiled, both.
TIMES = {
    "as it is": [(0.5, 1.0), (0.5001, 1.0), (0.6, 40.0), (0.6, 40.0)],
    "whole": [(0.5, 1.0), (0.4, 1.0), (0.39999999, 40.0), (0.5, 40.0)],  # which saves less than compiling takes
    "compiled": [(0.5, 1.0), (0.5, 1.0), (0.3, 40.0), (0.4, 40.0)],
    "compiled whole": [(0.5, 1.0), (0.5, 1.0), (0.4, 40.0), (0.3, 40.0)],
}


@pytest.mark.parametrize("wanted", TIMES)
def test_compiled_or_in_larger_microbatches_where_that_saves_time(tmp_path: Path, wanted: str) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    small = replace(choice.plan, microbatch=MicrobatchPlan(size=2, per_step=2))
    choice = replace(choice, plan=small, rivals=(replace(choice.rivals[0], plan=small),))
    whole = replace(small, microbatch=MicrobatchPlan(size=4, per_step=1))
    plans = [small, whole, *(replace(each, compute=replace(each.compute, compile=True)) for each in (small, whole))]
    kept = tmp_path / f"{_key(recipe, machine, plans)}.json"
    kept.write_text(json.dumps({"seconds": TIMES[wanted]}))
    steps = lasting(8000, choice)
    told: list[str] = []
    found = decide_by_trials(recipe, choice, machine, log=told.append, folder=tmp_path, steps=steps)
    assert found.plan == plans[list(TIMES).index(wanted)]
    assert found.rivals[0].plan == found.plan
    assert "microbatch 2: 500 ms" in found.reasons["compute.compile"]
    assert ("microbatch.size" in found.reasons and "measured" in found.reasons["microbatch.size"]) == (
        "whole" in wanted
    )
    given = replace(small, origins={"compute.compile": "--set", "microbatch.size": "--set"})
    fixed = replace(choice, plan=given, rivals=(replace(choice.rivals[0], plan=given),))
    assert decide_by_trials(recipe, fixed, machine, log=told.append, folder=tmp_path, steps=steps) is fixed
    assert told == []


def test_plans_of_two_worlds_take_turns(fork_server: ForkServer) -> None:
    recipe = parse_recipe(RECIPE)
    two = Plan(mesh=MeshPlan(shard=2), microbatch=MicrobatchPlan(size=4, per_step=1))
    wrong = replace(two, mesh=MeshPlan(pipeline=2), pipeline_parallel=PipelineParallelPlan(cuts=(7,)))
    one = replace(two, mesh=MeshPlan(), microbatch=MicrobatchPlan(size=8, per_step=1))
    slow = replace(one, microbatch=MicrobatchPlan(size=1, per_step=8))
    before = fork_server.num_jobs
    timed = time_plans(recipe, [two, one, slow, wrong], rounds=3, most=1, fork_server=fork_server)
    assert fork_server.num_jobs == before + 1
    assert isinstance(timed[3], str)
    assert "cuts" in timed[3]
    ran = [each for each in timed if isinstance(each, TimedPlan)]
    assert len(ran) == 3
    assert all(each.first_seconds > 0 and each.early_seconds > 0 and each.peak_bytes > 1e7 for each in ran)
    went_on = [bool(each.turns) for each in ran]
    fastest = min(range(3), key=lambda at: ran[at].early_seconds)
    assert went_on == [at in (0, fastest) for at in range(3)]
    assert {len(each.turns) for each in ran} <= {0, 3}
    assert all(seconds > 0 for each in ran for seconds in each.turns)


def test_the_pace_of_the_machine_does_not_choose() -> None:
    """One plan is a tenth faster in every round; the machine is three times slower in most of its rounds' company."""
    pace = [1.0, 3.0, 1.0, 2.5, 1.2]
    given = {"first_seconds": 1.0, "peak_bytes": 1}
    slow = TimedPlan(early_seconds=0.5, turns=tuple(1.1 * each for each in pace), **given)
    fast = TimedPlan(early_seconds=3.0, turns=tuple(pace), **given)
    out = TimedPlan(early_seconds=9.0, turns=(), **given)
    found = step_seconds([slow, fast, out])
    assert found[0] / found[1] == pytest.approx(1.1)
    assert found[2] == 9.0


def test_plans_too_large_for_company_are_timed_alone(tmp_path: Path, fork_server: ForkServer) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    usable = 1.5 * choice.rivals[0].prediction.fullest.device
    rivals = tuple(replace(each, prediction=replace(each.prediction, usable_bytes=usable)) for each in choice.rivals)
    assert not _fit_together(rivals)
    assert _fit_together(choice.rivals)
    told: list[str] = []
    tight, steps = replace(choice, rivals=rivals), lasting(1000, choice)
    decided = decide_by_trials(
        recipe, tight, machine, log=told.append, folder=tmp_path, steps=steps, fork_server=fork_server
    )
    assert [line.split(":")[0] for line in told] == ["trial     1 of 2", "trial     2 of 2"]
    assert any(why.startswith("measured ") for why in decided.reasons.values())


def test_trials_on_the_command_line_keep_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # of kept measurements
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("steps = 100", "steps = 1_000_000_000"))
    given = ["plan.compute.compile=false", "plan.memory.recompute=full", "plan.compute.threads_per_rank=1"]
    first = read_choice(path, "auto", given, 2, trials=True)
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("trial     1 of ")
    assert any("measured " in why for why in first.reasons.values())
    for choice in (first, read_choice(path, "auto", given, 2, trials=True)):
        assert choice.plan.memory.recompute == "full"
        assert choice.plan.compute.threads_per_rank == 1
        assert not choice.plan.compute.compile
        assert choice.plan == first.plan
    assert capsys.readouterr().out == ""  # nothing was tried again

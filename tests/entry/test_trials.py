"""Steps that decide where predictions cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from weft.cli._read import read_choice
from weft.cluster import Cluster
from weft.entry import decide_by_trials, time_plan
from weft.entry._trials import _key, close_rivals
from weft.plan import MicrobatchPlan, facts_of
from weft.profile import profile_of
from weft.recipe import Recipe, parse_recipe
from weft.search import Choice, choose_plan

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


def chosen(recipe: Recipe) -> tuple[Choice, Cluster]:
    facts, machine = facts_of(recipe), Cluster.detect()
    choice = choose_plan(recipe, machine, facts, 2, profile=profile_of(recipe, facts))
    # Two that predictions do not tell apart: the chosen one, and the same with another ZeRO stage.
    first = choice.rivals[0]
    assert first.plan is not None
    plan = replace(first.plan, data_parallel=replace(first.plan.data_parallel, zero=0))
    other = replace(first, plan=plan)
    return replace(choice, rivals=(first, other)), machine


def lasting(seconds: float, choice: Choice) -> int:
    """Steps of a run that is predicted to take so long: rivals are tried from 500 s on, compilation from 2,300 s."""
    return int(seconds / choice.rivals[0].prediction.step_seconds)


def test_the_fastest_is_taken_and_remembered(tmp_path: Path) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    assert choice.plan.data_parallel.zero != 0
    assert len(close_rivals(choice)) == 2
    told: list[str] = []
    steps = lasting(1000, choice)
    decided = decide_by_trials(recipe, choice, machine, tell=told.append, folder=tmp_path, steps=steps)
    assert [line.split(":")[0] for line in told] == ["trial     1 of 2", "trial     2 of 2"]
    why = next(why for key, why in decided.reasons.items() if key.startswith("mesh."))
    assert why.startswith("measured ")
    assert why.count("ZeRO-") == 1
    (kept,) = tmp_path.glob("*.json")
    kept.write_text('{"seconds": [[2.0, 4.0], [0.5, 3.0]]}')
    again = decide_by_trials(recipe, choice, machine, tell=told.append, folder=tmp_path, steps=steps)
    assert len(told) == 2  # nothing was run again
    assert again.plan.data_parallel.zero == 0
    assert "measured 500 ms per step, data 2 ZeRO-1 fp32: 2 s" in again.reasons.values()


def test_nothing_is_tried_where_it_does_not_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = parse_recipe(RECIPE)
    choice, machine = chosen(recipe)
    told: list[str] = []
    assert decide_by_trials(recipe, choice, machine, tell=told.append, folder=tmp_path, steps=10) is choice
    alone, steps = replace(choice, rivals=choice.rivals[:1]), lasting(1000, choice)
    assert decide_by_trials(recipe, alone, machine, tell=told.append, folder=tmp_path, steps=steps) is alone
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert decide_by_trials(recipe, choice, machine, tell=told.append, folder=tmp_path, steps=steps) is choice
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
    found = decide_by_trials(recipe, choice, machine, tell=told.append, folder=tmp_path, steps=steps)
    assert found.plan == plans[list(TIMES).index(wanted)]
    assert found.rivals[0].plan == found.plan
    assert "microbatch 2: 500 ms" in found.reasons["compute.compile"]
    assert ("microbatch.size" in found.reasons and "measured" in found.reasons["microbatch.size"]) == (
        "whole" in wanted
    )
    given = replace(small, origins={"compute.compile": "--set", "microbatch.size": "--set"})
    fixed = replace(choice, plan=given, rivals=(replace(choice.rivals[0], plan=given),))
    assert decide_by_trials(recipe, fixed, machine, tell=told.append, folder=tmp_path, steps=steps) is fixed
    assert told == []


def test_a_plan_is_timed() -> None:
    recipe = parse_recipe(RECIPE)
    choice, _ = chosen(recipe)
    timed = time_plan(recipe, choice.plan, steps=2)
    assert len(timed.seconds) == 2
    assert 0 < timed.best_seconds == min(timed.seconds)
    assert timed.first_seconds > 0
    assert timed.peak_bytes > 1e7


def test_trials_on_the_command_line_keep_what_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # of kept measurements
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

"""Faults that `weft chaos` injects: which are drawn, that runs survive them, and that the judge sees what is wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import weft
from weft.api.chaos import KINDS, Campaign, chosen_kinds
from weft.api.chaos.campaign import campaign_recipe
from weft.api.chaos.cases import NUM_STEPS, ChaosCase, FaultKind, RunShape, draw_case
from weft.api.chaos.judge import CaseRecord, WholeRun, expected_end, judge, losses_of
from weft.api.chaos.plans import default_plans
from weft.config.recipe import (
    BatchRecipe,
    DataRecipe,
    DataSource,
    MlpShape,
    ModelRecipe,
    OptimizerRecipe,
    Recipe,
    RunRecipe,
)
from weft.errors import RecipeError
from weft.run.worker.faults import InjectedFault, Strike

RECIPE = Recipe(
    model=ModelRecipe(reference="mlp", shape=MlpShape(num_layers=2, input_size=16, hidden_size=16, num_classes=4)),
    data=DataRecipe(train=(DataSource(source="synthetic"),), validation_fraction=0.0),
    batch=BatchRecipe(global_batch_size=8),
    optimizer=OptimizerRecipe(learning_rate=1e-2),
    run=RunRecipe(steps=1000),
)
PLANS = default_plans(RECIPE)[:2]
SHAPE = RunShape([2, 2], replicated=[0])
SESSION = RunShape([2, 2], replicated=[0], is_script=True, num_steps=20, saves=[4, 8, 12, 16])
SURVIVED = (
    "newer",
    "replica",
    "slow",
    "recovery",
    "torn-save",
    "torn-copy",
    "short-grace",
    "disk-full",
    "double-start",
    "flipped",
    "replan-killed",
)


# ── what is drawn ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_case_is_a_function_of_seed_and_number() -> None:
    drawn = [draw_case(3, index, KINDS, SHAPE) for index in range(200)]
    assert drawn == [draw_case(3, index, KINDS, SHAPE) for index in range(200)]
    assert drawn != [draw_case(4, index, KINDS, SHAPE) for index in range(200)]


def test_every_kind_comes_at_every_phase_before_any_comes_twice() -> None:
    cells = [(kind.name, phase) for kind in KINDS for phase in kind.phases]
    shape = RunShape([2, 2, 2, 2], replicated=[0])
    drawn = [draw_case(0, index, KINDS, shape) for index in range(len(cells))]
    assert sorted((case.kind.name, case.phase) for case in drawn) == sorted(cells)
    assert all(case.rank < 2 and case.step <= NUM_STEPS + 1 for case in drawn)
    assert {case.plan for case in drawn} == {0, 1, 2, 3}
    assert all(case.other_plan != case.plan for case in drawn)
    assert {case.plan for case in drawn if case.kind.needs_replicas} == {0}


def test_a_script_meets_faults_once_it_has_saved_and_those_alone_that_it_can_answer() -> None:
    drawn = [draw_case(0, index, KINDS, SESSION) for index in range(200)]
    assert {"slow", "replica", "disk-full", "torn-copy"}.isdisjoint(case.kind.name for case in drawn)
    assert all(6 <= step <= 20 for case in drawn for step in (fault.step for fault in case.faults) if step)
    stopped = {case.kind.name for case in drawn if expected_end(case) == "stops" and case.phase == "init"}
    assert stopped >= {"killed", "hang", "error"}
    assert not any(case.phase == "init" for case in drawn if case.kind.ends == "ends")


def test_the_page_of_faults_names_every_kind_and_tests_that_are_there() -> None:
    root = Path(__file__).parents[3]
    page = (root / "docs" / "concepts" / "faults.md").read_text()
    assert {kind.name for kind in KINDS} <= set(re.findall(r"`([a-z-]+)`", page))
    for path, name in re.findall(r"`(tests/[^:`]+)::(\w+)`", page):
        assert f"def {name}(" in (root / path).read_text(), name
    rows = {int(row) for cell in re.findall(r"^\| ([\d, ]+) \|", page, re.MULTILINE) for row in cell.split(",")}
    assert {row for kind in KINDS for row in kind.rows} <= rows


def test_a_kind_that_nobody_knows_is_refused_with_a_hint() -> None:
    assert {kind.name for kind in chosen_kinds("hang,killed")} == {"hang", "killed"}
    with pytest.raises(RecipeError, match="--faults kiled is no fault. Did you mean killed"):
        chosen_kinds("hang,kiled")


# ── real runs ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign(
        RECIPE, PLANS, chosen_kinds(",".join(SURVIVED)), 11, log=print, replay_words="weft chaos recipe.toml"
    ) as entered:
        yield entered


@pytest.mark.parametrize("name", SURVIVED)
def test_a_run_survives(campaign: Campaign, name: str) -> None:
    drawn = ((index, draw_case(11, index, chosen_kinds(",".join(SURVIVED)), SHAPE)) for index in range(200))
    index = next(index for index, case in drawn if case.kind.name == name)
    verdict = campaign.run(index)
    assert verdict is None or not verdict.problems, verdict.problems


def test_a_session_of_a_script_survives() -> None:
    script = Path(__file__).parents[3] / "benchmarks" / "chaos_session.py"
    kinds = chosen_kinds("replan-killed")
    with Campaign(script, default_plans(None)[:1], kinds, 5, log=print, replay_words="weft chaos s.py") as campaign:
        verdict = campaign.run(0)
    assert verdict is not None
    assert not verdict.problems, verdict.problems


# ── the judge ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def run_of_the_record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    weft.train(campaign_recipe(RECIPE), PLANS[0][1], folder=folder, prove="never", quiet=True)
    return folder


@pytest.fixture
def record(run_of_the_record: Path, tmp_path: Path) -> CaseRecord:
    """The record of a run whose rank 1 was killed in step 7, in which everything is as it should be."""
    run = tmp_path / "run"
    shutil.copytree(run_of_the_record, run)
    report = {"kind": "generation", "number": 2, "failure": "killed", "rank": 1, "cause": "killed by SIGKILL"}
    add_line(run, {**report, "unix_time_seconds": 1000.4})
    (kind,) = chosen_kinds("segfault")
    fault = InjectedFault(deed="kill", rank=1, phase="forward", step=7)
    case = ChaosCase(seed=0, index=0, kind=kind, phase="forward", plan=0, other_plan=1, rank=1, step=7, faults=(fault,))
    strike = Strike(fault=0, pid=1, unix_time_seconds=1000.0, step=7, saved_on_disk=4, saved_in_memory=4)
    return CaseRecord(
        case=case,
        run=run,
        output="",
        statuses=(0,),
        strikes=(strike,),
        ended_unix_time_seconds=1002.0,
        left_behind=(),
    )


def add_line(run: Path, line: dict[str, object]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def with_kind(record: CaseRecord, **changes: object) -> CaseRecord:
    kind: FaultKind = replace(record.case.kind, **changes)  # pyright: ignore[reportArgumentType]
    return replace(record, case=replace(record.case, kind=kind))


def reported(record: CaseRecord, **changes: object) -> CaseRecord:
    """The record, with another report of the failure."""
    path = record.run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("".join(f"{line}\n" for line in [*lines[:-1], json.dumps({**json.loads(lines[-1]), **changes})]))
    return record


def other_loss(record: CaseRecord) -> CaseRecord:
    losses = losses_of(record.run)
    add_line(record.run, {"kind": "step", "step": 9, "loss": losses[9] * (1 + 1e-15), "skipped": False})
    return record


def lost_line(record: CaseRecord) -> CaseRecord:
    path = record.run / "ledger" / "data-00001.txt"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5] + lines[6:]))
    return record


WRONG: dict[str, tuple[Callable[[CaseRecord], CaseRecord], str]] = {
    "no fault": (lambda record: replace(record, strikes=()), "the fault did not come"),
    "a hang": (lambda record: replace(record, statuses=(None, 0)), "did not end in time"),
    "a dead run": (lambda record: replace(record, statuses=(1, 1, 1, 1)), "could not be gone on with"),
    "no restart": (lambda record: replace(record, statuses=(1, 0)), "should have gone on by itself"),
    "no report": (lambda record: reported(record, unix_time_seconds=900.0), "no report says"),
    "another rank": (lambda record: reported(record, rank=0), "rank 0 is named .* and it was rank 1"),
    "another cause": (lambda record: reported(record, failure="hang"), "reported as hang"),
    "too late": (lambda record: reported(record, unix_time_seconds=1009.0), "reported after 9.0 s"),
    "another loss": (other_loss, "the loss of step 9 is"),
    "a lost sample": (lost_line, "the ledger is not whole: step 5 lacks positions 36 to 39"),
    "an orphan": (lambda record: replace(record, left_behind=("process 7",)), "left behind: process 7"),
    "no stop": (lambda record: with_kind(record, ends="stops", words="memory"), "should have stopped with an error"),
    "no words": (
        lambda record: replace(with_kind(record, ends="stops", words="out of memory"), statuses=(1, 0)),
        "the report does not say: out of memory",
    ),
    "a wrong kill": (lambda record: replace(with_kind(record, ends="killed"), statuses=(2, 0)), "not by the kill"),
    "a wrong status": (lambda record: replace(with_kind(record, ends="ends"), statuses=(1, 0)), "a signal does not"),
}


def judged(record: CaseRecord) -> tuple[str, ...]:
    whole = WholeRun(losses_of(record.run), 2.0, "fp32")
    return judge(record, campaign_recipe(RECIPE), whole).problems


def test_a_good_record_is_good(record: CaseRecord) -> None:
    assert judged(record) == ()


@pytest.mark.parametrize("what", WRONG)
def test_the_judge_sees(record: CaseRecord, what: str) -> None:
    whole = WholeRun(losses_of(record.run), 2.0, "fp32")
    change, problem = WRONG[what]
    problems = judge(change(record), campaign_recipe(RECIPE), whole).problems
    assert any(re.search(problem, one) for one in problems), problems


def test_another_plan_may_round_differently_but_no_more(record: CaseRecord) -> None:
    whole = WholeRun({step: loss * (1 + 1e-6) for step, loss in losses_of(record.run).items()}, 2.0, "fp32")
    assert any("the loss of step 1 is" in one for one in judge(record, campaign_recipe(RECIPE), whole).problems)
    add_line(record.run, {"kind": "generation", "failure": "replan", "rank": 0, "unix_time_seconds": 1000.2})
    assert judge(record, campaign_recipe(RECIPE), whole).problems == ()
    whole = WholeRun({step: loss * (1 + 1e-4) for step, loss in losses_of(record.run).items()}, 2.0, "fp32")
    assert any("the loss of step 1 is" in one for one in judge(record, campaign_recipe(RECIPE), whole).problems)

"""What a session says: in its own words, with the change to make, and nothing that tells nobody anything."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import RankPool
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import weft
from weft.config.plan import (
    ComputePlan,
    MeshPlan,
    MicrobatchPlan,
    ModelFacts,
    Plan,
    complete_plan,
    filled_in,
    parse_plan,
)
from weft.config.recipe import parse_recipe
from weft.errors import PlanError
from weft.events import RunFolder
from weft.run.launch import threads_of_user
from weft.techniques.describe import describe_plan

ROWS = torch.arange(64.0, dtype=torch.float64).view(16, 4) / 64
ORDER = '["pipeline", "replicate", "shard", "expert", "context", "tensor"]'


def recipe_of(batch: int) -> Any:
    return parse_recipe(f'[model]\nfactory = "a:b"\n[batch]\nglobal_batch_size = {batch}\n[run]\nsteps = 1\n')


def loss_fn(outputs: Tensor, batch: list[Tensor]) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(outputs)


def train(folder: str, plan: Plan) -> tuple[list[float], int]:
    torch.manual_seed(0)
    with weft.session(plan=plan, permit=("fp64",), folder=folder, record=False, quiet=True) as session:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        split = {"0": "column", "2": "row"} if plan.mesh.tensor > 1 else ()
        loader = DataLoader(TensorDataset(ROWS), batch_size=8)
        state = session.prepare(model, optimizer, loader, loss=loss_fn, split=split)
        return [state.step(batch).loss for batch in state.batches()], state.plan.microbatch.size


def plain() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    for batch in ROWS.split(8):
        optimizer.zero_grad()
        loss = model(batch).square().sum() / len(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("mesh", "size"), [(MeshPlan(), 8), (MeshPlan(tensor=2), 8), (MeshPlan(replicate=2), 4)])
def test_a_plan_that_says_nothing_of_microbatches_takes_the_loaders_batch(
    ranks: RankPool, tmp_path: Path, mesh: MeshPlan, size: int
) -> None:
    plan = Plan(mesh=mesh, compute=ComputePlan(precision="fp64"))
    for losses, found in ranks.run(mesh.world_size, train, str(tmp_path), plan):
        assert found == size
        assert losses == pytest.approx(plain(), rel=1e-10)


def test_microbatches_that_a_plan_names_are_its_own() -> None:
    for text in ("[microbatch]\nsize = 1\n", "[microbatch]\nsize = 3\n", "[microbatch]\nper_step = 3\n"):
        plan = parse_plan(text)
        assert filled_in(plan, recipe_of(8)).microbatch == plan.microbatch
    for number in (1, 2):  # how many are named, and their size follows
        named = filled_in(parse_plan(f"[microbatch]\nper_step = {number}\n"), recipe_of(8)).microbatch
        assert named == MicrobatchPlan(size=8 // number, per_step=number)
    assert filled_in(Plan(mesh=MeshPlan(replicate=3)), recipe_of(8)).microbatch == MicrobatchPlan()  # no whole share
    stages = filled_in(Plan(mesh=MeshPlan(pipeline=3)), recipe_of(8)).microbatch
    assert (stages.size, stages.per_step) == (2, 4)
    told = describe_plan(filled_in(parse_plan("[mesh]\ntensor = 2\n"), recipe_of(8)), {}, ModelFacts())
    assert any(re.search(r"microbatch\.size = 8 +from the whole batch of 8", line) for line in told)


def refused(folder: str, plan: Plan) -> str:
    with pytest.raises(PlanError) as found:
        train(folder, plan)
    return str(found.value)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            Plan(microbatch=MicrobatchPlan(size=3), compute=ComputePlan(precision="fp64")),
            "batch size is 8",
        ),
        (Plan(compute=ComputePlan(precision="bf16")), r'weft\.session\(permit=\["fp64", "bf16"\]\)'),
    ],
)
def test_errors_of_a_session_speak_of_no_recipe(tmp_path: Path, plan: Plan, says: str) -> None:
    text = refused(str(tmp_path), plan)
    assert re.search(says, text), text
    assert "recipe" not in text
    assert "permit." not in text


@pytest.mark.parametrize("given", [f"tensor = 2\norder = {ORDER}", "tensor = 2"])
def test_the_usual_order_of_axes_is_not_printed(given: str) -> None:
    lines = describe_plan(parse_plan(f"[mesh]\n{given}\n"), {"mesh.order": "why"}, ModelFacts())
    assert not any("mesh.order" in line for line in lines)
    assert max(map(len, lines[1:])) < 60


def test_another_order_is() -> None:
    text = (
        '[mesh]\ntensor = 2\nreplicate = 2\norder = ["tensor", "pipeline", "replicate", "shard", "expert", "context"]\n'
    )
    assert any("mesh.order" in line for line in describe_plan(parse_plan(text), {}, ModelFacts()))


@pytest.mark.parametrize(
    ("environment", "threads"),
    [
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "3,2"}, 3),
        ({"OMP_NUM_THREADS": "many"}, None),
        ({}, None),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "a"}, None),  # torchrun's own
        ({"OMP_NUM_THREADS": "2", "TORCHELASTIC_RUN_ID": "a"}, 2),
        ({"OMP_NUM_THREADS": "2", "WEFT_OWN_THREADS": "2"}, None),  # a launcher's own
    ],
)
def test_whose_number_of_threads_it_is(environment: dict[str, str], threads: int | None) -> None:
    assert threads_of_user(environment) == threads


def test_threads_of_the_environment_are_obeyed_where_the_plan_names_none() -> None:
    recipe, chosen = recipe_of(1), Plan(compute=ComputePlan(threads_per_rank=2))
    reasons = {"compute.threads_per_rank": "2 cores over 1 process"}
    plan, left = complete_plan(chosen, recipe, reasons, 3, is_chosen=True)
    assert plan.compute.num_threads == 3
    assert any(
        re.search(r"threads_per_rank = 3 +from OMP_NUM_THREADS", line)
        for line in describe_plan(plan, left, ModelFacts())
    )
    assert complete_plan(chosen, recipe, reasons, 3, is_chosen=False) == (chosen, reasons)
    named = parse_plan("[compute]\nthreads_per_rank = 1\n")
    assert complete_plan(named, recipe, {}, 3, is_chosen=False)[0] == named
    assert complete_plan(Plan(), recipe, {}, 3, is_chosen=False)[0].compute.num_threads == 3


def test_a_session_computes_with_the_threads_that_the_user_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    before = torch.get_num_threads()
    with weft.session(folder=tmp_path, quiet=True) as session:
        model = nn.Linear(4, 4)
        loader = DataLoader(TensorDataset(ROWS.float()), batch_size=4)
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        assert torch.get_num_threads() == 3
        assert state.plan.compute.num_threads == 3
    assert torch.get_num_threads() == before


def test_a_run_says_how_to_go_on(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert run.how_to_go_on() == ""
    train_and_save(str(tmp_path))
    path = os.path.relpath(tmp_path)
    words = f"step-000001 is saved. Go on with weft.session(folder={path!r}) and state.load() before the first step."
    assert run.how_to_go_on() == words
    run.recipe.touch()
    command = f"weft train {path}/recipe.toml --plan {path}/plan.toml --resume {path}"
    assert run.how_to_go_on() == f"step-000001 is saved. Go on with: {command}"


def train_and_save(folder: str) -> None:
    with weft.session(plan=Plan(), folder=folder, quiet=True) as session:
        model = nn.Linear(4, 4)
        loader = DataLoader(TensorDataset(ROWS.float()), batch_size=4)
        state = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), loader, loss=loss_fn)
        state.step(next(state.batches()))
        state.save()

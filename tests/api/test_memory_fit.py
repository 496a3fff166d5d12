"""The microbatch is made smaller until a step finds memory: on real allocations, under a real limit."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
from weft.api.training.memory_fit import fit_microbatch, measure_peak_in_job, measure_peak_in_processes
from weft.config.cluster import parse_cluster_spec
from weft.config.plan import MeshPlan, MicrobatchPlan, Plan, dump_plan, parse_plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, Recipe, RunRecipe, dump_recipe, parse_recipe
from weft.errors import PlanError, RecipeError
from weft.model.description import facts_of, profile_of
from weft.planning.search import choose_plan
from weft.run.launch import RankInfo
from weft.run.launch.launcher import ForkServer
from weft.verify.dry_run import PeakMemory

DECODER = DecoderShape(
    num_layers=2, hidden_size=32, num_heads=2, vocabulary_size=512, sequence_length=64, tie_embeddings=False
)


def recipe_of(shape: DecoderShape = DECODER, batch: int = 8) -> Recipe:
    return Recipe(
        model=ModelRecipe(reference="decoder", shape=shape),
        batch=BatchRecipe(global_batch_size=batch),
        run=RunRecipe(steps=1),
    )


PLANS = {
    "replicate": {"replicate": 2},
    "zero-3": {"shard": 2, "zero": 3},
    "tensor × pipeline": {"tensor": 2, "pipeline": 2},
}


@pytest.mark.parametrize("name", PLANS)
def test_every_rank_is_measured_without_its_peers(name: str, fork_server: ForkServer) -> None:
    axes = dict(PLANS[name])
    zero = axes.pop("zero", 1)
    mesh = MeshPlan(**axes)
    plan = Plan(mesh=mesh, microbatch=MicrobatchPlan(size=2, per_step=4 // mesh.data))
    plan = replace(plan, data_parallel=replace(plan.data_parallel, zero=zero))
    trial = measure_peak_in_processes(recipe_of(), plan, fork_server=fork_server)
    assert trial.fits
    assert 50e6 < trial.peak_bytes < 5e9  # the interpreter and torch are most of it


def in_a_job(recipe: str, plan: str) -> list[tuple[bool, int]]:
    """Every rank of a running job weighs its own share; then all know the worst."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank_info = RankInfo(rank=rank, world_size=world, local_rank=rank, local_world_size=world)
    trial = measure_peak_in_job(rank_info)(parse_recipe(recipe), parse_plan(plan))
    return [(trial.fits, trial.peak_bytes)]


def test_all_ranks_of_a_job_agree(ranks) -> None:
    # The first stage holds the embedding of a large vocabulary, the second the head: other peaks on each rank.
    shape = replace(DECODER, vocabulary_size=4096)
    plan = Plan(mesh=MeshPlan(pipeline=2), microbatch=MicrobatchPlan(size=2, per_step=4))
    recipe = dump_recipe(recipe_of(shape), everything=True)
    first, second = ranks.run(2, in_a_job, recipe, dump_plan(plan, everything=True))
    assert first == second
    assert first[0][0]


class Limit:
    """Stands where a machine is: grants a microbatch of so many samples, and keeps what was asked."""

    def __init__(self, largest: int) -> None:
        self.largest, self.asked = largest, list[tuple[int, object]]()

    def __call__(self, recipe: Recipe, plan: Plan) -> PeakMemory:
        self.asked.append((plan.microbatch.size, plan.microbatch.per_step))
        return PeakMemory(fits=plan.microbatch.size <= self.largest, peak_bytes=2**30)


def test_the_global_batch_is_kept() -> None:
    recipe, told = recipe_of(batch=36), list[str]()
    plan = Plan(mesh=MeshPlan(replicate=2), microbatch=MicrobatchPlan(size=12, per_step=(2, 1)))
    limit = Limit(largest=3)
    found, reason = fit_microbatch(recipe, plan, told.append, limit, facts=facts_of(recipe))
    assert limit.asked == [(12, (2, 1)), (6, (4, 2)), (3, (8, 4))]
    assert found.microbatch == MicrobatchPlan(size=3, per_step=(8, 4))
    assert reason == "tried: a step peaks at 1 GiB per process; 6 finds no memory"
    assert told == [f"memory    trying a microbatch of {size}" for size in (12, 6, 3)]


def test_what_cannot_be_made_smaller_is_refused() -> None:
    recipe, plan = recipe_of(), Plan(microbatch=MicrobatchPlan(size=8, per_step=1))
    with pytest.raises(PlanError, match="a microbatch of 1 finds no memory .*1 GiB were held"):
        fit_microbatch(recipe, plan, lambda line: None, Limit(largest=0), facts=facts_of(recipe))
    statistics = replace(facts_of(recipe), has_batch_norm=True)
    with pytest.raises(PlanError, match="a microbatch of 8 finds no memory"):
        fit_microbatch(recipe, plan, lambda line: None, Limit(largest=0), facts=statistics)


def test_only_a_plan_near_its_limit_is_tried() -> None:
    recipe = recipe_of()
    facts = facts_of(recipe)
    choice = choose_plan(recipe, parse_cluster_spec("1x1xh100"), facts, 1, profile=profile_of(recipe))
    assert not choice.is_tight
    first = choice.rivals[0]
    needed = first.prediction.fullest.device
    tight = replace(first, prediction=replace(first.prediction, usable_bytes=1.1 * needed, margin_bytes=0.0))
    full = replace(choice, rivals=(tight,))
    assert full.is_tight
    assert not replace(full, rivals=()).is_tight
    given = replace(choice.plan, origins={"microbatch.size": "from --set"})
    assert not replace(full, plan=given).is_tight


def test_what_killed_a_process_is_said() -> None:
    recipe, plan = recipe_of(), Plan(microbatch=MicrobatchPlan(size=1, per_step=8))

    def killed(recipe: Recipe, plan: Plan) -> PeakMemory:
        return PeakMemory(fits=False, peak_bytes=0)

    with pytest.raises(PlanError, match="the system ended a process"):
        fit_microbatch(recipe, plan, lambda line: None, killed, facts=facts_of(recipe))


def test_memory_is_not_tried_without_samples(tmp_path: Path) -> None:
    given = recipe_of()
    factory = replace(given, model=ModelRecipe(factory="torch.nn:Identity"))
    with pytest.raises(RecipeError, match="try_memory = True needs samples"):
        weft.train(
            factory,
            Plan(microbatch=MicrobatchPlan(size=8, per_step=1)),
            folder=tmp_path / "run",
            try_memory=True,
            quiet=True,
        )


LIMITED = """
import json, resource, sys
from pathlib import Path
import torch, weft
from weft.config.plan import parse_plan
from weft.config.recipe import parse_recipe
recipe, plan = (Path(path).read_text() for path in sys.argv[1:3])
# One thread per process, and what the processes have mapped when they start, with room for small steps only.
mapped = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (mapped + int(1.1e9),) * 2)
result = weft.train(parse_recipe(recipe), parse_plan(plan), folder=sys.argv[3], try_memory=True)
print(json.dumps({"losses": result.losses, "plan": (result.folder / "plan.toml").read_text()}))
"""
RECIPE = """
[model]
reference = "decoder"
num_layers = 1
hidden_size = 32
num_heads = 2
vocabulary_size = 16384
sequence_length = 512
[data]
train = [{ source = "synthetic" }]
[batch]
global_batch_size = 16
[run]
steps = 1
"""
PLAN = """
[mesh]
replicate = 2
[microbatch]
size = 8
per_step = 1
[memory]
fused_loss = false
[compute]
device = "cpu"
threads_per_rank = 1
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's limits of address space")
def test_a_step_that_finds_no_memory_is_made_smaller(tmp_path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    (tmp_path / "plan.toml").write_text(PLAN)
    command = [sys.executable, "-c", LIMITED, "recipe.toml", "plan.toml", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    size, per_step = (parse_plan(told["plan"]).microbatch.size, parse_plan(told["plan"]).microbatch.per_step)
    assert size < 8
    assert isinstance(per_step, int)
    assert size * per_step == 8
    assert "memory    trying a microbatch of 8" in done.stdout
    assert f"{2 * size} finds no memory" in done.stdout

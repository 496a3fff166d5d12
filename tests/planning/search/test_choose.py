"""`plan = "auto"`: what is chosen here, for which reasons, and within what was given."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import Plan, apply_overrides
from weft.config.recipe import PermitRecipe, Recipe, parse_recipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.search import PlanChoice, choose_plan
from weft.techniques.check import check_plan

RECIPE = """[model]
reference = "decoder"
num_layers = 4
hidden_size = 128
num_heads = 4
sequence_length = 128
[batch]
global_batch_size = 8
[run]
steps = 1
"""


def slow_bf16() -> Cluster:
    """Two cores that compute bf16 at a quarter of fp32."""
    whole = parse_cluster_spec("2xcpu")
    node = whole.nodes[0]
    devices = replace(node.devices, peak_flops={"fp32": 9e10, "bf16": 2.2e10}, memory_bytes=12_000_000_000)
    return replace(whole, nodes=(replace(node, cores=2, memory_bytes=24_000_000_000, devices=devices),))


def chosen(*settings: str, processes: int | None = None, recipe: Recipe | None = None) -> PlanChoice:
    recipe = recipe or parse_recipe(RECIPE)
    _, given = apply_overrides(recipe, Plan(), settings)
    facts = facts_of(recipe)
    profile = profile_of(recipe)
    assert profile is not None
    choice = choose_plan(recipe, slow_bf16(), facts, processes, profile=profile, pins=given)
    _, plan = apply_overrides(recipe, choice.plan, settings)
    check_plan(plan, recipe, facts, processes)
    return replace(choice, plan=plan)


def test_the_precision_is_the_fastest_here() -> None:
    recipe = replace(parse_recipe(RECIPE), permit=PermitRecipe(precision=("bf16", "fp32")))
    assert chosen(recipe=recipe).plan.compute.precision == "fp32"
    only = replace(recipe, permit=PermitRecipe(precision=("bf16",)))
    assert chosen(recipe=only).plan.compute.precision == "bf16"


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_setting_has_one_reason_and_all_processes_are_used(processes: int) -> None:
    first, second = chosen(processes=processes), chosen(processes=processes)
    assert first.plan == second.plan  # ranks that choose by themselves agree
    assert first.plan.mesh.world_size == processes
    assert first.rivals[0].plan == first.plan
    mesh = next(why for key, why in first.reasons.items() if key.startswith("mesh."))
    assert mesh.startswith("predicted ")
    assert {"microbatch.size", "compute.threads_per_rank", "compute.precision"} <= set(first.reasons)


def test_search_fills_in_what_was_not_given() -> None:
    choice = chosen("plan.mesh.tensor=2", "plan.data_parallel.zero=3", "plan.compute.compile=true", processes=4)
    assert choice.rivals
    assert (choice.plan.mesh.tensor, choice.plan.mesh.shard, choice.plan.data_parallel.zero) == (2, 2, 3)
    assert choice.plan.compute.compile
    assert "data_parallel.zero" not in choice.reasons
    assert chosen("plan.microbatch.size=1").plan.microbatch.size == 1
    assert chosen("plan.mesh.replicate=2").plan.mesh.world_size == 2


def test_given_axes_may_need_more_ranks_than_cores() -> None:
    choice = chosen("plan.mesh.tensor=2", "plan.mesh.pipeline=2")
    assert choice.plan.mesh.world_size == 4
    assert choice.plan.compute.threads_per_rank == 1
    with pytest.raises(PlanError, match=r"--processes 3 is no multiple of the 2 ranks(.|\n)*Use --processes 2\."):
        chosen("plan.mesh.tensor=2", processes=3)

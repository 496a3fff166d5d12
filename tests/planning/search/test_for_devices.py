"""Plans for another number of devices: what the user fixed stays where it can, and the batch always."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from weft.config.cluster import parse_cluster_spec
from weft.config.plan import Plan, complete_plan
from weft.config.recipe import BatchRecipe, Recipe, parse_recipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.planning.search import choose_plan, plan_for_devices
from weft.techniques.check import check_plan, check_runnable, mesh_sizes

RECIPE = parse_recipe("""[model]
reference = "decoder"
num_layers = 4
hidden_size = 128
num_heads = 4
sequence_length = 128
[batch]
global_batch_size = 8
[run]
steps = 1
""")


def with_batch(batch: int) -> Recipe:
    return replace(RECIPE, batch=BatchRecipe(global_batch_size=batch))


def plan_for(
    before: Plan, num_devices: int, *, batch: int = 8, cluster: str = "8xcpu", chosen: bool = False, fewest: int = 0
) -> Plan:
    recipe = with_batch(batch)
    facts, profile = facts_of(recipe), profile_of(recipe)
    assert profile is not None
    before, _ = complete_plan(before, recipe, {}, None, is_chosen=False)
    plan = plan_for_devices(
        before,
        num_devices,
        recipe=recipe,
        facts=facts,
        profile=profile,
        cluster=parse_cluster_spec(cluster),
        is_chosen=chosen,
        fewest=fewest or None,
    )
    check_plan(plan, recipe, facts)
    check_runnable(plan)
    assert plan.global_batch_size == batch
    assert (fewest or num_devices) <= plan.mesh.world_size <= num_devices
    return plan


@pytest.mark.parametrize(
    ("before", "num_devices", "sizes", "per_step"),
    [
        (Plan.ddp(replicate=4), 3, "data 3", (3, 3, 2)),
        (Plan.fsdp(shard=4), 3, "data 3", (3, 3, 2)),
        (Plan.tensor(2, replicate=2), 2, "tensor 2", 2),
        (Plan.tensor(2, replicate=2), 6, "data 3 × tensor 2", (3, 3, 2)),
        (Plan.pipeline(2, replicate=2), 2, "pipeline 2", 4),
        (Plan.fsdp(replicate=2, shard=2), 6, "replicate 3 × shard 2", (2, 2, 1, 1, 1, 1)),
        (Plan.fsdp(replicate=2, shard=2), 3, "data 3", (3, 3, 2)),
    ],
)
def test_a_written_plan_keeps_its_style(before: Plan, num_devices: int, sizes: str, per_step: object) -> None:
    plan = plan_for(before, num_devices)
    assert mesh_sizes(plan) == sizes
    assert plan.microbatch.per_step == per_step
    kept = ("data_parallel", "tensor_parallel", "pipeline_parallel", "memory", "compute")
    assert all(getattr(plan, section) == getattr(before, section) for section in kept)


def test_an_axis_that_does_not_divide_the_devices_is_given_up_and_nothing_else() -> None:
    plan = plan_for(Plan.tensor(2, replicate=2, zero=2), 3)
    assert (mesh_sizes(plan), plan.data_parallel.zero) == ("data 3", 2)
    assert mesh_sizes(plan_for(Plan.pipeline(4), 2)) == "data 2"


def test_the_microbatch_is_the_one_that_is_predicted_fastest_and_no_larger() -> None:
    plan = plan_for(Plan.ddp(replicate=4), 3, batch=32)
    assert plan.microbatch.size == 4  # 12 samples in three parts, not 11 one by one, nor 16 in two
    assert plan.microbatch.per_step == (3, 3, 2)


def test_fewer_ranks_are_enough_where_the_caller_says_so() -> None:
    with pytest.raises(PlanError, match=r"(?s)cannot share.*There is a plan for 6 and for 8\."):
        plan_for(Plan.ddp(replicate=4), 7, batch=4)
    assert plan_for(Plan.ddp(replicate=4), 7, batch=4, fewest=2).mesh.world_size == 6


def test_what_no_cluster_has_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Use at most 4\."):
        plan_for(Plan.ddp(replicate=4), 5, cluster="1x4xh100")
    with pytest.raises(PlanError, match="at least 1 device"):
        plan_for(Plan.ddp(replicate=4), 0)


@pytest.mark.parametrize("seed", range(3))
def test_drawn_numbers_have_a_plan_that_fits(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(6):
        before = draw.choice(
            [Plan.ddp(replicate=4), Plan.fsdp(shard=4), Plan.tensor(2, replicate=2), Plan.pipeline(2), Plan.tensor(4)]
        )
        devices, batch, chosen = draw.randint(1, 6), draw.choice([4, 8, 12, 32]), draw.random() < 0.5
        plan = plan_for(before, devices, batch=batch, chosen=chosen, fewest=max(1, devices - 1))
        model_ranks = before.mesh.tensor * before.mesh.pipeline
        if not chosen and devices % model_ranks == 0 and batch >= devices // model_ranks:
            assert (plan.mesh.tensor, plan.mesh.pipeline) == (before.mesh.tensor, before.mesh.pipeline)


def test_a_large_cluster_keeps_nearly_all_of_its_devices() -> None:
    recipe = with_batch(512)
    profile, facts = profile_of(recipe), facts_of(recipe)
    assert profile is not None
    cluster = parse_cluster_spec("8x8xh100")
    chosen = choose_plan(recipe, cluster, facts, profile=profile).plan
    plan = plan_for_devices(
        chosen, 63, recipe=recipe, facts=facts, profile=profile, cluster=cluster, is_chosen=True, fewest=56
    )
    assert 56 <= plan.mesh.world_size <= 63

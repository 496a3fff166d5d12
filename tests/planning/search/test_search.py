"""Search finds what pricing everything would find, and more links or memory never make its choice slower."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_kit import all_layouts, best_by_brute_force, cluster_of, narrow, tiny

from weft.config.cluster import parse_cluster_spec
from weft.config.plan import parse_plan
from weft.config.recipe import BatchRecipe, DecoderShape, ModelRecipe, PermitRecipe, Recipe, RunRecipe
from weft.errors import PlanError
from weft.model.description import facts_of, profile_of
from weft.model.profile import profile_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel
from weft.planning.search import (
    Candidate,
    Objective,
    SearchResult,
    Space,
    pinned,
    recipe_space,
    search,
    smallest_cluster,
    space_of,
)
from weft.techniques.check import check_plan, check_runnable
from weft.techniques.cost_terms import Layout
from weft.techniques.zero.settings import ReduceEvery

BASE = Layout(precision="bf16", fused_loss=True, gradient_bytes=4, master_bytes=12)


def small_space(spec: str, batch: int, experts: int = 0, **changes: object) -> Space:
    return narrow(space_of(tiny(experts=experts), cluster_of(spec), global_batch_size=batch), **changes)


@pytest.mark.parametrize(
    ("spec", "batch", "experts", "memory", "changes"),
    [
        ("4xh100", 8, 0, 1.0, {"contexts": (1, 2), "recomputes": ("none",), "zeros": (0, 1, 3)}),
        ("2x2xh100", 6, 0, 0.2, {"contexts": (1,), "schedules": ("1f1b", "interleaved_1f1b")}),
        ("2x2xa100", 4, 4, 1.0, {"contexts": (1,), "pipelines": (1, 2)}),
        ("3xh100", 5, 0, 0.08, {"contexts": (1,), "schedules": ("1f1b", "zbv")}),
    ],
)
def test_equals_brute_force(spec: str, batch: int, experts: int, memory: float, changes: dict[str, object]) -> None:
    profile, cluster = tiny(experts=experts), cluster_of(spec, memory=memory)
    space = small_space(spec, batch, experts, **changes)
    cost_model = CostModel(profile, cluster)
    best, count = best_by_brute_force(cost_model, space, batch, BASE)
    result = search(profile, cluster, global_batch_size=batch, space=space, cost_model=cost_model, top=8)
    assert count > 100
    assert result.best[0].prediction.step_seconds == pytest.approx(best, rel=1e-9)


@settings(max_examples=3, deadline=None)
@given(st.sampled_from([1.0, 1.3, 2.0, 8.0]), st.sampled_from([1.0, 1.5, 4.0]), st.sampled_from([4, 6, 16]))
def test_more_links_or_memory_are_no_slower(bandwidth: float, memory: float, batch: int) -> None:
    space = small_space("2x4xh100", batch, contexts=(1, 2))

    def best(bandwidth: float, memory: float) -> float:
        cluster = cluster_of("2x4xh100", bandwidth=bandwidth, memory=memory)
        return search(tiny(), cluster, global_batch_size=batch, space=space).best[0].score

    before = best(1.0, 0.05)
    assert best(bandwidth, 0.05) <= before * (1 + 1e-9)
    assert best(1.0, 0.05 * memory) <= before * (1 + 1e-9)


def test_no_layout_of_the_space_is_faster() -> None:
    profile, cluster = tiny(layers=6), cluster_of("2x4xh100", memory=0.1)
    space = narrow(space_of(profile, cluster, global_batch_size=12), contexts=(1, 2))
    cost_model = CostModel(profile, cluster)
    result = search(profile, cluster, global_batch_size=12, space=space, cost_model=cost_model)
    layouts = list(all_layouts(profile, cluster, space, 12, BASE))[::97]
    assert len(layouts) > 50
    for layout in layouts:
        prediction = cost_model.predict(layout, exact=True)
        if prediction.fits:
            assert prediction.step_seconds >= result.best[0].prediction.step_seconds * (1 - 1e-9), layout


def test_the_same_search_finds_the_same() -> None:
    first, second = (search(tiny(), cluster_of("8xh100"), global_batch_size=16) for _ in range(2))
    assert [each.layout for each in first.best] == [each.layout for each in second.best]
    assert first.counts == second.counts


def test_the_batch_is_kept_and_devices_suffice() -> None:
    result = search(tiny(), cluster_of("7xh100"), global_batch_size=13)
    for each in result.best:
        assert each.plan is not None
        assert each.plan.global_batch_size == 13
        assert each.layout.world_size == each.plan.mesh.world_size <= 7
        assert each.prediction.fits


SHAPE = DecoderShape(num_layers=6, hidden_size=512, num_heads=8, num_kv_heads=4)
RECIPE = Recipe(
    model=ModelRecipe(shape=SHAPE),
    batch=BatchRecipe(global_batch_size=24),
    run=RunRecipe(steps=1),
    permit=PermitRecipe(precision=("fp32", "bf16")),
)


def searched_for(recipe: Recipe, spec: str, given: str = "") -> SearchResult:
    """The best plans for a recipe's own model."""
    facts, profile, cluster = facts_of(recipe), profile_of(recipe), cluster_of(spec)
    assert profile is not None
    pins = parse_plan(given)
    space = recipe_space(recipe, profile, facts, cluster, pins)
    batch = recipe.batch.global_batch_size
    return search(profile, cluster, global_batch_size=batch, space=space, top=12)


def test_plans_pass_every_check_of_their_recipe() -> None:
    result = searched_for(RECIPE, "8xh100")
    assert len(result.best) > 3
    for each in result.best:
        assert each.plan is not None
        check_runnable(each.plan)
        check_plan(each.plan, RECIPE, facts_of(RECIPE))


def test_what_no_training_takes_is_not_found_and_says_why() -> None:
    recipe = replace(RECIPE, permit=replace(RECIPE.permit, compression=("fp8",)))
    result = searched_for(recipe, "2xh100", '[data_parallel]\ncompression = "fp8"')
    assert not any(each.layout.data > 1 for each in result.best)
    assert any('"fp8"' in reason for reason in result.counts.refused)


def test_7_billion_parameters_train_on_8_devices_of_40_gb() -> None:
    """Sharded over the data ranks alone, as everybody does: whole gradients would leave no room for activations."""
    profile, cluster = profile_of_sizes(known_model("llama-2-7b").sizes), parse_cluster_spec("8xa100-40gb")
    space = replace(
        space_of(profile, cluster, global_batch_size=256),
        pipelines=(1,),
        tensors=(1,),
        contexts=(1,),
        offloads=("none",),
    )
    best = search(profile, cluster, global_batch_size=256, space=space).best[0]
    assert (best.layout.zero, best.layout.shard, best.layout.reduce_every) == (3, 8, "microbatch")
    assert best.plan is not None
    assert best.plan.data_parallel.reduce_every == "microbatch"
    once = search(profile, cluster, global_batch_size=256, space=replace(space, reductions=("step",)))
    assert all(each.prediction.step_seconds > best.prediction.step_seconds for each in once.best)


@pytest.mark.parametrize(("spec", "memory", "every"), [("8x1xh100", 1.0, "step"), ("8x1xh100", 0.2, "microbatch")])
def test_gradients_are_reduced_as_often_as_is_best(spec: str, memory: float, every: str) -> None:
    """Once per step where whole gradients fit, after every microbatch where they do not; a pin finds nothing better."""
    profile, cluster = profile_of_sizes(known_model("gpt3-1.3b").sizes), cluster_of(spec, memory=memory)
    space = space_of(profile, cluster, global_batch_size=512)
    space = replace(space, zeros=(3,), tensors=(1,), pipelines=(1,))
    cost_model = CostModel(profile, cluster)

    def best(**changes: object) -> Candidate | None:
        fixed = replace(space, **changes)  # pyright: ignore[reportArgumentType]
        return next(
            iter(search(profile, cluster, global_batch_size=512, space=fixed, cost_model=cost_model).best), None
        )

    free = best()
    assert free is not None
    assert free.layout.reduce_every == every
    for word in get_args(ReduceEvery):
        pinned_best = best(reductions=(word,))
        assert pinned_best is None or pinned_best.score >= free.score * (1 - 1e-9)


def test_nothing_fits() -> None:
    result = search(tiny(), cluster_of("2xh100", memory=0.001), global_batch_size=4)
    assert result.best == ()
    assert result.counts.memory_bound > 0


def test_it_ends_where_nothing_of_a_schedule_fits() -> None:
    """Everything fits the bounds of memory, and nothing its price."""
    profile, cluster = profile_of_sizes(known_model("llama-2-7b").sizes), parse_cluster_spec("8xa100-40gb")
    space = space_of(profile, cluster, global_batch_size=256)
    space = replace(space, pipelines=(1,), tensors=(1,), contexts=(1,), offloads=("none",), reductions=("step",))
    assert search(profile, cluster, global_batch_size=256, space=space).best == ()


def test_some_blocks_are_computed_again_when_all_need_not() -> None:
    profile = tiny(layers=8, length=8192)
    loose = search(profile, cluster_of("2xh100"), global_batch_size=8).best[0]
    for share in (each / 50 for each in range(48, 20, -1)):
        memory = share * loose.prediction.fullest.device / 80e9
        result = search(profile, cluster_of("2xh100", memory=memory), global_batch_size=8, top=20)
        mixed = [each for each in result.best if not isinstance(each.layout.recompute, str)]
        assert all(each.prediction.fits for each in result.best)
        if mixed:
            assert len(mixed[0].layout.recompute) == 8
            return
    pytest.fail("no plan computes only some blocks again")


def test_cost_prefers_fewer_devices_when_more_do_not_help() -> None:
    fast = search(tiny(), cluster_of("8xh100"), global_batch_size=8).best[0]
    cheap = search(tiny(), cluster_of("8xh100"), global_batch_size=8, objective=Objective(quantity="cost")).best[0]
    cost = [each.prediction.step_seconds * each.layout.world_size for each in (fast, cheap)]
    assert cost[1] <= cost[0]


def test_the_smallest_cluster_that_meets_a_deadline() -> None:
    profile, cluster = tiny(), cluster_of("8x2xh100")
    objective = Objective(quantity="time", tokens=1e9)

    def searched(part: object):
        return search(profile, part, global_batch_size=32, objective=objective)  # pyright: ignore[reportArgumentType]

    whole = searched(cluster).best[0].training_seconds
    assert whole is not None
    found = smallest_cluster(cluster, searched, deadline_seconds=2 * whole)
    seconds = found.result.best[0].training_seconds
    assert seconds is not None
    assert seconds <= 2 * whole
    assert found.nodes < 8
    with pytest.raises(PlanError, match="more than the .* days of the deadline. Allow"):
        smallest_cluster(cluster, searched, deadline_seconds=whole / 2)


def test_given_settings_are_kept() -> None:
    from weft.config.plan import parse_plan

    given_plan = parse_plan("[mesh]\ntensor = 2\n[data_parallel]\nzero = 3\n[memory]\nrecompute = 'full'\n")
    space = pinned(space_of(tiny(), cluster_of("8xh100"), global_batch_size=16), given_plan)
    for each in search(tiny(), cluster_of("8xh100"), global_batch_size=16, space=space).best:
        assert (each.layout.tensor, each.layout.zero, each.layout.recompute) == (2, 3, "full")


def test_a_compression_is_given_and_never_chosen_and_local_steps_neither() -> None:
    from weft.config.plan import parse_plan

    cluster = cluster_of("4x1xh100")
    slow = replace(cluster, links=tuple(replace(link, bandwidth_bytes_per_second=1e8) for link in cluster.links))
    permit = PermitRecipe(precision=("bf16",), compression=("int8", "topk"), local_steps=1000)
    space = space_of(tiny(), slow, global_batch_size=8, permit=permit)
    found = search(tiny(), slow, global_batch_size=8, space=space).best
    assert {(each.layout.compression, each.layout.local_steps) for each in found} == {("none", 0)}
    given_plan = parse_plan('[data_parallel]\ncompression = "int8"\n')
    found = search(tiny(), slow, global_batch_size=8, space=pinned(space, given_plan)).best
    assert {each.layout.compression for each in found} == {"int8"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"quantity": "trouhgput"}, "Did you mean throughput"),
        ({"quantity": "time"}, "needs the tokens to train on. Give --tokens"),
        ({"tokens": -1.0}, "tokens = -1 must be a finite number above 0"),
    ],
)
def test_impossible_objectives(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Objective(**arguments)  # pyright: ignore[reportArgumentType]


def test_unequal_devices_are_done_together() -> None:
    fast, slow = cluster_of("2x2xh100"), cluster_of("2x2xa100")
    mixed = replace(fast, nodes=(replace(fast.nodes[0], count=1), replace(slow.nodes[0], count=1)))
    space = narrow(space_of(tiny(), mixed, global_batch_size=64), pipelines=(1,), contexts=(1,), tensors=(1,))
    result = search(tiny(), mixed, global_batch_size=64, space=space)
    best = result.best[0]
    assert best.plan is not None
    shares = best.plan.microbatch.shares(best.layout.data)
    assert best.plan.global_batch_size == 64
    assert shares[0] > shares[-1]
    alike = search(tiny(), replace(slow, nodes=(replace(slow.nodes[0], count=2),)), global_batch_size=64, space=space)
    assert best.prediction.step_seconds < alike.best[0].prediction.step_seconds


def test_a_cluster_with_failed_devices_is_used() -> None:
    whole = cluster_of("2x4xh100")
    node = whole.nodes[0]
    failed = replace(
        whole, nodes=(replace(node, count=1), replace(node, count=1, devices=replace(node.devices, count=3)))
    )
    best = search(tiny(), failed, global_batch_size=21).best[0]
    assert best.plan is not None
    assert best.plan.global_batch_size == 21
    assert 4 < best.layout.world_size <= 7


def test_published_layouts_have_little_regret() -> None:
    """`python -m benchmarks.regret` wrote the file."""
    found = json.loads((Path(__file__).parents[3] / "benchmarks" / "results" / "regret.json").read_text())
    by_name = {case["name"]: case for case in found}
    assert by_name["Llama 3 405B, 16,384 devices"]["regret_within_the_system"] <= 0.1
    assert all(any(source in name for name in by_name) for source in ("Llama 3", "Megatron-LM", "torchtitan"))
    for name, case in by_name.items():
        assert case["regret"] <= 0.1 or case["supported_by"], name


@pytest.mark.parametrize(
    ("model", "spec", "batch"), [("gpt-neox-20b", "4x8xa100-80gb", 512), ("qwen2.5-14b", "12xa100-40gb", 96)]
)
def test_runners_up_leave_no_device_idle(model: str, spec: str, batch: int) -> None:
    """Where few kinds of plans were priced on the way, further ones are looked for: no filler of 15 stages on 30 of 32
    devices stands for them."""
    profile, cluster = profile_of_sizes(known_model(model).sizes), parse_cluster_spec(spec)
    best = search(profile, cluster, global_batch_size=batch).best
    assert [each.layout.world_size for each in best] == [cluster.num_devices] * 5
    assert any(each.layout.tensor > 1 for each in best)

"""Cuts, shares, orders, and plans of layouts: each against trying everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations, product
from math import gcd
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from placed_ranks import place_ranks, placement_of
from search_kit import cluster_of, tiny

from weft.config.cluster import parse_cluster_spec
from weft.config.plan import AXES, balanced_cuts, even_shares
from weft.errors import PlanError
from weft.planning.price import CostModel
from weft.planning.search import Space, distinct_orders, plan_of, space_of, unequal_shares
from weft.planning.search._splits import enumerate_splits  # pyright: ignore[reportPrivateUsage]
from weft.techniques.cost_terms import Layout

costs = st.integers(0, 9).map(float)


def stage_costs(block_costs: list[float], cuts: tuple[int, ...]) -> tuple[float, float]:
    edges = [0, *cuts, len(block_costs) - 2]
    stages = [sum(block_costs[1 + low : 1 + high]) for low, high in zip(edges, edges[1:], strict=False)]
    stages[0] += block_costs[0]
    stages[-1] += block_costs[-1]
    return max(stages), sum(stage * stage for stage in stages)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_cuts_are_the_best_of_all(data: st.DataObject) -> None:
    blocks = data.draw(st.lists(costs, min_size=1, max_size=8) | st.integers(1, 8).map(lambda n: [3.0] * n))
    stages = data.draw(st.integers(1, len(blocks)))
    block_costs = [data.draw(costs), *blocks, data.draw(costs)]
    cuts = balanced_cuts(block_costs, stages)
    every = [stage_costs(block_costs, choice) for choice in combinations(range(1, len(blocks)), stages - 1)]
    assert stage_costs(block_costs, cuts) == pytest.approx(min(every), rel=1e-9)


ranks = st.tuples(st.sampled_from([0.5, 1.0, 1.5, 2.0, 7.0]), st.sampled_from([0.0, 1.0, 4.0]))


@settings(max_examples=150, deadline=None)
@given(st.lists(ranks, min_size=1, max_size=4), st.integers(0, 6))
def test_unequal_shares_are_the_best_of_all(speeds: list[tuple[float, float]], more: int) -> None:
    total = len(speeds) + more

    def slowest(shares: tuple[int, ...]) -> float:
        return max(fixed + share * each for share, (each, fixed) in zip(shares, speeds, strict=True))

    shares = unequal_shares(total, [each for each, _ in speeds], [fixed for _, fixed in speeds])
    assert sum(shares) == total
    assert min(shares) >= 1
    every = [choice for choice in product(range(1, total + 1), repeat=len(speeds)) if sum(choice) == total]
    assert slowest(shares) == pytest.approx(min(map(slowest, every)))


def test_equal_devices_get_even_shares() -> None:
    assert unequal_shares(32, [1.0] * 3) == even_shares(32, 3)
    with pytest.raises(PlanError, match="2 microbatches cannot be shared among 3 data ranks"):
        unequal_shares(2, [1.0] * 3)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 300), st.sampled_from([48, 60, 64, 1024]), st.booleans(), st.data())
def test_splits_of_a_part_of_the_space_are_in_the_whole(
    devices: int, batch: int, fewer: bool, data: st.DataObject
) -> None:
    cluster = cluster_of(f"{devices}xh100")
    whole = replace(space_of(tiny(), cluster, global_batch_size=batch), fewer_devices=fewer)
    context, size = data.draw(st.sampled_from(whole.contexts)), data.draw(st.sampled_from(whole.microbatch_sizes))
    part = replace(whole, contexts=(context,), microbatch_sizes=(size,))

    def rows(space: Space, common: int) -> set[tuple[int, ...]]:
        """Axes, samples of a microbatch and microbatches, with `common` times as many data ranks and as much smaller
        contexts and microbatches."""
        splits, _ = enumerate_splits(space, devices=devices, global_batch_size=batch)
        columns = (splits.pipeline, splits.tensor, splits.context // common, splits.data * common)
        return set(zip(*map(np.ndarray.tolist, (*columns, splits.size // common, splits.microbatches)), strict=True))

    assert rows(part, gcd(context, size)) <= rows(whole, 1)


def test_stages_that_cannot_share_a_sequence_do_not() -> None:
    space = replace(space_of(tiny(), cluster_of("16xh100"), global_batch_size=8), shares_within_stages=False)
    splits, _ = enumerate_splits(space, devices=16, global_batch_size=8)
    assert {(bool(c > 1), bool(p > 1)) for c, p in zip(splits.context, splits.pipeline, strict=True)} == {
        (False, False),
        (True, False),
        (False, True),
    }


def test_every_order_is_priced_like_a_distinct_one() -> None:
    cost_model = CostModel(tiny(), cluster_of("4x4xh100"))
    layout = Layout(
        pipeline=2, replicate=2, context=2, tensor=2, zero=1, sequence_parallel=True, microbatches=4, fused_loss=True
    )
    distinct = {
        round(cost_model.time(replace(layout, order=order)).total, 12) for order in distinct_orders(layout, (4, 16))
    }
    ranked = ("pipeline", "replicate", "context", "tensor")
    for order in permutations(ranked):
        whole = ("shard", *order, "expert")
        assert sorted(whole) == sorted(AXES)
        assert round(cost_model.time(replace(layout, order=whole)).total, 12) in distinct
    assert len(distinct) < 24


layouts = st.builds(
    Layout,
    pipeline=st.integers(1, 3),
    replicate=st.integers(1, 3),
    shard=st.integers(1, 3),
    context=st.integers(1, 2),
    tensor=st.integers(1, 4),
    order=st.permutations(AXES).map(tuple),
    zero=st.integers(0, 3),
    sequence_parallel=st.booleans(),
    tensor_scheme=st.sampled_from(["1d", "2d", "2.5d", "3d"]),
    context_scheme=st.sampled_from(["ring", "all_gather", "ulysses", "usp"]),
    schedule=st.sampled_from(["1f1b", "zbv", "gpipe"]),
    chunks=st.integers(1, 3),
    cuts=st.none() | st.just((2, 5)),
    microbatch_size=st.integers(1, 4),
    recompute=st.sampled_from(["none", "full", ("none", "full", "selective")]),
    offload=st.sampled_from(["none", "optimizer", "activations"]),
    fused_loss=st.booleans(),
    precision=st.sampled_from(["bf16", "fp16"]),
    gradient_bytes=st.sampled_from([2, 4]),
    bucket_bytes=st.sampled_from([1000, 26_214_400]),
    compression=st.sampled_from(["none", "int8"]),
    local_steps=st.sampled_from([0, 10]),
)


@settings(max_examples=150, deadline=None)
@given(layouts, st.integers(1, 40))
def test_a_plan_gives_its_layout_back(layout: Layout, more: int) -> None:
    total = layout.data + more
    layout = replace(layout, microbatches=even_shares(total, layout.data)[0])
    plan = plan_of(layout, global_batch_size=total * layout.microbatch_size)
    assert plan.global_batch_size == total * layout.microbatch_size
    assert Layout.of(plan) == layout


def test_uneven_shares_go_into_the_plan() -> None:
    layout = Layout(replicate=3, microbatches=5, zero=1)
    plan = plan_of(layout, global_batch_size=10, shares=(5, 3, 2))
    assert plan.microbatch.per_step == (5, 3, 2)
    assert Layout.of(plan) == layout
    with pytest.raises(PlanError, match="do not make a global batch of 12"):
        plan_of(layout, global_batch_size=12)
    with pytest.raises(PlanError, match='"fp8" can be priced, but no plan has it'):
        plan_of(replace(layout, precision="fp8"), global_batch_size=13)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.randoms(use_true_random=False))
def test_ranks_on_irregular_links_are_placed_well(ranks: int, random: Random) -> None:
    def symmetric() -> np.ndarray:
        matrix = np.array([[float(random.randint(0, 9)) for _ in range(ranks)] for _ in range(ranks)])
        return np.triu(matrix, 1) + np.triu(matrix, 1).T

    traffic, distance = symmetric(), symmetric()

    def cost(devices: tuple[int, ...]) -> float:
        return float((traffic * distance[np.ix_(devices, devices)]).sum() / 2)

    placed = tuple(int(device) for device in place_ranks(traffic, distance))
    assert sorted(placed) == list(range(ranks))
    assert cost(placed) <= cost(tuple(range(ranks)))
    best = min(map(cost, permutations(range(ranks))))
    assert cost(placed) <= 1.5 * best + 1e-9


def test_neighbours_of_a_ring_become_neighbours_of_a_torus() -> None:
    torus = parse_cluster_spec("16xtpu-v5p")
    assert any(tier.topology == "torus" for tier in torus.links)
    layout = Layout(replicate=4, tensor=4, order=("tensor", "pipeline", "replicate", "shard", "expert", "context"))
    placed = placement_of(tiny(), torus, layout)
    assert placed is not None
    assert sorted(placed.devices) == list(range(16))
    assert placed.cost <= placed.in_order

"""The bucket that a search chooses, against a dense sweep of the price."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_kit import cluster_of, tiny

from weft.config.cluster import Cluster
from weft.config.plan import DataParallelPlan, Plan
from weft.model.profile import Profile
from weft.planning.price import CostModel
from weft.planning.search import Space, pinned, search, space_of
from weft.techniques.buckets.settings import FIRST_BUCKET_BYTES
from weft.techniques.buckets.sizes import SMALLEST_BUCKET

MEBI = 1 << 20
BATCH = 64


def data_space(spec: str, bandwidth: float) -> tuple[Profile, Cluster, Space]:
    """A small decoder, a cluster, and all that is not split but its data."""
    profile, cluster = tiny(), cluster_of(spec, bandwidth=bandwidth)
    space = space_of(profile, cluster, global_batch_size=BATCH)
    return profile, cluster, replace(space, tensors=(1,), datas=(cluster.num_devices,), zeros=(0, 1, 2))


@pytest.mark.parametrize(
    ("spec", "bandwidth", "pipelines"),
    [
        ("4x1xh100", 0.1, (1,)),
        ("4x1xh100", 1.0, (1,)),
        ("2x4xa100", 0.05, (1,)),
        ("4x1xcpu", 0.1, (1,)),
        ("4x2xh100", 0.02, (2,)),
    ],
)
def test_the_bucket_is_near_the_best_of_a_sweep(spec: str, bandwidth: float, pipelines: tuple[int, ...]) -> None:
    profile, cluster, space = data_space(spec, bandwidth)
    space = replace(space, pipelines=pipelines, datas=(cluster.num_devices // pipelines[0],))
    cost_model = CostModel(profile, cluster)
    found = search(profile, cluster, global_batch_size=BATCH, space=space, cost_model=cost_model, top=2).best
    assert found
    for layout in (each.layout for each in found):
        sweep = [replace(layout, bucket_bytes=round(2 ** (18 + step / 8))) for step in range(85)]
        prices = [cost_model.time(each).total for each in sweep]
        assert cost_model.time(layout).total <= 1.01 * min(prices)
        exposed = [cost_model.time(each).data for each in sweep]
        assert cost_model.time(layout).data <= 1.1 * min(exposed) + 0.001 * min(prices)


@pytest.mark.parametrize("bandwidth", [1.0, 0.1, 0.03])
def test_buckets_are_sized_for_what_travels(bandwidth: float) -> None:
    """Most of a mixture's gradients are those of experts; where one rank has each of these, they are not reduced."""
    profile, cluster = tiny(16, experts=64), cluster_of("1x8xh100", bandwidth=bandwidth)
    space = space_of(profile, cluster, global_batch_size=BATCH)
    space = replace(space, tensors=(1,), pipelines=(1,), datas=(8,), experts=(8,), zeros=(0, 1, 2))
    cost_model = CostModel(profile, cluster)
    for layout in (each.layout for each in search(profile, cluster, global_batch_size=BATCH, space=space).best):
        prices = [
            cost_model.time(replace(layout, bucket_bytes=round(2 ** (18 + step / 8)))).total for step in range(85)
        ]
        assert max(prices) > 1.3 * min(prices)
        size = cost_model.bucket(layout, low=SMALLEST_BUCKET)
        assert size is not None
        assert cost_model.time(replace(layout, bucket_bytes=size)).total <= 1.002 * min(prices)


def test_a_bucket_that_is_given_stays() -> None:
    profile, cluster, space = data_space("4x1xh100", 0.1)
    space = replace(space, pipelines=(1,))
    wanted = DataParallelPlan(bucket_bytes=7 * MEBI)
    given = Plan(data_parallel=wanted, origins={"data_parallel.bucket_bytes": "test"})
    best = search(profile, cluster, global_batch_size=BATCH, space=pinned(space, given)).best
    assert {each.layout.bucket_bytes for each in best} == {7 * MEBI}


@pytest.mark.parametrize("first", [FIRST_BUCKET_BYTES, 6 * MEBI])
def test_no_bucket_is_smaller_than_a_first_one_that_is_given(first: int) -> None:
    profile, cluster, space = data_space("4x1xcpu", 0.1)
    space = replace(space, pipelines=(1,))
    free = search(profile, cluster, global_batch_size=BATCH, space=space).best[0]
    assert free.plan is not None
    assert SMALLEST_BUCKET <= free.plan.data_parallel.bucket_bytes < 6 * MEBI
    assert free.plan.data_parallel.first_bucket_bytes <= free.plan.data_parallel.bucket_bytes
    wanted = DataParallelPlan(first_bucket_bytes=first)
    given = Plan(data_parallel=wanted, origins={"data_parallel.first_bucket_bytes": "test"})
    best = search(profile, cluster, global_batch_size=BATCH, space=pinned(space, given), pins=given).best[0]
    assert best.plan is not None
    assert best.plan.data_parallel.first_bucket_bytes == first
    assert first <= best.plan.data_parallel.bucket_bytes

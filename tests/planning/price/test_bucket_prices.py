"""Gradient buckets: the closed form against steps played bucket by bucket, and against dense sweeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.planning.price import CostModel
from weft.techniques.buckets.sizes import (
    LARGEST_BUCKET,
    SMALLEST_BUCKET,
    Flow,
    best_bucket,
    next_bucket,
    rounded_bucket,
)
from weft.techniques.cost_terms import Layout

MEBI = 1 << 20
FIRST = float(MEBI)


def line(start: float, per_byte: float) -> Callable[[float], float]:
    return lambda size: start + per_byte * size


def powers(low: float, high: float) -> st.SearchStrategy[float]:
    """Ten to the power of something between two exponents."""
    return st.floats(low, high).map(lambda exponent: 10.0**exponent)


flows = st.builds(
    lambda size, window, start, per_byte, slowdown: Flow(
        size=size, window=window, seconds=line(start, per_byte), slowdown=slowdown
    ),
    powers(6.5, 10),
    powers(-3, 1),
    powers(-6, -2.5),
    powers(-11, -7.5),
    st.sampled_from([1.0, 1.06, 1.3]),
)


def played(flow: Flow, bucket: float, count: int) -> float:
    """Seconds after backward until the last of `count` full buckets behind the first one has been sent."""
    filled, ended = FIRST, 0.0
    sizes = [FIRST, *[bucket] * count]
    for place, each in enumerate(sizes):
        filled += each if place else 0.0
        ended = max(ended, filled / flow.size * flow.window) + flow.seconds(each)
    return ended - flow.window


@settings(max_examples=60, deadline=None)
@given(flows, st.integers(1, 60), powers(6.1, 8.6))
def test_what_is_exposed_is_what_a_played_step_exposes(flow: Flow, count: int, bucket: float) -> None:
    flow = replace(flow, size=FIRST + count * bucket)
    assert flow.exposed(bucket, FIRST) == pytest.approx(played(flow, bucket, count), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(flows, flows, st.booleans(), st.sampled_from([0.0, 0.2]))
def test_the_closed_form_is_as_good_as_a_dense_sweep(one: Flow, two: Flow, both: bool, tail: float) -> None:
    together = [replace(one, tail=tail * one.size), *([replace(two, size=one.size)] if both else [])]

    def cost(size: float) -> float:
        return sum(flow.cost(size, FIRST) for flow in together)

    most = min(LARGEST_BUCKET, one.size)
    found = best_bucket(together, first=FIRST)
    least = min(cost(SMALLEST_BUCKET * (most / SMALLEST_BUCKET) ** (step / 150)) for step in range(151))
    assert SMALLEST_BUCKET <= found <= 1.5 * most
    assert cost(found) <= 1.1 * least  # sizes have three binary digits: half a step to either side is up to 12 %


@settings(max_examples=60, deadline=None)
@given(flows, powers(0.05, 1.5))
def test_more_latency_never_wants_smaller_buckets(flow: Flow, more: float) -> None:
    start = flow.seconds(0.0)
    per_byte = (flow.seconds(1e9) - start) / 1e9
    later = replace(flow, seconds=line(start * more, per_byte))
    assert best_bucket([later], first=FIRST) >= best_bucket([flow], first=FIRST)


def test_the_square_roots() -> None:
    size, start = 1e9, 1e-4
    waiting = Flow(size=size, window=0.1, seconds=line(start, 1e-9))  # the network takes ten times as long
    wanted = (start * size * (size - FIRST) / 0.1) ** 0.5
    assert best_bucket([waiting], first=FIRST) == rounded_bucket(wanted)
    keeping_up = Flow(size=size, window=10.0, seconds=line(start, 1e-9), slowdown=1.06)
    wanted = (0.06 / 0.94 * start * (size - FIRST) / 1e-9) ** 0.5
    assert best_bucket([keeping_up], first=FIRST) == rounded_bucket(wanted)


def test_a_collective_that_is_no_line() -> None:
    """One algorithm for small buckets, another for large ones, as prices have them."""

    def seconds(size: float) -> float:
        return min(2e-5 + 8e-9 * size, 2e-3 + 1e-9 * size)

    flow = Flow(size=2e8, window=0.25, seconds=seconds)
    found = best_bucket([flow], first=FIRST)
    least = min(flow.cost(2 ** (18 + step / 16), FIRST) for step in range(150))
    assert flow.cost(found, FIRST) <= 1.1 * least


def test_sizes_are_short_numbers() -> None:
    sizes = [next_bucket(MEBI, steps) for steps in range(-4, 9)]
    assert [size / MEBI for size in sizes] == [0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4]
    assert all(rounded_bucket(size * 1.04) == size for size in sizes)
    assert rounded_bucket(7.9 * MEBI) == 8 * MEBI
    assert next_bucket(26_214_400, 1) > 26_214_400 > next_bucket(26_214_400, -1)


# ── prices of layouts ─────────────────────────────────────────────────────────────────────────────────────────────────


def model(layers: int = 6, width: int = 512) -> Profile:
    """A decoder of 20 to 200 million parameters."""
    return profile_of_sizes(
        ModelSizes(
            name="small",
            num_layers=layers,
            hidden_size=width,
            num_heads=8,
            num_kv_heads=8,
            ffn_size=4 * width,
            vocabulary_size=8000,
            sequence_length=256,
        )
    )


def linked(spec: str, *, latency: float = 1.0, bandwidth: float = 1.0) -> Cluster:
    whole = parse_cluster_spec(spec)
    links = tuple(
        replace(
            tier,
            latency_seconds=tier.latency_seconds * latency,
            bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second * bandwidth,
        )
        for tier in whole.links
    )
    return replace(whole, links=links)


DATA = Layout(replicate=4, zero=1, precision="bf16", microbatches=1, microbatch_size=16)
CASES = [
    (DATA, linked("4x1xh100")),
    (DATA, linked("4x1xh100", bandwidth=0.02)),
    (DATA, linked("4x1xh100", latency=50.0)),
    (replace(DATA, zero=0, replicate=8), linked("8x1xa100", bandwidth=0.1)),
    (replace(DATA, zero=2, microbatches=4), linked("4x1xh100", bandwidth=0.1)),
    (replace(DATA, pipeline=2, microbatches=4), linked("8x1xh100", bandwidth=0.05)),
    (replace(DATA, precision="fp32", master_bytes=8), linked("4xcpu", bandwidth=0.05)),
]


@pytest.mark.parametrize(("layout", "cluster"), CASES)
def test_the_bucket_of_a_layout_is_near_the_best_price(layout: Layout, cluster: Cluster) -> None:
    cost_model = CostModel(model(), cluster)

    def exposed(size: int) -> float:
        return cost_model.time(replace(layout, bucket_bytes=size)).total

    found = cost_model.bucket(layout)
    assert found is not None
    least = min(exposed(round(2 ** (18 + step / 8))) for step in range(84))
    assert exposed(found) <= 1.02 * least


def test_small_models_on_slow_links_want_small_buckets() -> None:
    """33 M parameters on four hosts at 1 Gbit/s: most of what the usual bucket exposes is its own tail."""
    layout = replace(DATA, precision="fp32", master_bytes=8)
    cost_model = CostModel(model(), linked("4x1xcpu", bandwidth=0.1))
    found = cost_model.bucket(layout)
    assert found is not None
    assert found <= 2 * MEBI
    assert cost_model.time(replace(layout, bucket_bytes=found)).data < 0.2 * cost_model.time(layout).data


def test_without_buckets_there_is_none_to_choose() -> None:
    cost_model = CostModel(model(), linked("4x1xh100"))
    assert cost_model.bucket(Layout(tensor=4)) is None
    assert cost_model.bucket(Layout(zero=3, shard=4)) is None
    assert cost_model.bucket(replace(DATA, trained_share=0.0)) is None


def test_the_first_bucket_is_priced() -> None:
    """Where the network does not keep up, what comes first may come early."""
    cost_model = CostModel(model(), linked("4x1xh100", bandwidth=0.02))
    late = cost_model.time(replace(DATA, bucket_bytes=16 * MEBI, first_bucket_bytes=16 * MEBI)).data
    early = cost_model.time(replace(DATA, bucket_bytes=16 * MEBI, first_bucket_bytes=MEBI)).data
    assert early < late


def test_a_bucket_that_holds_all_hides_nothing() -> None:
    cost_model = CostModel(model(), linked("4x1xh100"))
    whole = cost_model.time(replace(DATA, zero=0, bucket_bytes=1 << 30, first_bucket_bytes=1 << 30)).data
    gradients = 4.0 * model().num_parameters
    group = cost_model.groups(DATA).data
    assert whole == pytest.approx(cost_model.seconds("all_reduce", gradients, group), rel=0.01)

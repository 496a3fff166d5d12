"""What collectives cost: formulas, the cheapest of them, and figures that others and we have measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.algorithms import (
    bruck,
    direct,
    double_ring,
    double_tree,
    halving_doubling,
    one_shot,
    recursive_doubling,
    ring,
    scatter,
    tree,
)
from weft.config.cluster import Collective, CollectiveTime, LinkTier, Topology, parse_cluster_spec
from weft.config.plan import AXES, Axis
from weft.planning.price import _algorithms as cost
from weft.planning.price import algorithm_choices, choose_algorithm, collective_seconds
from weft.planning.price._collectives import _fixed
from weft.techniques.cost_terms import AxisGroup, Layout, Network

KINDS: tuple[Collective, ...] = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send")
ALL_REDUCES = {"ring", "double_ring", "torus", "double_tree", "tree", "in_network", "hierarchical", "direct"} | {
    "one_shot",
    "recursive_doubling",
    "halving_doubling",
}
HALVES = {"ring", "double_ring", "torus", "hierarchical", "direct", "halving_doubling"}
OFFERED: dict[Collective, set[str]] = {
    "all_reduce": ALL_REDUCES,
    "reduce_scatter": HALVES,
    "all_gather": HALVES,
    "all_to_all": {"grouped", "hierarchical", "bruck"},
    "broadcast": {"tree", "scatter", "ring", "double_tree", "in_network"},
    "send": {"send"},
}
EVERYTHING = frozenset(name for names in OFFERED.values() for name in names)


def world_of(spec: str, **change: object) -> AxisGroup:
    cluster = parse_cluster_spec(spec)
    if change:
        cluster = replace(cluster, links=(*cluster.links[:-1], replace(cluster.links[-1], **change)))  # pyright: ignore[reportArgumentType]
    return Network(cluster).groups(Layout(replicate=cluster.num_devices)).world


@pytest.mark.parametrize(("devices", "latency", "bandwidth"), [(2, 46e-6, 193e9), (4, 54e-6, 218e9), (8, 79e-6, 227e9)])
@pytest.mark.parametrize("megabytes", [4, 16, 64, 256, 1024])
def test_measured_all_reduce_of_a100s(devices: int, latency: float, bandwidth: float, megabytes: int) -> None:
    """vTrain's A100 tables, as the line that fits them within 1.8 % from 4 MB up: α + 2(n−1)/n·S/β."""
    size = megabytes * 1e6
    measured = latency + 2 * (devices - 1) / devices * size / bandwidth
    assert collective_seconds("all_reduce", size, world_of(f"{devices}xa100")) == pytest.approx(measured, rel=0.03)


# Gloo's all-reduce over loopback on two shared cores, fp32, median microseconds, from this project's own benchmark.
GLOO = {
    2: {1 << 20: 662.5, 1 << 22: 2932.6, 1 << 24: 11528.0, 1 << 26: 42194.8},
    4: {1 << 20: 8294.7, 1 << 22: 13999.7, 1 << 24: 38485.9, 1 << 26: 156062.6},
    8: {1 << 20: 21735.6, 1 << 22: 29555.7, 1 << 24: 70363.3, 1 << 26: 471649.6},
}


def measured_gloo() -> LinkTier:
    rows = tuple(
        CollectiveTime(kind="all_reduce", members=world, size_bytes=size, seconds=micros * 1e-6)
        for world, times in GLOO.items()
        for size, micros in times.items()
    )
    return replace(parse_cluster_spec("2xcpu").links[0], measured=rows)


def cores(world: int, tier: LinkTier) -> AxisGroup:
    cluster = replace(parse_cluster_spec("2xcpu"), links=(tier,))
    return Network(cluster).groups(Layout(replicate=world)).world


def test_measured_all_reduce_of_processes() -> None:
    """The formula for two processes on two cores; the looked-up table for any number of them."""
    line = replace(measured_gloo(), measured=(), bandwidth_bytes_per_second=1.55e9, latency_seconds=6.5e-5)
    for size, micros in GLOO[2].items():
        assert collective_seconds("all_reduce", size, cores(2, line)) == pytest.approx(micros * 1e-6, rel=0.3)
    for world, times in GLOO.items():
        group = cores(world, measured_gloo())
        for size, micros in times.items():
            assert collective_seconds("all_reduce", size, group) == pytest.approx(micros * 1e-6)
            assert choose_algorithm("all_reduce", size, group).algorithm == "measured"
        middle = collective_seconds("all_reduce", 3e6, group)
        assert times[1 << 20] < middle * 1e6 < times[1 << 22]
        assert collective_seconds("all_reduce", 1 << 27, group) == pytest.approx(2e-6 * times[1 << 26])
    between = collective_seconds("all_reduce", 1 << 24, cores(6, measured_gloo()))
    assert GLOO[4][1 << 24] < between * 1e6 < GLOO[8][1 << 24]
    assert choose_algorithm("all_gather", 1e6, cores(2, measured_gloo())).algorithm != "measured"


def test_siblings_at_work_are_looked_up() -> None:
    tier = replace(
        measured_gloo(),
        devices=4,
        measured=tuple(
            CollectiveTime(kind="all_reduce", members=2, groups=groups, size_bytes=1 << 20, seconds=groups * 1e-3)
            for groups in (1, 2)
        ),
    )
    cluster = replace(parse_cluster_spec("4xcpu"), links=(tier,))
    network = Network(cluster, slowdowns=(1.5,))
    alone = network.group(Layout(replicate=2), "replicate")
    pairs = network.group(Layout(replicate=2, tensor=2), "tensor")
    assert collective_seconds("all_reduce", 1 << 20, alone) == pytest.approx(1.5e-3)
    assert collective_seconds("all_reduce", 1 << 20, pairs) == pytest.approx(3e-3)


def test_an_h100_node_sums_in_its_switches() -> None:
    """NCCL's own tests show bus bandwidths near 480 GB/s with NVLS and 360 without, on 8 × H100."""
    group, size = world_of("8xh100"), 4e9
    bus = 2 * 7 / 8 * size / collective_seconds("all_reduce", size, group)
    assert bus == pytest.approx(480e9, rel=0.05)
    assert choose_algorithm("all_reduce", size, group).algorithm == "in_network"
    plain = world_of("8xh100", in_network=False)
    assert 2 * 7 / 8 * size / collective_seconds("all_reduce", size, plain) == pytest.approx(360e9, rel=0.05)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (ring.all_reduce_seconds(4, 8.0, 1.0, 10.0), 6 + 12 * 10),
        (double_ring.all_reduce_seconds(4, 8.0, 1.0, 10.0), 6 + 6 * 10),
        (tree.all_reduce_seconds(5, 8.0, 1.0, 10.0), 6 * 81),
        (double_tree.all_reduce_seconds(5, 9.2, 1.0, 10.0), 6 + 200),
        (recursive_doubling.all_reduce_seconds(4, 8.0, 1.0, 10.0), 2 * 81),
        (recursive_doubling.all_reduce_seconds(5, 8.0, 1.0, 10.0), 4 * 81),
        (halving_doubling.all_reduce_seconds(4, 8.0, 1.0, 10.0), 4 + 120),
        (halving_doubling.all_reduce_seconds(5, 8.0, 1.0, 10.0), 4 + 120 + 162),
        (direct.all_reduce_seconds(4, 8.0, 1.0, 10.0), 2 * 1.5 + 120),
        (one_shot.all_reduce_seconds(4, 8.0, 1.0, 10.0), 1.5 + 240),
        (cost.in_network_all_reduce(4, 8.0, 1.0, 10.0), 2 + 100),
        (ring.half_seconds(4, 8.0, 1.0, 10.0), 3 + 60),
        (double_ring.half_seconds(4, 8.0, 1.0, 10.0), 3 + 30),
        (halving_doubling.half_seconds(5, 10.0, 1.0, 10.0), 3 + 80),
        (direct.half_seconds(2, 8.0, 1.0, 10.0), 1 + 40),
        (direct.all_to_all_seconds(4, 8.0, 1.0, 10.0), 1.5 + 60),
        (bruck.all_to_all_seconds(4, 8.0, 1.0, 10.0), 2 * 41),
        (tree.broadcast_seconds(4, 8.0, 1.0, 10.0), 2 * 81),
        (double_tree.broadcast_seconds(4, 9.2, 1.0, 10.0), 2 + 100),
        (ring.broadcast_seconds(4, 8.0, 1.0, 10.0), 3 + 80),
        (scatter.broadcast_seconds(4, 8.0, 1.0, 10.0), 5 + 120),
        (cost.in_network_broadcast(9, 8.0, 1.0, 10.0), 2 + 80),
        (cost.point_to_point(8.0, 1.0, 10.0), 81),
    ],
)
def test_formulas(seconds: float, expected: float) -> None:
    assert seconds == pytest.approx(expected)


def test_no_algorithm_beats_the_bytes_that_must_move() -> None:
    """Every rank must send (n−1)/n of the tensor in a half, twice that in an all-reduce without switches that add."""
    for n in (2, 3, 4, 7, 8, 64):
        for half in (ring, halving_doubling, direct):
            assert half.half_seconds(n, 1.0, 0.0, 1.0) == pytest.approx((n - 1) / n)
        for whole in (ring, tree, double_tree, recursive_doubling, halving_doubling, direct, one_shot):
            assert whole.all_reduce_seconds(n, 1.0, 0.0, 1.0) >= min(2 * (n - 1) / n, 1) - 1e-12


specs = st.sampled_from(
    ["2xh100", "8xa100", "4x8xh100", "3x4xgh200", "2x8xmi300x", "16xtpu-v5e", "64xtpu-v5p", "2x4xcpu"]
)
byte_counts = st.floats(1e3, 1e10)


@settings(max_examples=120, deadline=None)
@given(specs, st.sampled_from(KINDS), byte_counts, st.floats(1.01, 4), st.permutations(AXES).map(tuple))
def test_more_bytes_take_longer_and_faster_links_less(
    spec: str, kind: Collective, size: float, factor: float, order: tuple[Axis, ...]
) -> None:
    cluster = parse_cluster_spec(spec)
    faster = replace(
        cluster,
        links=tuple(
            replace(tier, bandwidth_bytes_per_second=factor * tier.bandwidth_bytes_per_second) for tier in cluster.links
        ),
    )
    half = 2 if cluster.num_devices % 2 == 0 else 1
    layout = Layout(tensor=half, replicate=cluster.num_devices // half, order=order)
    for axis in ("tensor", "replicate"):
        group, better = Network(cluster).group(layout, axis), Network(faster).group(layout, axis)
        seconds = collective_seconds(kind, size, group)
        assert collective_seconds(kind, size * factor, group) >= seconds
        assert collective_seconds(kind, size, better) <= seconds


@pytest.mark.parametrize("kind", KINDS)
def test_all_algorithms_are_offered_where_links_allow_them(kind: Collective) -> None:
    offered: set[str] = set()
    for spec in ("8xh100", "4x8xh100", "16xtpu-v5e"):
        cluster = parse_cluster_spec(spec)
        network = Network(cluster, algorithms=EVERYTHING)
        offered |= {
            choice.algorithm
            for choice in algorithm_choices(kind, 1e6, network.groups(Layout(replicate=cluster.num_devices)).world)
        }
    assert {name.split("+")[0] for name in offered} == OFFERED[kind]


def test_the_best_algorithm_changes_with_size_and_links() -> None:
    network = Network(parse_cluster_spec("64x8xh100"))
    group = network.groups(Layout(replicate=512)).world
    assert choose_algorithm("all_reduce", 1e4, group).algorithm == "double_tree"
    assert choose_algorithm("all_reduce", 1e10, group).algorithm.split("+")[0] in ("ring", "hierarchical")
    pod = Network(parse_cluster_spec("64xtpu-v5p")).groups(Layout(replicate=64)).world
    assert choose_algorithm("all_reduce", 1e9, pod).algorithm == "torus"
    host = Network(parse_cluster_spec("8xcpu")).groups(Layout(replicate=8)).world
    assert choose_algorithm("all_reduce", 1e3, host).algorithm in ("one_shot", "recursive_doubling", "direct")
    assert choose_algorithm("all_reduce", 1.0, Network(parse_cluster_spec("h100")).groups(Layout()).world).seconds == 0


@pytest.mark.parametrize("topology", ["ring", "double_ring"])
def test_two_rings_halve_the_time_of_large_tensors(topology: Topology) -> None:
    group = world_of("8xa100", topology=topology, bandwidth_bytes_per_second=1e11)
    alone = ring.all_reduce_seconds(8, 1e10, 0.0, 1 / 1e11)
    assert collective_seconds("all_reduce", 1e10, group) == pytest.approx(alone, rel=0.25)
    one_ring = {c.algorithm: c.seconds for c in algorithm_choices("all_reduce", 1e10, group)}
    if topology == "double_ring":
        assert one_ring["ring"] == pytest.approx(2 * one_ring["double_ring"], rel=0.01)
    else:
        assert "double_ring" not in one_ring


def test_a_torus_uses_all_axes_at_once() -> None:
    """Three axes of four, each with a double ring of 2 × 100 GB/s: close to 600 GB/s per chip."""
    group = Network(parse_cluster_spec("64xtpu-v5p")).groups(Layout(replicate=64)).world
    choices = {
        choice.algorithm.split("+")[0]: choice.seconds for choice in algorithm_choices("all_reduce", 6e10, group)
    }
    assert choices["torus"] == pytest.approx(2 * 63 / 64 * 6e10 / 600e9, rel=0.02)
    assert choices["hierarchical"] > 2.5 * choices["torus"]


def test_all_nodes_of_a_ring_share_their_cards() -> None:
    """8 × 50 GB/s leave a node of H100s together, so a ring through its eight devices runs at 400, not at 50."""
    group = world_of("4x8xh100")
    bus = 2 * 31 / 32 * 1e10 / collective_seconds("all_reduce", 1e10, group)
    assert 250e9 < bus < 400e9
    alone = Network(parse_cluster_spec("4x8xh100")).group(Layout(tensor=8, replicate=4), "replicate")
    assert 40e9 < 2 * 3 / 4 * 1e10 / collective_seconds("all_reduce", 1e10, alone) < 50e9


def test_oversubscription_costs_what_crosses_it() -> None:
    base = parse_cluster_spec("64x8xh100")
    inside, outside = base.links
    leaf = replace(outside, name="leaf", devices=256)
    spine = replace(outside, name="spine", topology="tree", oversubscription=8.0)
    narrow = Network(replace(base, links=(inside, leaf, spine)))
    wide = Network(base)
    layout = Layout(tensor=8, replicate=64)
    for kind in ("all_reduce", "all_gather"):
        slow, fast = (collective_seconds(kind, 1e9, net.group(layout, "replicate")) for net in (narrow, wide))
        assert slow < 1.3 * fast, "32 members of a leaf have uplinks enough for one ring"
    exchange = [collective_seconds("all_to_all", 1e9, net.group(layout, "replicate")) for net in (narrow, wide)]
    assert exchange[0] > 3 * exchange[1]


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["8xh100", "4x8xh100", "3x4xgh200", "2x8xmi300x", "2x72xgb200", "7x8xh100+1x6xh100"]),
    st.sampled_from(KINDS),
    st.floats(1.0, 1e11),
    st.permutations(AXES).map(tuple),
)
def test_lines_say_what_formulas_say(spec: str, kind: Collective, size: float, order: tuple[Axis, ...]) -> None:
    cluster = parse_cluster_spec(spec)
    layout = Layout(tensor=2, replicate=cluster.num_devices // 2, order=order)
    for axis in ("tensor", "replicate"):
        group = Network(cluster).group(layout, axis)
        assert group.is_affine
        cheapest = min(choice.seconds for choice in algorithm_choices(kind, size, group))
        fixed = collective_seconds(kind, size, group) - cheapest
        assert fixed == pytest.approx(_fixed(kind, size, group), rel=1e-6, abs=1e-7 * cheapest)

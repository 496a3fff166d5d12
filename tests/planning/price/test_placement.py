"""Where groups lie: arithmetic against looking at every rank."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from weft.config.cluster import Cluster, LinkTier, Topology, parse_cluster_spec
from weft.config.plan import AXES, Axis, MeshPlan, axis_coordinates
from weft.techniques.cost_terms import AxisGroup, Layout, Network

PRODUCTS: tuple[tuple[Axis, ...], ...] = (
    ("tensor",),
    ("context",),
    ("shard",),
    ("replicate",),
    ("replicate", "shard"),
    ("replicate", "shard", "context"),
)


def mesh_of(layout: Layout) -> MeshPlan:
    return MeshPlan(
        pipeline=layout.pipeline,
        replicate=layout.replicate,
        shard=layout.shard,
        context=layout.context,
        tensor=layout.tensor,
        order=layout.order,
    )


def groups_by_looking(layout: Layout, axes: tuple[Axis, ...]) -> list[list[int]]:
    found: dict[tuple[object, ...], list[int]] = {}
    for rank in range(layout.world_size):
        place = axis_coordinates(mesh_of(layout), rank)
        key = tuple(at for axis, at in place.items() if axis not in axes)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def spans_by_looking(groups: list[list[int]], slots: list[int], block: int) -> tuple[int, int]:
    """Blocks that the widest group touches, members of the thinnest in one."""
    counts = [
        [[slots[r] // block for r in group].count(b) for b in {slots[r] // block for r in group}] for group in groups
    ]
    return max(len(one) for one in counts), min(min(one) for one in counts)


def slots_of(cluster: Cluster) -> list[int]:
    counts = [node.devices.count for node in cluster.nodes for _ in range(node.count)]
    return [index * max(counts) + place for index, count in enumerate(counts) for place in range(count)]


def check(cluster: Cluster, layout: Layout) -> None:
    node = max(node.devices.count for node in cluster.nodes)
    blocks = [1] + [-(-tier.devices // node) * node if tier.devices > node else tier.devices for tier in cluster.links]
    network, slots = Network(cluster), slots_of(cluster)
    for axes in PRODUCTS:
        groups = groups_by_looking(layout, axes)
        spans = [spans_by_looking(groups, slots, block) for block in blocks[:-1]] + [(1, len(groups[0]))]
        expected = [
            (cluster.links[i].name, -(-spans[i][0] // spans[i + 1][0]), spans[i][1])
            for i in range(len(cluster.links))
            if -(-spans[i][0] // spans[i + 1][0]) > 1
        ]
        placed = network.group(layout, *axes)
        assert [(leg.level.name, leg.units, leg.members) for leg in placed.legs] == expected, (axes, layout)
        assert placed.size == len(groups[0])


sizes = st.sampled_from([1, 1, 2, 2, 3, 4, 5, 6, 8])
orders = st.permutations(AXES).map(tuple)


@settings(max_examples=150, deadline=None)
@given(sizes, sizes, sizes, sizes, sizes, orders, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2, 4]))
def test_arithmetic_sees_what_looking_sees(
    pipeline: int, replicate: int, shard: int, context: int, tensor: int, order: tuple[Axis, ...], node: int, racks: int
) -> None:
    layout = Layout(
        pipeline=pipeline, replicate=replicate, shard=shard, context=context, tensor=tensor, order=order
    )  # fmt: skip
    assume(layout.world_size <= 400)
    nodes = -(-layout.world_size // node)
    cluster = three_tiers(node, max(nodes, 2 * racks), racks)
    check(cluster, layout)


def three_tiers(node: int, nodes: int, racks: int) -> Cluster:
    base = parse_cluster_spec(f"{nodes}x{node}xh100")
    inside, outside = base.links
    rack = replace(outside, name="rack", devices=node * racks)
    return replace(base, links=(inside, rack, outside) if 1 < racks < nodes else (inside, outside))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from([4, 3, 2, 4, 4]), min_size=2, max_size=8), st.integers(1, 3), orders)
def test_nodes_with_failed_devices(counts: list[int], tensor: int, order: tuple[Axis, ...]) -> None:
    cluster = parse_cluster_spec("+".join(f"1x{count}xh100" for count in counts))
    assume(cluster.num_devices // tensor >= 1)
    check(cluster, Layout(tensor=tensor, shard=cluster.num_devices // tensor, order=order))


def test_llama_405b_on_2048_nodes() -> None:
    network = Network(parse_cluster_spec("2048x8xh100"))
    layout = Layout(pipeline=16, replicate=128, tensor=8)
    groups = network.groups(layout)
    assert groups.tensor.members == (8,)
    assert groups.data.members == (128,)
    assert groups.data.siblings == 128
    assert groups.pipeline.members == (2,)
    assert groups.pipeline.legs[0].level.name == "network"
    assert groups.world.members == (8, 2048)
    assert network.groups(layout) is groups


def test_a_rack_holds_a_group_of_64() -> None:
    network = Network(parse_cluster_spec("10x72xgb200"))
    groups = network.groups(Layout(replicate=5, tensor=4, shard=36))
    assert groups.tensor.members == (4,)
    assert groups.shard.members == (18, 2)  # 36 × 4 ranks are two racks
    assert groups.shard.legs[1].members == 18
    assert groups.replicate.members == (5,)


@pytest.mark.parametrize(
    ("order", "sizes", "expert", "left"),
    [
        (AXES, {"replicate": 2, "shard": 8, "tensor": 2, "expert": 4}, ((4, 2),), ((2, 1), (2, 8))),
        (AXES, {"shard": 8, "context": 2, "expert": 8}, ((8, 2),), ((2, 1),)),
        (AXES, {"shard": 2, "context": 4, "expert": 4}, ((2, 1), (2, 4)), ((2, 2),)),
        (
            ("pipeline", "replicate", "shard", "context", "expert", "tensor"),
            {"replicate": 2, "shard": 4, "context": 2, "expert": 8},
            ((8, 1),),
            (),
        ),
        (AXES, {"shard": 4, "tensor": 4, "expert": 16}, ((16, 1),), ()),
    ],
)
def test_experts_borrow_ranks(
    order: tuple[Axis, ...], sizes: dict[str, int], expert: tuple[tuple[int, int], ...], left: tuple[object, ...]
) -> None:
    from weft.techniques.cost_terms._placement import _axes, _borrowed, _merge

    layout = Layout(order=order, cuts_experts=False, **sizes)  # pyright: ignore[reportArgumentType]
    taken, rest = _borrowed(layout, _axes(layout))
    assert _merge(taken) == expert
    assert _merge(rest) == left
    network = Network(parse_cluster_spec("64xh100"))
    groups = network.groups(layout)
    assert groups.expert.size == layout.expert
    assert groups.expert.size * groups.expert_data.size == layout.data * layout.context * layout.tensor
    if layout.expert <= layout.expert_room:  # tensor ranks that each have a part of an expert add up nothing of it
        groups = network.groups(replace(layout, cuts_experts=True))
        assert groups.expert.size * groups.expert_data.size == layout.data * layout.context


def test_pipeline_boundaries() -> None:
    network = Network(parse_cluster_spec("2x8xh100"))
    inner = Layout(order=("replicate", "shard", "expert", "context", "tensor", "pipeline"), pipeline=8, replicate=2)
    assert network.groups(inner).pipeline.legs[0].level.name == "scale_up"
    across = replace(inner, pipeline=16, replicate=1)
    names = [network.boundary(across, stage).legs[0].level.name for stage in range(16)]
    assert names == ["scale_up"] * 7 + ["network"] + ["scale_up"] * 7 + ["network"]
    assert network.groups(across).pipeline.legs[0].level.name == "network"
    assert not network.groups(Layout(tensor=8)).pipeline.legs


def test_few_senders_have_the_nodes_card_for_themselves() -> None:
    base = parse_cluster_spec("2x8xv100")
    outside = replace(base.links[1], alone_bytes_per_second=4 * base.links[1].bandwidth_bytes_per_second)
    network = Network(replace(base, links=(base.links[0], outside)))
    order: tuple[Axis, ...] = ("replicate", "shard", "expert", "context", "pipeline", "tensor")
    shares: list[float] = []
    for tensor in (1, 2, 4, 8):
        pair = network.boundary(Layout(order=order, pipeline=16 // tensor, tensor=tensor), 8 // tensor - 1).legs[0]
        shares.append(pair.pair / outside.bandwidth_bytes_per_second)
    assert shares == [4, 4, 2, 1]


def test_siblings_share_what_leaves_a_node() -> None:
    network = Network(parse_cluster_spec("4x8xh100"))
    together = network.group(Layout(tensor=32), "tensor").legs[1]
    apart = network.group(Layout(tensor=8, replicate=4), "replicate").legs[0]
    assert together.members * together.bandwidth == 8 * apart.members * apart.bandwidth


def circle(topology: Topology, devices: int = 8) -> Network:
    base = parse_cluster_spec(f"{devices}xh100")
    shape = (devices,) if topology == "torus" else ()
    return Network(replace(base, links=(replace(base.links[0], topology=topology, shape=shape),)))


@pytest.mark.parametrize(
    ("topology", "tensor", "outer", "ring", "rings", "pair"),
    [
        ("ring", 8, 1, 1, 1, 1),
        ("ring", 2, 4, 1, 1, 1),
        ("ring", 2, -4, 1 / 4, 1, 1 / 4),
        ("double_ring", 8, 1, 1 / 2, 2, 1 / 2),
        ("double_ring", 4, 2, 1 / 2, 1, 1 / 2),
        ("double_ring", 4, -2, 1 / 4, 2, 1 / 4),
        ("torus", 8, 1, 1 / 2, 2, 1 / 2),
        ("fully_connected", 8, 1, 1, 1, 1 / 7),
        ("fully_connected", 2, 4, 1 / 7, 1, 1 / 7),
        ("switch", 2, 4, 1, 1, 1),
    ],
)
def test_shares_of_direct_links(
    topology: Topology, tensor: int, outer: int, ring: float, rings: int, pair: float
) -> None:
    """`outer` below 0 puts tensor outermost, so that its members stand apart."""
    order: tuple[Axis, ...] = AXES if outer > 0 else ("tensor", "pipeline", "replicate", "shard", "expert", "context")
    leg = circle(topology).group(Layout(tensor=tensor, replicate=abs(outer), order=order), "tensor").legs[0]
    whole = 450e9
    assert leg.ring == pytest.approx(ring * whole)
    assert leg.pair == pytest.approx(pair * whole)
    assert leg.rings == rings


def test_a_torus_has_a_level_per_axis() -> None:
    network = Network(parse_cluster_spec("64xtpu-v5p"))
    groups = network.groups(Layout(tensor=4, shard=4, replicate=4))
    assert groups.world.members == (4, 4, 4)
    for group in (groups.tensor, groups.shard, groups.replicate):
        assert group.members == (4,)
        assert group.legs[0].rings == 2
        assert group.legs[0].ring == pytest.approx(100e9)  # one of six links of a chip


def test_an_oversubscribed_tree_is_wide_for_few_and_narrow_for_all() -> None:
    base = parse_cluster_spec("64x8xh100")
    inside, outside = base.links
    leaf = replace(outside, name="leaf", devices=256)
    spine = replace(outside, name="spine", topology="tree", oversubscription=7.0)
    network = Network(replace(base, links=(inside, leaf, spine)))
    data = network.group(Layout(tensor=8, replicate=64), "replicate")
    assert data.members == (32, 2)
    assert data.legs[1].bandwidth == pytest.approx(50e9 / 7)
    assert data.legs[1].members == 32
    boundary = network.groups(Layout(pipeline=2, tensor=8, replicate=32)).pipeline.legs[0]
    assert boundary.pair == pytest.approx(50e9 / 7)  # all of a leaf's devices send to the other leaf


def test_rails_go_through_the_node() -> None:
    base = parse_cluster_spec("2x8xh100")
    network = Network(replace(base, links=(base.links[0], replace(base.links[1], topology="rails"))))
    straight = network.groups(Layout(pipeline=2, tensor=8)).pipeline
    assert [leg.level.name for leg in straight.legs] == ["network"]
    order: tuple[Axis, ...] = ("replicate", "shard", "expert", "context", "pipeline", "tensor")
    aslant = network.groups(Layout(pipeline=4, tensor=4, order=order)).pipeline
    assert [leg.level.name for leg in aslant.legs] == ["scale_up", "network"]


def test_ranks_on_cores_spread_out() -> None:
    network = Network(parse_cluster_spec("2x4xcpu"))
    assert network.group(Layout(replicate=2), "replicate").legs[0].level.name == "network"
    assert network.group(Layout(replicate=8), "replicate").members == (4, 2)
    assert network.group(Layout(replicate=16), "replicate").members == (8, 2)
    one = Network(parse_cluster_spec("1xcpu"))
    assert one.group(Layout(replicate=2), "replicate").members == (2,)


def test_slowdowns_stand_for_all_outer_tiers() -> None:
    cluster = three_tiers(8, 16, 4)
    plain, slow = Network(cluster), Network(cluster, slowdowns=(1.25, 2.0))
    layout = Layout(replicate=128)
    pairs = zip(plain.groups(layout).world.legs, slow.groups(layout).world.legs, strict=True)
    assert [before.bandwidth / after.bandwidth for before, after in pairs] == [1.25, 2.0, 2.0]


def seconds_sum(group: AxisGroup) -> float:
    return math.fsum(leg.latency for leg in group.legs)


def test_latencies_count_hops_on_rings() -> None:
    order: tuple[Axis, ...] = ("tensor", "pipeline", "replicate", "shard", "expert", "context")
    near = circle("double_ring").group(Layout(tensor=2, replicate=4), "tensor")
    far = circle("double_ring").group(Layout(tensor=2, replicate=4, order=order), "tensor")
    assert seconds_sum(far) == 4 * seconds_sum(near)


def test_links_need_a_name_only_once() -> None:
    tier = LinkTier(name="a", devices=2, latency_seconds=0, bandwidth_bytes_per_second=1)
    assert tier.topology == "switch"

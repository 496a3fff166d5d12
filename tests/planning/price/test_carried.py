"""Between cores a price is that of what will run: shared memory, Gloo's own way, or the algorithm that a plan names."""

from __future__ import annotations

from dataclasses import replace

import pytest

from weft.comm.algorithms import direct, find_algorithm
from weft.comm.algorithms import flat as flat_arrangement
from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import DataParallelPlan, MeshPlan, Plan
from weft.model.profile import ModelSizes, profile_of_sizes
from weft.planning.price import CostModel, choose_algorithm, collective_seconds
from weft.planning.price._collectives import _as_links
from weft.techniques.cost_terms import AxisGroup, Layout, Network

SMALL = profile_of_sizes(
    ModelSizes(
        name="small", num_layers=4, hidden_size=512, num_heads=8, num_kv_heads=4, ffn_size=2048,
        vocabulary_size=8000, sequence_length=64, tied=False,
    )
)  # fmt: skip
SIZE = float(32 << 20)


def slow_network(spec: str) -> Cluster:
    """Hosts of a spec joined by 1 Gbit/s each."""
    cluster = parse_cluster_spec(spec)
    inside, outside = cluster.links
    ranks = cluster.num_devices // cluster.num_nodes
    slow = replace(outside, bandwidth_bytes_per_second=1.25e8 / ranks, alone_bytes_per_second=1.25e8)
    return replace(cluster, links=(inside, slow))


def everyone(cluster: Cluster) -> AxisGroup:
    return Network(cluster).groups(Layout(replicate=cluster.num_devices)).world


def test_ranks_of_one_node_read_from_each_other() -> None:
    group = everyone(parse_cluster_spec("8xcpu"))
    leg = group.legs[0]
    assert choose_algorithm("all_reduce", 1e3, group).algorithm == "one_shot"
    assert choose_algorithm("all_reduce", SIZE, group) == (
        "direct",
        direct.all_reduce_seconds(8, SIZE, leg.latency, 1 / leg.bandwidth),
    )
    assert choose_algorithm("reduce_scatter", SIZE, group).algorithm == "direct"


def test_between_nodes_gloo_goes_round_and_parts_go_straight() -> None:
    """2 × 2 ranks: a ring sends 1.5 tensors out of each host, parts for the other host's ranks are half of a rank's."""
    group = everyone(slow_network("2x2xcpu"))
    assert choose_algorithm("all_reduce", SIZE, group).algorithm == "ring"
    assert collective_seconds("all_reduce", SIZE, group) == pytest.approx(1.5 * SIZE / 1.25e8, rel=0.01)
    for kind in ("reduce_scatter", "all_gather"):
        assert collective_seconds(kind, SIZE, group) == pytest.approx(2 * SIZE / 2 / 1.25e8, rel=0.01)


def test_a_hierarchy_sends_each_byte_over_the_network_once() -> None:
    group = everyone(slow_network("2x2xcpu"))

    def gain(kind: str) -> float:
        auto, levels = (collective_seconds(kind, SIZE, group, name) for name in ("auto", "hierarchical"))  # type: ignore[arg-type]
        return auto / levels

    assert gain("all_reduce") == pytest.approx(1.5, rel=0.15)
    assert gain("reduce_scatter") == pytest.approx(2.0, rel=0.15)
    assert gain("all_gather") == pytest.approx(2.0, rel=0.15)


@pytest.mark.parametrize("spec", ["4xcpu", "2x2xcpu", "3x2xcpu", "4x1xcpu"])
@pytest.mark.parametrize("name", ["tree", "one_shot", "parameter_server", "hierarchical+tree", "torus", "double_ring"])
def test_what_is_named_is_priced_by_its_formula(spec: str, name: str) -> None:
    group = everyone(parse_cluster_spec(spec))
    place, links = _as_links(group)
    expected = find_algorithm(name).methods["all_reduce"].seconds(place, SIZE, links)
    found = choose_algorithm("all_reduce", SIZE, group, name)
    assert found.algorithm == name
    assert found.seconds == pytest.approx(expected, rel=0.5)
    assert choose_algorithm("all_reduce", SIZE, group, f"{name}:0-1K;ring:1K-max").algorithm == "ring"


def test_nodes_are_what_the_links_say() -> None:
    place, links = _as_links(everyone(parse_cluster_spec("3x2xcpu")))
    assert (place.members, place.nodes) == (6, (2, 2, 2))
    assert links.inner_latency is not None
    assert links.per_byte > links.inside[1]
    apart = _as_links(Network(parse_cluster_spec("3x2xcpu")).group(Layout(tensor=2, replicate=3), "replicate"))
    assert apart[0] == flat_arrangement(3, nodes=(1, 1, 1))


def test_what_an_algorithm_lacks_is_priced_as_what_stands_in() -> None:
    group = everyone(slow_network("2x2xcpu"))
    whole = collective_seconds("all_reduce", SIZE, group, "tree")
    assert collective_seconds("reduce_scatter", SIZE, group, "tree") == whole
    assert choose_algorithm("all_gather", SIZE, group, "tree").algorithm == "exchange"
    assert choose_algorithm("all_reduce", SIZE, group, "measured") == choose_algorithm("all_reduce", SIZE, group)
    backend = [collective_seconds(kind, SIZE, group, "backend") for kind in ("all_reduce", "reduce_scatter")]
    assert backend == [collective_seconds("all_reduce", SIZE, group)] * 2


def plan_of(algorithm: str, zero: int = 1, **others: object) -> Layout:
    data = DataParallelPlan(zero=zero, algorithm=algorithm, **others)  # type: ignore[arg-type]
    return Layout.of(Plan(mesh=MeshPlan(shard=4), data_parallel=data))


def test_plans_that_differ_in_the_algorithm_alone_cost_differently() -> None:
    cost_model = CostModel(SMALL, slow_network("2x2xcpu"))
    names = ("auto", "ring", "tree", "hierarchical", "halving_doubling")
    for zero in (0, 1):
        found = {name: cost_model.time(plan_of(name, zero)).total for name in names}
        assert len(set(found.values())) == len(names) - (zero == 0), "an all-reduce of Gloo's own is a ring"
        assert found["hierarchical"] == min(found.values())
        assert found["tree"] == max(found.values())


def test_what_another_setting_carries_is_not_the_algorithms() -> None:
    cost_model = CostModel(SMALL, slow_network("2x2xcpu"))
    sharded = [cost_model.time(plan_of(name, 3)).total for name in ("auto", "hierarchical")]
    assert sharded[0] == sharded[1]
    assert plan_of("ring", 0, compression="bf16").reduced_by == "auto"
    on_one = [replace(plan_of(name, 3), shard=1, replicate=4) for name in ("auto", "tree")]
    assert on_one[1].reduced_by == "tree"
    assert cost_model.time(on_one[0]).total != cost_model.time(on_one[1]).total


def test_a_library_of_accelerators_chooses_itself() -> None:
    group = everyone(parse_cluster_spec("2x8xh100"))
    for name in ("ring", "tree", "hierarchical"):
        assert choose_algorithm("all_reduce", SIZE, group, name) == choose_algorithm("all_reduce", SIZE, group)

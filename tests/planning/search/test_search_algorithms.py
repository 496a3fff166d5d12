"""Search names the algorithm of the data ranks where several hosts of cores have a better one than Gloo's."""

from __future__ import annotations

from dataclasses import replace

import pytest
from search_kit import narrow, tiny

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import DataParallelPlan, MeshPlan, Plan
from weft.planning.price import CostModel
from weft.planning.search import Space, pinned, search, space_of
from weft.planning.search._pins import with_pins
from weft.techniques.check import runnability
from weft.techniques.cost_terms import Layout

BATCH = 8


def hosts(spec: str, bytes_per_second: float = 1.25e8) -> Cluster:
    """Hosts joined by so much each."""
    cluster = parse_cluster_spec(spec)
    share = bytes_per_second * cluster.num_nodes / cluster.num_devices
    slow = replace(cluster.links[-1], bandwidth_bytes_per_second=share, alone_bytes_per_second=bytes_per_second)
    return replace(cluster, links=(*cluster.links[:-1], slow))


def space(cluster: Cluster, **changes: object) -> Space:
    whole = space_of(tiny(), cluster, global_batch_size=BATCH)
    return narrow(whole, **{"pipelines": (1,), "tensors": (1,), "zeros": (0, 1)} | changes)


def found(cluster: Cluster, space: Space) -> list[Plan]:
    result = search(tiny(), cluster, global_batch_size=BATCH, space=space)
    return [each.plan for each in result.best]


def test_hosts_of_cores_get_a_hierarchy() -> None:
    cluster = hosts("2x2xcpu")
    plans = found(cluster, space(cluster))
    assert plans[0].mesh.data == 4
    assert plans[0].data_parallel.algorithm.startswith("hierarchical")
    assert runnability(plans[0]) == []
    assert plans == found(cluster, space(cluster))
    cost_model = CostModel(tiny(), cluster)
    chosen = Layout.of(plans[0])
    assert cost_model.time(chosen).data < 0.8 * cost_model.time(replace(chosen, algorithm="auto")).data


@pytest.mark.parametrize("spec", ["4xcpu", "4x1xcpu", "2x2xh100"])
def test_nobody_chooses_where_one_way_is_the_best(spec: str) -> None:
    cluster = parse_cluster_spec(spec)
    assert space_of(tiny(), cluster, global_batch_size=BATCH).algorithms == ("auto",)


def test_what_is_given_is_kept() -> None:
    cluster = hosts("2x2xcpu")
    ring = Plan(
        data_parallel=DataParallelPlan(algorithm="ring"), origins={"data_parallel.algorithm": "plan.toml, line 2"}
    )
    assert {plan.data_parallel.algorithm for plan in found(cluster, pinned(space(cluster), ring))} == {"ring"}
    local = Plan(
        data_parallel=DataParallelPlan(local_steps=4), origins={"data_parallel.local_steps": "plan.toml, line 2"}
    )
    stepping = pinned(space(cluster), local)
    assert stepping.algorithms == ("auto",)
    chosen = [with_pins(plan, local) for plan in found(cluster, stepping)]
    assert any(plan.mesh.replicate > 1 for plan in chosen)
    assert all(runnability(plan) == [] for plan in chosen if plan.mesh.replicate > 1)
    sharded = replace(local, mesh=MeshPlan(shard=2), origins={**local.origins, "mesh.shard": "plan.toml, line 3"})
    assert pinned(space(cluster), sharded).zeros == (0, 1)
    squeezed = space(cluster, compressions=("bf16",))
    assert {plan.data_parallel.algorithm for plan in found(cluster, squeezed)} == {"auto"}

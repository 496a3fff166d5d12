"""Blocks of a plan: what is asked of places, in what order machines take their ranks, and what a placement costs."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from weft.config.cluster import Cluster, LinkTier, cluster_of_hosts, parse_cluster_spec
from weft.config.pool import Pool, SlurmSettings
from weft.model.description import description_of_sizes
from weft.model.profile.known import known_model
from weft.planning.price import CostModel, PricedBlock, price_blocks
from weft.run.hosts.roster import HostFacts, in_order
from weft.run.places import place_of
from weft.run.places.contract import Gang, GangBlock, Job
from weft.run.places.placement import granted, num_whole, placement_lines
from weft.run.places.proposal import block_of
from weft.techniques.cost_terms import Layout

DRAWS = 20
PER_NODE = 8


def draw_cluster(draw: random.Random, leaf_nodes: int) -> Cluster:
    """Four leaves of so many nodes, under a spine that is narrower than they are."""
    cluster = parse_cluster_spec(f"{4 * leaf_nodes}x{PER_NODE}xh100")
    leaf = leaf_nodes * PER_NODE
    links = (
        cluster.links[0],
        LinkTier(name="leaf", devices=leaf, latency_seconds=5e-6, bandwidth_bytes_per_second=5e10),
        LinkTier(
            name="spine",
            devices=4 * leaf,
            latency_seconds=12e-6,
            bandwidth_bytes_per_second=5e10,
            topology="tree",
            oversubscription=draw.choice((3.0, 5.0, 8.0)),
        ),
    )
    return replace(cluster, links=links)


def draw_case(seed: int) -> tuple[Cluster, Layout, tuple[PricedBlock, ...]]:
    draw = random.Random(seed)
    leaf_nodes = draw.choice((2, 4, 8))
    cluster = draw_cluster(draw, leaf_nodes)
    tensor, context = draw.choice((2, 4, 8)), draw.choice((1, 2))
    shard = draw.choice((16, 32)) // (tensor * context)
    replicate = cluster.num_devices // (shard * tensor * context)
    zero = draw.choice((2, 3))
    layout = Layout(tensor=tensor, context=context, shard=shard, replicate=replicate, zero=zero, microbatch_size=1)
    profile = description_of_sizes(known_model("llama-3.1-8b").sizes).profile
    return cluster, layout, price_blocks(profile, cluster, layout)


def blocks_of(cluster: Cluster, priced: tuple[PricedBlock, ...]) -> tuple[GangBlock, ...]:
    return tuple(block_of(each, cluster) for each in priced)


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_block_is_whole_axes_and_costs_more_where_it_is_split(seed: int) -> None:
    cluster, layout, priced = draw_case(seed)
    (block,) = blocks_of(cluster, priced)
    leaf_nodes = cluster.num_nodes // 4
    assert block.tier == "leaf"
    assert 1 < block.num_nodes <= leaf_nodes
    assert leaf_nodes % block.num_nodes == 0
    inner = 1
    for axis in block.axes:
        inner *= getattr(layout, axis)
    assert block.num_nodes * PER_NODE % inner == 0, "an axis is cut"
    assert block.whole_seconds <= block.split_seconds <= block.scattered_seconds
    assert block.whole_seconds < block.scattered_seconds


@pytest.mark.parametrize("seed", range(DRAWS))
def test_machines_that_lie_together_take_neighbouring_ranks(seed: int) -> None:
    cluster, _, priced = draw_case(seed)
    blocks = blocks_of(cluster, priced)
    leaf_nodes = cluster.num_nodes // 4
    draw = random.Random(seed)
    names = [(leaf, node) for leaf in range(4) for node in range(leaf_nodes)]
    draw.shuffle(names)
    joined = {f"{leaf}/{node}": facts_of(("spine", f"leaf{leaf}"), node) for leaf, node in names}
    ordered = in_order(joined)
    assert next(iter(ordered)) == next(iter(joined)), "the leader has rank 0"
    paths = [facts.topology for facts in ordered.values()]
    assert num_whole(blocks[0], paths) == cluster.num_nodes // blocks[0].num_nodes
    (line,) = placement_lines(blocks, paths)
    assert "per step" not in line
    (line,) = placement_lines(blocks, [("spine", f"leaf{index % 4}") for index in range(cluster.num_nodes)])
    assert f"0 of {cluster.num_nodes // blocks[0].num_nodes} blocks" in line
    assert "per step (+" in line


@pytest.mark.parametrize("seed", range(DRAWS))
def test_as_many_blocks_are_whole_as_the_grant_permits(seed: int) -> None:
    """Each leaf has given any number of machines; some plans have larger blocks, too, each under one of two spines."""
    draw = random.Random(seed)
    small, times = draw.choice((2, 3)), draw.choice((1, 2))
    given = {(f"spine{leaf % 2}", f"leaf{leaf}"): draw.randint(0, 5) for leaf in range(6)}
    places = [path for path, number in given.items() for _ in range(number)]
    places += [("spine0", "leaf0")] * (-len(places) % (small * times))  # the gang has whole numbers of blocks
    draw.shuffle(places)
    joined = {f"{index}": facts_of(path, index) for index, path in enumerate(places)}
    sizes = [(small, 0), (small * times, 1)] if times > 1 else [(small, 0)]
    ordered = in_order(joined, sizes)
    assert sorted(ordered) == sorted(joined)
    assert next(iter(ordered)) == "0", "the leader has rank 0"
    paths = [facts.topology for facts in ordered.values()]
    outer = Counter(path[:1] for path in places)
    size, level = sizes[-1]
    wanted = sum(number // size for number in (outer if level else Counter(places)).values())
    assert num_whole(block_of_size(size, level), paths) == wanted


@pytest.mark.parametrize("seed", range(DRAWS))
def test_the_planner_sees_what_was_granted(seed: int) -> None:
    cluster, layout, priced = draw_case(seed)
    (block,), leaf_nodes = blocks_of(cluster, priced), cluster.num_nodes // 4
    draw = random.Random(seed)
    size = draw.choice([size for size in range(1, leaf_nodes + 1) if leaf_nodes % size == 0])
    order = [leaf for leaf in range(4) for _ in range(leaf_nodes // size)]
    draw.shuffle(order)
    paths = [("spine", f"leaf{leaf}") for leaf in order for _ in range(size)]
    seen = granted(cluster, paths)
    leaf = next((tier.devices // PER_NODE for tier in seen.links if tier.name == "leaf"), 1)
    assert leaf >= size
    for start in range(0, len(paths), leaf):
        assert len(set(paths[start : start + leaf])) == 1
    assert granted(cluster, [("spine", f"leaf{index // leaf_nodes}") for index in range(len(paths))]) == cluster
    profile = description_of_sizes(known_model("llama-3.1-8b").sizes).profile
    seconds = CostModel(profile, seen).predict(layout, exact=True).time.total
    if leaf % block.num_nodes == 0:
        assert seconds == pytest.approx(block.whole_seconds)
    if leaf == 1:
        assert seconds == pytest.approx(block.scattered_seconds)


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
def test_tiers_of_a_cluster_join_machines_however_many_ranks_each_has(num_devices: int) -> None:
    cluster = draw_cluster(random.Random(0), leaf_nodes=4)
    seen = cluster_of_hosts(cluster, cluster, 6, num_devices)
    joined = [(tier.name, tier.devices) for tier in seen.links]
    assert joined == [(cluster.links[0].name, num_devices), ("leaf", 4 * num_devices), ("spine", 6 * num_devices)]
    own = cluster_of_hosts(cluster, None, 2, num_devices)
    assert [tier.devices for tier in own.links] == [num_devices, 2 * num_devices]


@pytest.mark.parametrize("seed", range(DRAWS))
def test_a_gang_that_one_leaf_holds_is_a_block(seed: int) -> None:
    draw = random.Random(seed)
    cluster, nodes = draw_cluster(draw, leaf_nodes=8), draw.choice((2, 4, 8))
    layout = Layout(tensor=PER_NODE, shard=nodes, zero=draw.choice((2, 3)), microbatch_size=1)
    profile = description_of_sizes(known_model("llama-3.1-8b").sizes).profile
    (block,) = blocks_of(cluster, price_blocks(profile, cluster, layout))
    assert (block.num_nodes, block.tier_nodes, block.axes) == (nodes, 8, ("shard", "tensor"))
    assert block.whole_seconds < block.scattered_seconds


@pytest.mark.parametrize("topology", ["tree", "block"])
def test_slurm_is_asked_for_whole_blocks(topology: str) -> None:
    cluster, _, priced = draw_case(3)
    (block,) = blocks_of(cluster, priced)
    number = cluster.num_nodes
    gang = Gang(least=number, most=number, num_devices=PER_NODE, accelerator="h100", blocks=(block,))
    pool = Pool(place="slurm", name="lab", slurm=SlurmSettings(topology=topology))  # pyright: ignore[reportArgumentType]
    request = place_of("slurm").request(gang, Job(name="weft-run", run=Path("/shared/run")), pool)
    (line,) = [line for line in request.lines if "--switches" in line.text or "--segment" in line.text]
    assert line.text.startswith(
        "#SBATCH --switches=4@" if topology == "tree" else f"#SBATCH --segment={block.num_nodes}"
    )
    assert "leaf" in line.why


@pytest.mark.parametrize("folder", ["/shared/my run", "/shared/50%j", "/shared/a\nb", "/shared/#1"])
def test_slurm_is_given_no_folder_that_it_would_read_otherwise(folder: str) -> None:
    gang = Gang(least=1, most=1, num_devices=1, accelerator="")
    pool, job, place = Pool(place="slurm", name="lab"), Job(name="weft-run", run=Path(folder)), place_of("slurm")
    verdict = place.check(place.request(gang, job, pool), gang, job, pool)
    assert (verdict.accepts, "give a --run-folder without it" in verdict.text) == (False, True)


def block_of_size(size: int, level: int) -> GangBlock:
    return GangBlock(
        tier="leaf",
        level=level,
        tier_nodes=size,
        num_nodes=size,
        axes=(),
        must=False,
        whole_seconds=1.0,
        split_seconds=1.0,
        scattered_seconds=1.0,
    )


def facts_of(topology: tuple[str, ...], index: int) -> HostFacts:
    return HostFacts(
        host=f"node{index}",
        address="10.0.0.1",
        num_devices=PER_NODE,
        version="",
        recipe="",
        index=index,
        topology=topology,
    )

"""Small models and clusters, and a search that prices everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product

from weft.config.cluster import Cluster, parse_cluster_spec
from weft.config.plan import AXES, Axis
from weft.model.profile import ModelSizes, Profile, profile_of_sizes
from weft.planning.price import CostModel, check_layout
from weft.planning.search import Space
from weft.techniques.cost_terms import Layout
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, chunk_limits


def tiny(layers: int = 4, experts: int = 0, length: int = 1024) -> Profile:
    """A decoder, dense or of experts."""
    mixture = {"num_experts": experts, "top_k": 2, "expert_ffn_size": 1024} if experts else {}
    return profile_of_sizes(
        ModelSizes(
            name="tiny",
            num_layers=layers,
            hidden_size=1024,
            num_heads=8,
            num_kv_heads=4,
            ffn_size=2816,
            vocabulary_size=32_000,
            sequence_length=length,
            **mixture,
        )
    )


def cluster_of(spec: str, *, bandwidth: float = 1.0, memory: float = 1.0) -> Cluster:
    """A cluster with its links and its memory scaled."""
    whole = parse_cluster_spec(spec)
    links = tuple(
        replace(tier, bandwidth_bytes_per_second=tier.bandwidth_bytes_per_second * bandwidth) for tier in whole.links
    )
    nodes = tuple(
        replace(node, devices=replace(node.devices, memory_bytes=int(node.devices.memory_bytes * memory)))
        for node in whole.nodes
    )
    return replace(whole, nodes=nodes, links=links)


def narrow(space: Space, **changes: object) -> Space:
    """A space that is small enough to price all of it: no lesser settings but the order of the axes."""
    small = replace(
        space,
        tensor_schemes=("1d",),
        context_schemes=("ring",),
        bucket_bytes=(26_214_400,),
        offloads=("none",),
        per_block_recompute=False,
        sequence_parallels=(True,),
    )
    return replace(small, **changes)  # pyright: ignore[reportArgumentType]


def all_layouts(profile: Profile, cluster: Cluster, space: Space, batch: int, base: Layout) -> Iterator[Layout]:
    """Every layout of a space, by loops: data ranks by the space's rule, all orders of the axes."""
    for pipeline, tensor, context, expert, size in product(
        space.pipelines, space.tensors, space.contexts, space.experts, space.microbatch_sizes
    ):
        most = cluster.num_devices // (pipeline * tensor * context)
        total = batch // size
        for data in _data_ranks(most, total):
            axes = replace(
                base,
                pipeline=pipeline,
                tensor=tensor,
                context=context,
                expert=expert,
                microbatch_size=size,
                microbatches=-(-total // data),
                uneven=total % data > 0,
                sequence_parallel=tensor > 1,
            )
            for layout in _ways(space, axes, data, len(profile.blocks)):
                if not check_layout(profile, cluster, layout):
                    yield layout


def best_by_brute_force(cost_model: CostModel, space: Space, batch: int, base: Layout) -> tuple[float, int]:
    """The least step time of all layouts that fit, and how many were priced."""
    best, count = float("inf"), 0
    for layout in all_layouts(cost_model.profile, cost_model.cluster, space, batch, base):
        count += 1
        prediction = cost_model.predict(layout, exact=True)
        if prediction.fits:
            best = min(best, prediction.step_seconds)
    return best, count


def _data_ranks(most: int, total: int) -> list[int]:
    if most < 1:
        return []
    most = min(most, total)
    fewest = -(-total // -(-total // most))
    equal = max(ranks for ranks in range(1, most + 1) if total % ranks == 0)
    return sorted({most, fewest, equal})


def _ways(space: Space, layout: Layout, data: int, blocks: int) -> Iterator[Layout]:
    for zero, shard, recompute, order in product(
        space.zeros, range(1, data + 1), space.recomputes, _orders(layout, data)
    ):
        if data % shard or (zero == 3) != (shard > 1 and zero == 3) or (zero == 0 and shard > 1):
            continue
        if zero in (1, 2) and shard not in ((data,) if layout.expert > 1 else (1,)):
            continue
        if (shard * layout.context) % layout.expert:
            continue
        way = replace(layout, zero=zero, shard=shard, replicate=data // shard, recompute=recompute, order=order)
        if layout.pipeline == 1:
            yield from _reductions(way)
            continue
        for schedule in space.schedules:
            least, highest = chunk_limits(schedule)
            for chunks in range(least, min(highest or blocks, blocks // layout.pipeline) + 1):
                yield from _reductions(replace(way, schedule=schedule, chunks=chunks))


def _reductions(layout: Layout) -> Iterator[Layout]:
    """ZeRO-3 reduces gradients once per step, or where it can after every microbatch."""
    if layout.zero < 3 or layout.microbatches == 1:
        yield layout
        return
    yield replace(layout, reduce_every="step")
    splits_backward = layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD
    if not splits_backward and (layout.chunks == 1 or not layout.uneven):
        yield replace(layout, reduce_every="microbatch")


def _orders(layout: Layout, data: int) -> list[tuple[Axis, ...]]:
    """All orders of the axes that have more than one rank, expert just inside the data ranks."""
    sizes = {"pipeline": layout.pipeline, "tensor": layout.tensor, "context": layout.context}
    ranked: list[Axis] = ["pipeline", "replicate", "shard", "context", "tensor"]
    large = [axis for axis in ranked if sizes.get(axis, data) > 1]
    found: list[tuple[Axis, ...]] = []
    for order in permutations(large):
        named: list[Axis] = [*(axis for axis in ranked if axis not in order), *order]
        named.insert(max(named.index("replicate"), named.index("shard")) + 1, "expert")
        assert sorted(named) == sorted(AXES)
        found.append(tuple(named))
    return found

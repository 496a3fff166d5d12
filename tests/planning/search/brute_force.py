"""Every layout of a space by plain loops, and the least price among them: what a search must find.

Nothing of `weft.planning.search` but the space itself is used, so that the two can disagree.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations, product
from typing import NamedTuple

from weft.config.cluster import Cluster
from weft.config.plan import AXES, Axis
from weft.model.profile import Profile
from weft.planning.price import CostModel, check_layout
from weft.planning.search import Objective, Space
from weft.techniques.cost_terms import Layout
from weft.techniques.pipeline.schedules import SPLIT_BACKWARD, chunk_limits
from weft.techniques.zero.settings import ReduceEvery

RANKED: tuple[Axis, ...] = ("pipeline", "replicate", "shard", "context", "tensor")


class Best(NamedTuple):
    """The least score of all layouts that fit, the layout that has it, and how many were priced."""

    score: float
    layout: Layout | None
    count: int


def best_by_brute_force(cost_model: CostModel, layouts: list[Layout], objective: Objective | None = None) -> Best:
    """Price layouts one by one."""
    best, chosen = float("inf"), None
    for layout in layouts:
        score = score_of(cost_model, layout, objective or Objective())
        if score < best and cost_model.predict(layout).fits:
            best, chosen = score, layout
    return Best(best, chosen, len(layouts))


def score_of(cost_model: CostModel, layout: Layout, objective: Objective) -> float:
    """The score of a layout with its schedule played action by action."""
    seconds = objective.pessimistic_seconds(cost_model.step_seconds(layout, exact=True), cost_model.framework.spread)
    return objective.score(seconds, layout.world_size)


def all_layouts(
    profile: Profile, cluster: Cluster, space: Space, batch: int, *, every_data: bool = False
) -> Iterator[Layout]:
    """Every layout of a space that can be priced.

    Args:
        every_data: take every number of data ranks that the devices and the batch allow, instead of the space's rule.
    """
    for axes in _axes(cluster, space, batch, every_data):
        for sharded in _sharded(space, axes):
            for scheduled in _scheduled(space, sharded, len(profile.blocks)):
                for reduced in _reduced(space, scheduled):
                    for layout in _completed(space, reduced):
                        if not check_layout(profile, cluster, layout):
                            yield layout


def _axes(cluster: Cluster, space: Space, batch: int, every_data: bool) -> Iterator[Layout]:
    """Sizes of the axes, the batch over the data ranks, and what blocks cost; data ranks are all replicas yet."""
    for pipeline, tensor, context, expert, size in product(
        space.pipelines, space.tensors, space.contexts, space.experts, space.microbatch_sizes
    ):
        most, total = cluster.num_devices // (pipeline * tensor * context), batch // size
        if batch % size or most < 1:
            continue
        for data in _data_ranks(space, most, total, every_data):
            world = data * pipeline * tensor * context
            if (space.even_shares or expert > 1) and total % data:  # experts would wait for those who have fewer
                continue
            if space.node_size is not None and world > space.node_size and world % space.node_size:
                continue
            if space.single_microbatch and data != total:
                continue
            for precision, parallel, scheme, way, exchange in product(
                space.precisions,
                space.sequence_parallels if tensor > 1 else (False,),
                space.tensor_schemes if tensor > 1 else space.tensor_schemes[:1],
                space.context_schemes if context > 1 else ("ring",),
                space.expert_exchanges if expert > 1 else ("all_to_all",),
            ):
                element = 8 if precision == "fp64" else 4
                copies = 2 if precision in ("fp32", "tf32", "fp64") else 3
                yield Layout(
                    pipeline=pipeline, tensor=tensor, context=context, expert=expert, replicate=data,
                    microbatch_size=size, microbatches=-(-total // data), uneven=total % data > 0,
                    precision=precision, gradient_bytes=element, master_bytes=copies * element,
                    sequence_parallel=parallel, tensor_scheme=scheme, context_scheme=way,
                    expert_exchange=exchange,
                )  # fmt: skip


def _data_ranks(space: Space, most: int, total: int, every_data: bool) -> list[int]:
    most_of_all = min(most, total)
    if space.datas is not None:
        return [data for data in space.datas if data <= most_of_all]
    if every_data:
        return list(range(1, most_of_all + 1))
    found: set[int] = set()
    most = most_of_all
    while most:
        fewest = -(-total // -(-total // most))
        equal = max(ranks for ranks in range(1, most + 1) if total % ranks == 0)
        found |= {most, fewest, equal}
        most = most // 2 if space.fewer_devices else 0
    return sorted(found)


def _sharded(space: Space, layout: Layout) -> Iterator[Layout]:
    """ZeRO stages, and ranks over which ZeRO-3 shards."""
    data, context = layout.data, layout.context
    for zero in space.zeros:
        shards = [1]
        if zero in (1, 2) and layout.expert > 1:
            shards = [data]
        elif zero == 3 and data > 1:
            shards = [n for n in range(1, data + 1) if data % n == 0 and (n > 1 or context > 1)]
            if not space.replicas:
                shards = [data]
        if zero == 3 and space.shards is not None:
            shards = [n for n in shards if n in space.shards]
        for shard in shards:
            if (shard * context) % layout.expert == 0:
                yield replace(layout, zero=zero, shard=shard, replicate=data // shard)


def _scheduled(space: Space, layout: Layout, blocks: int) -> Iterator[Layout]:
    if layout.pipeline == 1:
        yield replace(layout, schedule=space.schedules[0])
        return
    for schedule in space.schedules:
        least, most = chunk_limits(schedule)
        for chunks in range(least, min(most or blocks, blocks // layout.pipeline) + 1):
            if space.chunks is None or chunks in space.chunks:
                yield replace(layout, schedule=schedule, chunks=chunks)


def _reduced(space: Space, layout: Layout) -> Iterator[Layout]:
    """ZeRO-3 reduces gradients once per step, or where it can after every microbatch."""
    splits_backward = layout.pipeline > 1 and layout.schedule in SPLIT_BACKWARD
    often = layout.pipeline == 1 or (not splits_backward and (layout.chunks == 1 or not layout.uneven))
    words: tuple[ReduceEvery, ...] = ("auto",)
    if space.reductions is not None:
        words = space.reductions
        often = often and (layout.zero == 3 or (layout.zero == 2 and layout.pipeline == 1))
    elif layout.zero == 3:
        words = ("step", "microbatch")
    for every in words:
        if every != "microbatch" or often:
            yield replace(layout, reduce_every=every)


def _completed(space: Space, layout: Layout) -> Iterator[Layout]:
    """What is computed again and offloaded, how gradients travel, and the order of the axes."""
    travels = layout.data * layout.context > 1
    firsts = space.first_bucket_bytes or (layout.first_bucket_bytes,)
    for recompute, offload, fused, bucket, compression, algorithm, order in product(
        space.recomputes,
        space.offloads,
        space.fused_losses,
        space.bucket_bytes or (layout.bucket_bytes,),
        space.compressions if travels else space.compressions[:1],
        space.algorithms if travels else space.algorithms[:1],
        _orders(space, layout),
    ):
        yield replace(
            layout, recompute=recompute, offload=offload, fused_loss=fused, bucket_bytes=bucket,
            first_bucket_bytes=firsts[0], compression=compression, algorithm=algorithm, order=order,
        )  # fmt: skip


def _orders(space: Space, layout: Layout) -> list[tuple[Axis, ...]]:
    """The given orders, or all of the axes that have more than one rank, expert just inside the data ranks."""
    if space.orders is not None:
        return list(space.orders)
    large = [axis for axis in RANKED if getattr(layout, axis) > 1]
    found: list[tuple[Axis, ...]] = []
    for order in permutations(large):
        named: list[Axis] = [*(axis for axis in RANKED if axis not in order), *order]
        named.insert(max(named.index("replicate"), named.index("shard")) + 1, "expert")
        assert sorted(named) == sorted(AXES)
        found.append(tuple(named))
    return found

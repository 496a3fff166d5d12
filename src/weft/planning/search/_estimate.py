"""Least time and memory of many layouts at once: what pricing says of equal stages, over arrays.

The same costs of blocks and collectives as in `weft.planning.price`, with stages taken for equal (but for whole
blocks), buckets that cost nothing to fill, and memory at the least that rounding may leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.config.cluster import Collective
from weft.planning.price import CostModel, RankMemory, RankShare, optimizer_seconds
from weft.planning.search._bounds import Floats
from weft.planning.search._group import GroupCosts, HeldBytes, PassSeconds
from weft.planning.search._options import Options, ShardingOption
from weft.planning.search._pipelines import StageBlocks, pipeline_seconds, stage_blocks
from weft.planning.search._space import Offload, Space
from weft.planning.search._splits import Ints
from weft.planning.search._variants import has_even_islands
from weft.techniques.buckets.cost import beside
from weft.techniques.buckets.sizes import LARGEST_BUCKET, SMALLEST_BUCKET
from weft.techniques.cost_terms import AxisGroup, BoundedCache, Layout
from weft.techniques.offload.cost import BLOCKS_HERE, unloading
from weft.techniques.offload.settings import offloads_activations
from weft.techniques.pipeline.cost import flights
from weft.techniques.zero.cost import Waits, gathers_of, gathers_weights, reduces_once, waits_of
from weft.techniques.zero.settings import stage_of

_SIZES = (float(1 << 20), float(1 << 22), float(1 << 24), float(1 << 26), float(LARGEST_BUCKET))
"""Bytes of collectives, of whose speeds the best is taken."""
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Pipeline ranks at which the need of memory is looked at, as shares of the pipeline."""


class WeightRates(NamedTuple):
    """Seconds per element of a rank's weights, of dense ones and of experts, by row."""

    reduce: Floats
    gather: Floats
    reduce_experts: Floats
    gather_experts: Floats


class RateTable:
    """Lower bounds of the seconds of collectives over data ranks, kept by what decides them."""

    def __init__(self, cost_model: CostModel, space: Space) -> None:
        self._cost_model, self._space = cost_model, space
        self._regular = cost_model.cluster.has_accelerators and has_even_islands(cost_model.cluster)
        self._island = cost_model.cluster.links[0].devices if cost_model.cluster.links else 1
        self._found = BoundedCache[tuple[object, ...], tuple[float, float, float, float]]()

    def rates(
        self, costs: GroupCosts, sharding: ShardingOption, data: Ints, block_bytes: tuple[float, float]
    ) -> WeightRates:
        """Return the rates of every row.

        Args:
            block_bytes: of the weights that ZeRO-3 gathers at once: those of a block that are no experts, and experts.
        """
        least = sharding.least if sharding.zero == 3 else data
        if self._regular and costs.bases[0].expert == 1:
            # Beyond an island, whose switch may do the sums, more ranks take no less per byte, so that powers of two
            # stand for the others.
            data, least = (np.where(ranks <= self._island, ranks, power_below(ranks)) for ranks in (data, least))
        wide = int(max(data.max(initial=0), least.max(initial=0))) + 1
        # (case, data, least) as one integer, so that each distinct triple is priced once.
        keys, rows = np.unique((costs.case * wide + data) * wide + least, return_inverse=True)
        rates = [
            self._of(
                costs.bases[int(key) // wide**2], sharding.zero, int(key) // wide % wide, int(key) % wide, *block_bytes
            )
            for key in keys
        ]
        return WeightRates(*(np.array(column)[rows] for column in zip(*rates, strict=True)))

    def _of(
        self, base: Layout, zero: int, data: int, shard: int, block_bytes: float, expert_bytes: float
    ) -> tuple[float, float, float, float]:
        axes = (base.tensor, base.context, base.expert, base.order)
        key = (*axes, base.pipeline, zero, data, shard, block_bytes * (zero == 3), expert_bytes * (zero == 3))
        rates = self._found.get(key)
        if rates is None:
            layout = replace(base, shard=shard, replicate=max(1, data // shard), zero=stage_of(zero))
            rates = self._found[key] = self._find(layout, block_bytes, expert_bytes)
        return rates

    def _find(self, layout: Layout, block_bytes: float, expert_bytes: float) -> tuple[float, float, float, float]:
        # Experts borrow of more shards than the least: of their own collectives nothing is known then.
        borrows = layout.expert_room % layout.expert == 0
        layout = layout if borrows else replace(layout, expert=1)
        cost_model, groups = self._cost_model, self._cost_model.groups(layout)
        element, gradient = float(layout.element_bytes), float(layout.gradient_bytes)
        is_whole = self._space.compressions == ("none",)  # what is sent else, and how, `weft.planning.price` knows
        if layout.shards_weights:
            if not gathers_weights(layout):
                return 0.0, 0.0, 0.0, 0.0
            dense, experts = gathers_of(block_bytes, expert_bytes, groups, cost_model.seconds)
            copied = cost_model.copied(layout)
            return (
                (dense.scatter + copied) * gradient,
                (dense.gather + copied) * element,
                (experts.scatter * borrows + copied) * gradient,
                (experts.gather * borrows + copied) * element,
            )
        gradient *= is_whole
        kind: Collective = "reduce_scatter" if layout.gathers_after_step else "all_reduce"
        sharded = element if layout.gathers_after_step else 0.0
        # What is compressed obeys no algorithm.
        by = self._space.algorithms if is_whole else (*self._space.algorithms, "auto")
        return (
            self._best(kind, groups.data, by) * gradient,
            self._best("all_gather", groups.data, by) * sharded if sharded else 0.0,
            self._best(kind, groups.expert_data, by) * gradient,
            self._best("all_gather", groups.expert_data, by) * sharded if sharded else 0.0,
        )

    def _best(self, kind: Collective, group: AxisGroup, algorithms: tuple[str, ...]) -> float:
        """Seconds per byte in the best of sizes."""
        return min(self._cost_model.seconds(kind, size, group, by) / size for size in _SIZES for by in algorithms)


def power_below(numbers: Ints) -> Ints:
    """Return the largest power of two up to each number."""
    return (1 << np.log2(np.maximum(numbers, 1)).astype(np.int64)).astype(np.int64)


class _BlockSizes(NamedTuple):
    """Sizes of one block: elements of its weights, and bytes of one microbatch, by row."""

    dense: float
    experts: float
    kept: Floats


class _EndSizes(NamedTuple):
    """Sizes of a rank besides blocks: elements of stem and tail, and bytes that these keep and that the loss takes."""

    dense: Floats | float
    kept: Floats | float
    logits: Floats | float


_NO_ENDS = _EndSizes(0.0, 0.0, 0.0)


def _table(base: Layout, space: Space, options: Options, sharding: ShardingOption) -> Layout:
    """Return the layouts of a table as one layout whose sizes are columns (`weft.vectorized`).  A setting that is
    chosen later has the value that holds the fewest bytes, so that bounds of memory stay below the truth."""
    splits = options.splits
    columns: dict[str, Any] = {
        "pipeline": splits.pipeline,
        "chunks": options.chunks,
        "replicate": splits.data // sharding.shard,
        "shard": sharding.shard,
        "microbatches": splits.microbatches,
        "uneven": splits.uneven,
    }
    return replace(
        base,
        **columns,
        zero=stage_of(sharding.zero),
        reduce_every=sharding.every,
        bucket_bytes=min((SMALLEST_BUCKET, *(space.bucket_bytes or ()))),
        compression=space.compressions[0] if len(space.compressions) == 1 else "none",
    )


class Estimates:
    """Estimates of the options of a group, each in one of its cases, that share a way of sharding."""

    def __init__(
        self,
        cost_model: CostModel,
        space: Space,
        costs: GroupCosts,
        options: Options,
        sharding: ShardingOption,
        rates: RateTable,
    ) -> None:
        self._cost_model, self._space, self._costs, self._options = cost_model, space, costs, options
        self._layout = _table(costs.bases[0], space, options, sharding)
        weights, p, blocks = costs.weights, options.splits.pipeline, len(cost_model.profile.blocks)
        # A rank has at least its even part of the blocks; only where it is alone also both ends.
        self._least_dense = weights.dense / p + np.where(p == 1, weights.stem + weights.tail, 0.0)
        self._experts = weights.experts / p
        self._trained = self._layout.trained_share
        """Share of the elements that have gradients and are stepped."""
        self._uneven = -(-blocks // p) * p / blocks
        """Blocks of the largest stage over those of the mean."""
        self._device = cost_model.device(costs.bases[0])
        self._cut: dict[int, StageBlocks] = {}
        # Nothing offloaded is a bound of all, whether the space has it or not.
        offloads: set[Offload] = {"none", *space.offloads}
        self._tables = {offload: replace(self._layout, offload=offload) for offload in offloads}
        self._memories: dict[Offload, RankMemory] = {}
        self._once = reduces_once(self._layout, cost_model.framework)
        element = self._layout.element_bytes
        dense_bytes = (weights.dense + weights.stem + weights.tail) / blocks * element
        expert_bytes = weights.experts / blocks * element
        self._rates = rates.rates(costs, sharding, options.splits.data, (dense_bytes, expert_bytes))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def seconds(self, passes: PassSeconds, *offloads: Offload, pipeline: Floats | None = None) -> Floats:
        """Return the seconds of a step, at least; of several ways of offloading, in which one may be the best.

        Args:
            pipeline: seconds of the pipeline in which nothing waits, where they are known.
        """
        none, shards_weights = np.zeros(len(self._options)), self._layout.shards_weights
        ahead, back, once = self._gathering(passes) if shards_weights else (none, none, none)
        if all(map(offloads_activations, offloads)):
            ahead, back = self._unloading(passes, ahead, back)
        if pipeline is None or shards_weights or all(map(offloads_activations, offloads)):
            args = (self._space.schedules, len(self._cost_model.profile.blocks), self._costs.hop, self._options, passes)
            pipeline = pipeline_seconds(*args, ahead + back, self._stages(passes))
        # The minimum over offloads of each term is below every single offload's sum.
        optimizer = np.minimum.reduce([self._optimizer(offload) for offload in offloads])
        step = pipeline + once + self._reductions(passes, ahead, back) + optimizer
        worlds, rows = np.unique(self._options.splits.world, return_inverse=True)
        slowdown = np.array([self._cost_model.slowdown(int(world)) for world in worlds])[rows]
        return step * slowdown + self._cost_model.calibration.step_seconds

    def _gathering(self, passes: PassSeconds) -> Waits:
        """Return the seconds that ZeRO-3's collectives of one microbatch add to one rank's passes."""
        p = self._options.splits.pipeline
        sent = self._least_dense * self._rates.gather + self._experts * self._rates.gather_experts
        scattered = self._least_dense * self._rates.reduce + self._experts * self._rates.reduce_experts
        forward, backward = passes.forward / p, (passes.input + passes.weight) / p
        return waits_of(sent, scattered * self._trained, forward, backward, once=self._once, **self._cost_model.hiding)

    def _unloading(self, passes: PassSeconds, ahead: Floats, back: Floats) -> tuple[Floats, Floats]:
        """Return the same waits with activations on their way to host memory and back."""
        p, calibration = self._options.splits.pipeline, self._cost_model.calibration
        moved, forward, inputs = self._costs.moved / p, passes.forward / p + ahead, passes.input / p + back
        args = self._layout, moved
        return ahead + unloading(*args, forward, calibration), back + unloading(*args, inputs, calibration)

    def _reductions(self, passes: PassSeconds, ahead: Floats, back: Floats) -> Floats:
        """Exposed seconds of reducing gradients, and of gathering renewed weights; they also hide beside what a forward
        and a backward wait for."""
        p, rates, framework, layout = (
            self._options.splits.pipeline,
            self._rates,
            self._cost_model.framework,
            self._layout,
        )
        overlap = self._cost_model.calibration.overlap_share
        # Without the time at which buckets become ready: what is exposed is at least what no window of compute can
        # hide.
        whole = self._trained * (self._experts * rates.reduce_experts + self._least_dense * rates.reduce)
        # What ZeRO-3 sends, microbatches wait for; its copies' sum is left out.
        whole = whole * (not layout.shards_weights)
        times = np.where(self._once, 1, layout.microbatches) if layout.shards_gradients_alone else 1
        window = overlap * ((passes.input + passes.weight) / p + back) * self._uneven * framework.overlap_gradients
        # The bucket that comes last is waited for in the last microbatch alone, which makes that one no shorter.
        exposed = self._beside(whole, window) + (times - 1) * self._beside(whole * (1.0 - self._last_share), window)
        if layout.gathers_after_step:
            publish = self._trained * (self._least_dense * rates.gather + self._experts * rates.gather_experts)
            exposed = exposed + self._beside(
                publish, overlap * (passes.forward / p + ahead) * self._uneven * framework.overlap_parameters
            )
        return exposed.astype(np.float64)

    @property
    def _last_share(self) -> Floats:
        """Share of a rank's gradients that may travel in the last bucket."""
        largest = max(self._space.bucket_bytes or (), default=LARGEST_BUCKET)
        # At most one chunk's gradients, or one bucket of the largest size, are left when the backward ends.
        each = self._layout.gradient_bytes * self._trained
        sizes = [part * each for part in (self._least_dense, self._experts) if np.any(part)]
        return np.minimum(1.0 / self._options.chunks, largest / np.maximum(np.minimum.reduce(sizes), 1.0))

    def _beside(self, whole: Floats, window: Floats) -> Floats:
        """Return the seconds that no window hides, and those by which the rest slows computation down."""
        exposed, hidden = beside(self._layout, whole, window)
        return exposed + (self._cost_model.calibration.overlap_slowdown - 1.0) * hidden

    def _optimizer(self, offload: Offload) -> Floats:
        if self._device.speeds:  # as measured, which no column is looked up in
            return np.zeros(len(self._options))
        dense, experts = self._least_dense * self._trained, self._experts * self._trained
        worked, moved = optimizer_seconds(self._tables[offload], dense, experts, self._device)
        return worked + moved

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def device_bytes(self, held: HeldBytes, passes: PassSeconds, offload: Offload) -> Floats:
        """Return the bytes of the fullest rank, at least: of the first, the last, and the first of those between that
        have the most blocks."""
        options, p = self._options, self._options.splits.pipeline
        blocks, weights = len(self._cost_model.profile.blocks), self._costs.weights
        stages, joined, alone = self._stages(passes), options.joined_ends, p == 1
        least = _BlockSizes(weights.least_dense, weights.least_experts, held.least)
        mean = _BlockSizes(weights.dense / blocks, weights.experts / blocks, held.kept / blocks)
        one, logits = np.full(len(p), float(blocks)), self._costs.logits
        ends = weights.stem + np.where(joined, weights.tail, 0.0)
        first = _EndSizes(ends, held.stem + np.where(joined, held.tail, 0.0), np.where(joined, logits, 0.0))
        last = _EndSizes(
            np.where(joined, 0.0, weights.tail), np.where(joined, 0.0, held.tail), np.where(joined, 0.0, logits)
        )
        memory = self._memory(offload)
        whole = memory.device_bytes(self._share(mean, one, one, first, held.live, offload))
        # Under 1F1B the first rank holds the most microbatches, the last the loss; of equal ranks between them the
        # first holds the most.
        of_first = self._share(least, stages.first_rank, self._first_waiting(stages), first, held.live, offload)
        flight, least_flight = self._flights(p - 1)
        waiting = np.where(joined, (flight + least_flight) * stages.first, least_flight * stages.last_rank)
        of_last = self._share(least, stages.last_rank, waiting, last, held.live, offload)
        between = self._between(stages, mean, passes, held.live, offload)
        fullest = np.maximum(np.maximum(memory.device_bytes(of_first), memory.device_bytes(of_last)), between)
        return np.where(alone, whole, fullest)

    def _first_waiting(self, stages: StageBlocks) -> Floats:
        """Blocks of the first rank times the microbatches whose activations they keep."""
        options = self._options
        flight, least = self._flights(np.zeros_like(options.chunks))
        folded = flight * stages.first + least * stages.last
        evenly = options.chunks * stages.first
        return np.where(options.joined_ends, folded, flight * evenly + least * (stages.first_rank - evenly))

    def _between(
        self, stages: StageBlocks, block: _BlockSizes, passes: PassSeconds, live: Floats, offload: Offload
    ) -> Floats:
        """Bytes of the fullest of the ranks between; where blocks differ, of ranks in the mean."""
        options, p, v = self._options, self._options.splits.pipeline, self._options.chunks
        each = len(self._cost_model.profile.blocks) / p
        fewest = np.where(options.joined_ends, options.flight, options.last_flight)
        mean = self._share(block, each, each * fewest, _NO_ENDS, live, offload)
        folds = options.joined_ends
        flight, least = self._flights(np.minimum(stages.full_rank, p - 1))
        evenly = np.where(folds, 2, v) * stages.first
        both = stages.more > 1  # folded: one more on either stage
        folded = flight * (stages.first + both) + least * (stages.first + (stages.more > 0))
        waiting = np.where(folds, folded, flight * evenly + least * stages.more)
        fullest = self._share(block, evenly + stages.more, waiting, _NO_ENDS, live, offload)
        memory = self._memory(offload)
        return np.where(passes.alike, memory.device_bytes(fullest), memory.device_bytes(mean))

    def _stages(self, passes: PassSeconds) -> StageBlocks:
        if id(passes) not in self._cut:
            self._cut[id(passes)] = stage_blocks(len(self._cost_model.profile.blocks), self._options, passes)
        return self._cut[id(passes)]

    def _flights(self, rank: Ints) -> tuple[Floats, Floats]:
        """`flights`, by row."""
        options, splits = self._options, self._options.splits
        in_flight = np.ones((2, len(rank)))
        for index, name in enumerate(self._space.schedules):
            here = (options.schedule == index) & (splits.pipeline > 1)
            if here.any():
                columns = (splits.pipeline, options.chunks, splits.microbatches, rank)
                in_flight[:, here] = flights(name, *(column[here] for column in columns))
        return in_flight[0], in_flight[1]

    def _share(
        self, block: _BlockSizes, count: Floats, waiting: Floats, ends: _EndSizes, live: Floats, offload: Offload
    ) -> RankShare:
        """Return a rank's sizes of `count` blocks and of the ends. `waiting` of the blocks wait for their backward
        (`BLOCKS_HERE`, where they wait elsewhere)."""
        waiting = np.minimum(waiting, BLOCKS_HERE) if offloads_activations(offload) else waiting
        return RankShare(
            dense=block.dense * count + ends.dense,
            experts=block.experts * count,
            waiting=block.kept * waiting + ends.kept,
            live=live,
            logits=ends.logits,
            widest=self._costs.weights.widest,
        )

    def _memory(self, offload: Offload) -> RankMemory:
        if offload not in self._memories:
            self._memories[offload] = self._cost_model.memories.of_ranks(self._tables[offload])
        return self._memories[offload]

    def least_share(self, light: HeldBytes, heavy: HeldBytes, need: Floats, usable: float) -> Floats:
        """Return the share of all blocks that must be computed again like `heavy` so that every rank fits: later ranks
        hold fewer microbatches."""
        options, p = self._options, self._options.splits.pipeline
        reserved = self._memory(self._space.offloads[0]).reserved
        saved = (light.kept - heavy.kept) / p * options.flight * reserved
        fewer = light.kept / p * np.maximum(options.flight - options.last_flight, 0.0) * reserved
        over = [np.clip((need - usable - fewer * part) / np.maximum(saved, 1.0), 0.0, 1.0) for part in _QUANTILES]
        return np.where(p > 1, sum(over) / len(over), over[0])

"""Least time and memory of many layouts at once: what pricing says of equal stages, over arrays.

The same costs of blocks and collectives as in `weft.price`, with stages taken for equal (but for whole blocks), buckets
that cost nothing to fill, and memory at the least that rounding may leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.cluster import Collective
from weft.price import (
    LARGEST_BUCKET,
    PROCESS_BYTES,
    SMALLEST_BUCKET,
    AxisGroup,
    BoundedCache,
    Gathers,
    Layout,
    Pricer,
    activation_bytes,
)
from weft.search._bounds import Floats
from weft.search._group import GroupCosts, HeldBytes, Passes
from weft.search._options import Options, Way, flights
from weft.search._pipelines import StageBlocks, pipeline_seconds, stage_blocks
from weft.search._space import Offload, Space
from weft.search._splits import Bools, Ints
from weft.search._variants import has_even_islands
from weft.techniques.zero.contract import shares_of, stage_of

_SIZES = (float(1 << 20), float(1 << 22), float(1 << 24), float(1 << 26), float(LARGEST_BUCKET))
"""Bytes of collectives, of whose speeds the best is taken."""
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Pipeline ranks at which the need of memory is looked at, as shares of the pipeline."""


class Rates(NamedTuple):
    """Seconds per element of a rank's weights, of dense ones and of experts, by row."""

    reduce: Floats
    gather: Floats
    reduce_experts: Floats
    gather_experts: Floats


class RateTable:
    """What the collectives over data ranks take at least, by what decides it."""

    def __init__(self, pricer: Pricer, space: Space) -> None:
        self._pricer, self._space = pricer, space
        self._regular = pricer.cluster.has_accelerators and has_even_islands(pricer.cluster)
        self._island = pricer.cluster.links[0].devices if pricer.cluster.links else 1
        self._found = BoundedCache[tuple[object, ...], tuple[float, float, float, float]]()

    def rates(self, costs: GroupCosts, way: Way, data: Ints, block_bytes: tuple[float, float]) -> Rates:
        """Return the rates of every row.

        Args:
            block_bytes: of the weights that ZeRO-3 gathers at once: those of a block that are no experts, and experts.
        """
        least = way.least if way.zero == 3 else data
        if self._regular and costs.bases[0].expert == 1:
            # Beyond an island, whose switch may do the sums, more ranks take no less per byte, so that powers of two
            # stand for the others.
            data, least = (np.where(ranks <= self._island, ranks, power_below(ranks)) for ranks in (data, least))
        wide = int(max(data.max(initial=0), least.max(initial=0))) + 1
        keys, rows = np.unique((costs.case * wide + data) * wide + least, return_inverse=True)
        found = [
            self._of(costs.bases[int(key) // wide**2], way.zero, int(key) // wide % wide, int(key) % wide, *block_bytes)
            for key in keys
        ]
        return Rates(*(np.array(column)[rows] for column in zip(*found, strict=True)))

    def _of(
        self, base: Layout, zero: int, data: int, shard: int, block_bytes: float, expert_bytes: float
    ) -> tuple[float, float, float, float]:
        axes = (base.tensor, base.context, base.expert, base.order)
        key = (*axes, base.pipeline, zero, data, shard, block_bytes * (zero == 3), expert_bytes * (zero == 3))
        found = self._found.get(key)
        if found is None:
            layout = replace(base, shard=shard, replicate=max(1, data // shard), zero=stage_of(zero))
            found = self._found[key] = self._find(layout, block_bytes, expert_bytes)
        return found

    def _find(self, layout: Layout, block_bytes: float, expert_bytes: float) -> tuple[float, float, float, float]:
        # Experts borrow of more shards than the least: of their own collectives nothing is known then.
        borrows = layout.expert_room % layout.expert == 0
        layout = layout if borrows else replace(layout, expert=1)
        pricer, zero, groups = self._pricer, layout.zero, self._pricer.groups(layout)
        element, gradient = float(activation_bytes(layout.precision)), float(layout.gradient_bytes)
        is_whole = self._space.compressions == ("none",)  # what is sent else, and how, `weft.price` knows
        if zero == 3:
            if layout.shard * layout.context == 1:
                return 0.0, 0.0, 0.0, 0.0
            dense, experts = (
                Gathers.of(size, group, pricer.seconds)
                for size, group in zip((block_bytes, expert_bytes), (groups.shard, groups.expert_shard), strict=True)
            )
            # See `Pricer`.
            copied = 0.0 if pricer.cluster.has_accelerators else 2.0 / pricer.device(layout).memory_bytes_per_second
            return (
                (dense.scatter + copied) * gradient,
                (dense.gather + copied) * element,
                (experts.scatter * borrows + copied) * gradient,
                (experts.gather * borrows + copied) * element,
            )
        gradient *= is_whole
        kind: Collective = "all_reduce" if zero == 0 else "reduce_scatter"
        # What is compressed obeys no algorithm.
        sharded, by = (
            element if zero else 0.0,
            self._space.algorithms if is_whole else (*self._space.algorithms, "auto"),
        )
        return (
            self._best(kind, groups.data, by) * gradient,
            self._best("all_gather", groups.data, by) * sharded if sharded else 0.0,
            self._best(kind, groups.expert_data, by) * gradient,
            self._best("all_gather", groups.expert_data, by) * sharded if sharded else 0.0,
        )

    def _best(self, kind: Collective, group: AxisGroup, algorithms: tuple[str, ...]) -> float:
        """Seconds per byte in the best of sizes."""
        return min(self._pricer.seconds(kind, size, group, by) / size for size in _SIZES for by in algorithms)


def power_below(numbers: Ints) -> Ints:
    """Return the largest power of two up to each number."""
    return (1 << np.log2(np.maximum(numbers, 1)).astype(np.int64)).astype(np.int64)


class _Block(NamedTuple):
    """What one block holds: elements of its weights, and bytes of one microbatch, by row."""

    dense: float
    experts: float
    kept: Floats


class Estimates:
    """Of options of a group, each in one of its cases, that share a way of sharding."""

    def __init__(
        self,
        pricer: Pricer,
        space: Space,
        costs: GroupCosts,
        options: Options,
        way: Way,
        rates: RateTable,
    ) -> None:
        self._pricer, self._space, self._costs, self._options = pricer, space, costs, options
        zero, shard = self._zero, self._shard = way.zero, way.shard
        splits = options.splits
        self._ranks = splits.data * splits.context
        self._shards = np.ones_like(shard) if zero == 0 else self._ranks if zero < 3 else shard * splits.context
        self._expert_shards = np.maximum(1, self._shards * (splits.tensor if zero else 1) // splits.expert)
        weights, p, blocks = costs.weights, splits.pipeline, len(pricer.profile.blocks)
        self._least_dense = weights.dense / p + np.where(p == 1, weights.stem + weights.tail, 0.0)
        self._experts = weights.experts / p
        self._uneven = -(-blocks // p) * p / blocks
        """Blocks of the largest stage over those of the mean."""
        self._device = pricer.device(costs.bases[0])
        base = costs.bases[0]
        self._element = float(activation_bytes(base.precision))
        self._gradient, self._master = float(base.gradient_bytes), float(base.master_bytes)
        self._cut: dict[int, StageBlocks] = {}
        self._once = self._reduces_once(way)
        self._waiting = self._whole_gradients()
        dense_bytes = (weights.dense + weights.stem + weights.tail) / blocks * self._element
        expert_bytes = weights.experts / blocks * self._element
        self._rates = rates.rates(costs, way, splits.data, (dense_bytes, expert_bytes))

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def seconds(self, passes: Passes, *offloads: Offload, pipeline: Floats | None = None) -> Floats:
        """Return the seconds of a step, at least; of several ways of offloading, in which one may be the best.

        Args:
            pipeline: seconds of the pipeline in which nothing waits, where they are known.
        """
        none = np.zeros(len(self._options))
        ahead, back, once = self._gathering(passes) if self._zero == 3 else (none, none, none)
        if offloads == ("activations",):
            ahead, back = self._unloading(passes, ahead, back)
        if pipeline is None or self._zero == 3 or offloads == ("activations",):
            args = (self._space.schedules, len(self._pricer.profile.blocks), self._costs.hop, self._options, passes)
            pipeline = pipeline_seconds(*args, ahead + back, self._stages(passes))
        optimizer = np.minimum.reduce([self._optimizer(offload) for offload in offloads])
        step = pipeline + once + self._reductions(passes, ahead, back) + optimizer
        worlds, rows = np.unique(self._options.splits.world, return_inverse=True)
        slowdown = np.array([self._pricer.slowdown(int(world)) for world in worlds])[rows]
        return step * slowdown + self._pricer.calibration.step_seconds

    def _gathering(self, passes: Passes) -> tuple[Floats, Floats, Floats]:
        """Exposed seconds of ZeRO-3's collectives of one microbatch on one rank, forward and backward; and what a
        reduction once per step adds to it."""
        p = self._options.splits.pipeline
        sent = self._least_dense * self._rates.gather + self._experts * self._rates.gather_experts
        scattered = self._least_dense * self._rates.reduce + self._experts * self._rates.reduce_experts
        forward, backward = passes.forward / p, (passes.input + passes.weight) / p
        reducing = self._exposed(sent + scattered, backward)
        back = np.where(self._once, self._exposed(sent, backward), reducing)
        return self._exposed(sent, forward), back, np.maximum(0.0, reducing - back)

    def _exposed(self, sent: Floats, beside: Floats) -> Floats:
        """`Pricer`'s sum of what waits and of what slows the computation down, over arrays."""
        calibration = self._pricer.calibration
        overlaps = self._pricer.stack.overlap_parameters and self._pricer.cluster.has_accelerators
        hidden = np.minimum(sent, calibration.overlap_share * beside) if overlaps else np.zeros_like(sent)
        return sent - hidden + (calibration.overlap_slowdown - 1.0) * hidden

    def _unloading(self, passes: Passes, ahead: Floats, back: Floats) -> tuple[Floats, Floats]:
        """Exposed seconds of one microbatch on one rank, forward and backward, with activations on their way to host
        memory and back; they also hide beside the waits for weights."""
        p = self._options.splits.pipeline
        moved = self._costs.moved / self._pricer.calibration.host_link_bytes_per_second
        return np.maximum(ahead, (moved - passes.forward) / p), np.maximum(back, (moved - passes.input) / p)

    def _reductions(self, passes: Passes, ahead: Floats, back: Floats) -> Floats:
        """Exposed seconds of reducing gradients, and of gathering renewed weights; they also hide beside what a forward
        and a backward wait for."""
        p, rates, stack = self._options.splits.pipeline, self._rates, self._pricer.stack
        overlap = self._pricer.calibration.overlap_share
        whole = self._experts * rates.reduce_experts + self._least_dense * rates.reduce
        whole = whole * (self._zero < 3)  # what ZeRO-3 sends, microbatches wait for; its copies' sum is left out
        times = np.where(self._once, 1, self._options.splits.microbatches) if self._zero == 2 else 1
        window = overlap * ((passes.input + passes.weight) / p + back) * self._uneven * stack.overlap_gradients
        # The bucket that comes last is waited for in the last microbatch alone, which makes that one no shorter.
        exposed = self._beside(whole, window) + (times - 1) * self._beside(whole * (1.0 - self._last_share), window)
        if self._zero in (1, 2):
            publish = self._least_dense * rates.gather + self._experts * rates.gather_experts
            exposed = exposed + self._beside(
                publish, overlap * (passes.forward / p + ahead) * self._uneven * stack.overlap_parameters
            )
        return exposed.astype(np.float64)

    @property
    def _last_share(self) -> Floats:
        """Share of a rank's gradients that may travel in the last bucket."""
        largest = max(self._space.bucket_bytes or (), default=LARGEST_BUCKET)
        sizes = [part * self._gradient for part in (self._least_dense, self._experts) if np.any(part)]
        return np.minimum(1.0 / self._options.chunks, largest / np.maximum(np.minimum.reduce(sizes), 1.0))

    def _beside(self, whole: Floats, window: Floats) -> Floats:
        """What no window hides, and what the rest slows down: see `weft.price._update`."""
        splits, chunks = self._options.splits, self._options.chunks
        wide = window * (1.0 + (np.minimum(splits.pipeline, splits.microbatches) - 1) * (chunks - 1) / chunks)
        exposed = np.maximum(0.0, np.maximum(whole - wide, (whole - window) / chunks))
        return exposed + (self._pricer.calibration.overlap_slowdown - 1.0) * (whole - exposed)

    def _optimizer(self, offload: Offload) -> Floats:
        device = self._device
        mine = self._least_dense / self._shards + self._experts / self._expert_shards
        if offload == "optimizer":
            calibration = self._pricer.calibration
            moved = (self._gradient + self._element) / calibration.host_link_bytes_per_second
            return mine * (moved + 2.0 * self._master / calibration.host_optimizer_bytes_per_second)
        if device.speeds:  # measured: see `weft.price._update`
            return np.zeros_like(mine)
        held = np.where(self._waiting | (self._zero < 2), self._least_dense + self._experts, mine)
        touched = mine * (2.0 * self._gradient + 2.0 * self._master + self._element) + held * self._gradient
        return touched / device.memory_bytes_per_second

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def device_bytes(self, held: HeldBytes, passes: Passes, offload: Offload) -> Floats:
        """Return the bytes of the fullest rank, at least: of the first, the last, and the first of those between that
        have the most blocks."""
        options, p = self._options, self._options.splits.pipeline
        blocks, weights = len(self._pricer.profile.blocks), self._costs.weights
        stages, joined, alone = self._stages(passes), options.joined_ends, p == 1
        least = _Block(weights.least_dense, weights.least_experts, held.least)
        mean = _Block(weights.dense / blocks, weights.experts / blocks, held.kept / blocks)
        loss = np.maximum(held.live, self._costs.logits) + held.tail
        ends = weights.stem + np.where(joined, weights.tail, 0.0)
        tail = np.where(joined, 0.0, weights.tail)
        one = np.full(len(p), float(blocks))
        whole = self._rank_bytes(mean, one, one, one, ends, offload)
        first = self._rank_bytes(least, stages.first_rank, *self._first_waiting(stages), ends, offload)
        first = np.where(alone, whole, first) + held.stem + np.where(joined, loss, held.live)
        flight, least_flight = self._flights(p - 1)
        waiting = np.where(joined, (flight + least_flight) * stages.first, least_flight * stages.last_rank)
        stage = np.where(joined, stages.first, np.minimum(stages.first, stages.last))
        last = self._rank_bytes(least, stages.last_rank, waiting, stage, tail, offload)
        last = last + np.where(joined, held.live, loss)
        between = self._between(stages, mean, passes, offload) + held.live
        return self._outside(np.where(alone, first, np.maximum(np.maximum(first, last), between)) + self._workspace)

    def _first_waiting(self, stages: StageBlocks) -> tuple[Floats, Floats]:
        """Blocks of the first rank times the microbatches whose activations they keep; and blocks of one stage."""
        options = self._options
        flight, least = self._flights(np.zeros_like(options.chunks))
        folded = flight * stages.first + least * stages.last
        evenly = options.chunks * stages.first
        waiting = np.where(options.joined_ends, folded, flight * evenly + least * (stages.first_rank - evenly))
        return waiting, stages.first

    def _between(self, stages: StageBlocks, block: _Block, passes: Passes, offload: Offload) -> Floats:
        """Bytes of the fullest of the ranks between; where blocks differ, of ranks in the mean."""
        options, p, v = self._options, self._options.splits.pipeline, self._options.chunks
        none = np.zeros(len(p))
        each = len(self._pricer.profile.blocks) / p
        fewest = np.where(options.joined_ends, options.flight, options.last_flight)
        mean = self._rank_bytes(block, each, each * fewest, each / v, none, offload)
        folds = options.joined_ends
        flight, least = self._flights(np.minimum(stages.full_rank, p - 1))
        evenly = np.where(folds, 2, v) * stages.first
        both = stages.more > 1  # folded: one more on either stage
        folded = flight * (stages.first + both) + least * (stages.first + (stages.more > 0))
        waiting = np.where(folds, folded, flight * evenly + least * stages.more)
        fullest = self._rank_bytes(block, evenly + stages.more, waiting, stages.first, none, offload)
        return np.where(passes.alike, fullest, mean)

    def _stages(self, passes: Passes) -> StageBlocks:
        if id(passes) not in self._cut:
            self._cut[id(passes)] = stage_blocks(len(self._pricer.profile.blocks), self._options, passes)
        return self._cut[id(passes)]

    def _flights(self, rank: Ints) -> tuple[Floats, Floats]:
        """`flights`, by row."""
        options, splits = self._options, self._options.splits
        found = np.ones((2, len(rank)))
        for index, name in enumerate(self._space.schedules):
            here = (options.schedule == index) & (splits.pipeline > 1)
            if here.any():
                columns = (splits.pipeline, options.chunks, splits.microbatches, rank)
                found[:, here] = flights(name, *(column[here] for column in columns))
        return found[0], found[1]

    def _rank_bytes(
        self,
        block: _Block,
        count: Floats,
        waiting: Floats,
        stage: Floats,
        ends: Floats,
        offload: Offload,
    ) -> Floats:
        """Bytes of `count` blocks and the ends' weights: model states, what they travel in, and activations of the
        `waiting` ones; offloaded, of two microbatches of a `stage`'s."""
        dense, experts = block.dense * count + ends, block.experts * count
        waiting = np.minimum(waiting, 2.0 * stage) if offload == "activations" else waiting
        return self._states(dense, experts, offload) + self._buffers(dense + experts) + block.kept * waiting

    def least_share(self, light: HeldBytes, heavy: HeldBytes, need: Floats, usable: float) -> Floats:
        """Return the share of all blocks that must be computed again like `heavy` so that every rank fits: later ranks
        hold fewer microbatches."""
        options, p = self._options, self._options.splits.pipeline
        saved = (light.kept - heavy.kept) / p * options.flight * self._fragmented
        fewer = light.kept / p * np.maximum(options.flight - options.last_flight, 0.0) * self._fragmented
        over = [np.clip((need - usable - fewer * part) / np.maximum(saved, 1.0), 0.0, 1.0) for part in _QUANTILES]
        return np.where(p > 1, sum(over) / len(over), over[0])

    def _states(self, dense: Floats, experts: Floats, offload: Offload) -> Floats:
        return dense * self._state_bytes(self._shards, offload) + experts * self._state_bytes(
            self._expert_shards, offload
        )

    def _state_bytes(self, shards: Ints, offload: Offload) -> Floats:
        kept, master = shares_of(self._zero, shards), 0.0 if offload == "optimizer" else self._master
        gradients = np.where(self._waiting, 1.0, kept.gradients)
        return self._element * kept.weights + self._gradient * gradients + master * kept.states

    def _whole_gradients(self) -> Bools:
        """Whether gradients stay whole until the step's last microbatch (`weft.price.holds_whole_gradients`)."""
        splits = self._options.splits
        several = splits.microbatches > 1
        return (self._zero >= 2) & np.where(self._once, (splits.pipeline > 1) | several, splits.uneven & several)

    def _reduces_once(self, way: Way) -> Bools:
        """`weft.price.reduces_once`, by row."""
        pipeline = self._options.splits.pipeline
        if way.every != "auto":
            return np.full(len(pipeline), way.every == "step")
        return (pipeline > 1) & self._pricer.stack.memory.accumulates_whole | (way.zero < 2)

    @property
    def _workspace(self) -> float:
        return self._pricer.stack.memory.workspace_bytes if self._pricer.memories.on_accelerator else 0.0

    def _buffers(self, held: Floats) -> Floats:
        """Bytes in which a rank with so many elements of weights gathers them and sends gradients."""
        habits = self._pricer.stack.memory
        if self._zero != 3:
            return np.where(self._ranks > 1, habits.bucket_copies * SMALLEST_BUCKET, 0.0)
        wide = self._costs.weights.widest
        size = habits.gathered_blocks * wide * self._element
        holds = ((self._options.splits.pipeline > 1) | self._options.splits.uneven) & habits.holds_gathered
        ends = (self._costs.weights.stem + self._costs.weights.tail) * self._element * habits.gathers_ends
        summed = wide * (self._element + (self._gradient if self._gradient > self._element else 0.0))
        size = np.where(holds, held * self._element, size + ends) + np.where(self._waiting, 0.0, summed)
        return np.where(self._shards > 1, size, 0.0)

    @property
    def _fragmented(self) -> float:
        return 1.0 + self._pricer.stack.memory.fragmentation if self._pricer.memories.on_accelerator else 1.0

    def _outside(self, allocated: Floats) -> Floats:
        if not self._pricer.memories.on_accelerator:
            return allocated + PROCESS_BYTES
        habits, splits = self._pricer.stack.memory, self._options.splits
        axes = (splits.data, splits.tensor, splits.pipeline, splits.context, splits.expert)
        groups = sum((axis > 1).astype(float) for axis in axes)
        return allocated * self._fragmented + habits.context_bytes + groups * habits.communicator_bytes

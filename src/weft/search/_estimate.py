"""Time and memory of many layouts at once: what pricing says of equal stages, over arrays.

The same costs of blocks and collectives as in `weft.price`, with stages taken for equal, reductions at the speed of one
usual group of data ranks and in the best of buckets, and memory at the least that rounding may leave.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.cluster import Collective
from weft.plan import SPLIT_BACKWARD, Schedule
from weft.price import LARGEST_BUCKET, PROCESS_BYTES, SMALLEST_BUCKET, Group, Groups, Layout, Pricer
from weft.search._bounds import Floats
from weft.search._group import GroupCosts, Held, Passes
from weft.search._options import Options
from weft.search._space import Offload
from weft.search._splits import Bools, Ints

_SIZES = (float(1 << 22), float(1 << 26), float(LARGEST_BUCKET))
"""Bytes of collectives, of whose speeds the best is taken."""
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Pipeline ranks at which the need of memory is looked at, as shares of the pipeline."""


def pipeline_seconds(
    schedules: tuple[Schedule, ...], blocks: int, hop: float, options: Options, passes: Passes, waits: Floats | float
) -> Floats:
    """Return seconds from the first forward to the last backward (`weft.price.closed_form` of equal stages).

    Args:
        hop: seconds from a stage to the next.
        waits: seconds that every rank waits in each microbatch besides.
    """
    p, v, m = options.splits.pipeline, options.chunks, options.splits.microbatches
    whole = passes.whole + waits * p
    hop_here = np.where(p > 1, hop, 0.0)
    slowest = np.maximum(whole / p, -(-blocks // p) * passes.least_block)
    hops = 2.0 * (p * v - 1) * hop_here
    plain = whole + hops + (m - 1) * np.maximum(slowest, whole / p + 2.0 * hop_here * (p - 1) / p)
    # Fewer microbatches than ranks leave gaps that the closed form does not know.
    chunked = np.maximum(m, p) * slowest + _waits(schedules, options, passes) + hops
    is_plain = np.isin(options.schedule, [i for i, name in enumerate(schedules) if name in ("1f1b", "gpipe")])
    return np.where(is_plain | (p == 1), plain, chunked)


def _waits(schedules: tuple[Schedule, ...], options: Options, passes: Passes) -> Floats:
    """The bubbles of `weft.plan.bubble_seconds`."""
    p = options.splits.pipeline
    stages = p * options.chunks
    forward, inputs, weight = (part / stages for part in (passes.forward, passes.input, passes.weight))
    waits = (p - 1) * (forward + inputs + weight)
    for index, name in enumerate(schedules):
        if name == "zbv":
            split = (p - 1) * np.maximum(np.maximum(forward, inputs), weight)
        elif name in SPLIT_BACKWARD:
            split = (p - 1) * np.maximum(0.0, forward + inputs - weight)
        else:
            continue
        waits = np.where(options.schedule == index, split, waits)
    return waits


class Rates(NamedTuple):
    """Seconds per element of a rank's weights, of dense ones and of experts."""

    reduce: float
    gather: float
    reduce_experts: float
    gather_experts: float


class Estimates:
    """Of options that share a group's costs and a way of sharding."""

    def __init__(
        self,
        pricer: Pricer,
        schedules: tuple[Schedule, ...],
        costs: GroupCosts,
        options: Options,
        zero: int,
        shard: Ints,
        rates: Rates | None = None,
    ) -> None:
        """`rates` are those of other estimates of the same group and way of sharding."""
        self._pricer, self._schedules, self._costs, self._options = pricer, schedules, costs, options
        self._zero, self._shard = zero, shard
        splits = options.splits
        self._ranks = splits.data * splits.context
        self._shards = np.ones_like(shard) if zero == 0 else self._ranks if zero < 3 else shard * splits.context
        self._expert_shards = np.maximum(1, self._shards * (splits.tensor if zero else 1) // splits.expert)
        weights, p = costs.weights, splits.pipeline
        self._dense = weights.dense / p + np.where(options.joined_ends, weights.stem + weights.tail, weights.stem)
        self._last_dense = weights.dense / p + np.where(options.joined_ends, weights.stem + weights.tail, weights.tail)
        self._experts = weights.experts / p
        blocks = len(pricer.profile.blocks)
        self._least_dense = weights.dense / p
        self._uneven = -(-blocks // p) * p / blocks
        """Blocks of the largest stage over those of the mean."""
        self._device = pricer.device(costs.base)
        element = {"fp64": 8, "fp32": 4, "tf32": 4}.get(costs.base.precision, 2)
        self._element, self._gradient = float(element), float(costs.base.gradient_bytes)
        self._waiting = self._whole_gradients()
        self.rates = rates or self._find_rates()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def seconds(self, passes: Passes, held: Held, offload: Offload) -> Floats:
        """Return the seconds of a step."""
        none = np.zeros(len(self._options))
        ahead, back = self._gathering(passes) if self._zero == 3 else (none, none)
        waits = ahead + back
        if offload == "activations":
            waits = waits + self._unloading(passes, held, ahead, back)
        blocks = len(self._pricer.profile.blocks)
        pipeline = pipeline_seconds(self._schedules, blocks, self._costs.hop, self._options, passes, waits)
        step = pipeline + self._reductions(passes) + self._optimizer(offload)
        calibration, stack = self._pricer.calibration, self._pricer.stack
        return step * stack.slowdown + calibration.step_seconds

    def _find_rates(self) -> Rates:
        data = self._options.splits.data
        row = int(np.argsort(data, kind="stable")[len(data) // 2])
        shard = int(self._shard[row]) if self._zero == 3 else int(data[row])
        layout = replace(self._costs.base, pipeline=1, shard=shard, replicate=1, zero=self._zero)
        return self._rates_of(self._pricer.groups(layout), shard)

    def _rates_of(self, groups: Groups, data: int) -> Rates:
        def best(kind: Collective, group: Group) -> float:
            by = self._costs.base.reduced_by if self._zero < 3 else "auto"
            return min(self._pricer.seconds(kind, size, group, by) / size for size in _SIZES)

        if self._zero == 3:
            gather, scatter = best("all_gather", groups.shard), best("reduce_scatter", groups.shard)
            if not self._pricer.cluster.has_accelerators and data > 1:  # see `Pricer`
                gather += 2.0 / self._device.memory_bytes_per_second
                scatter += 2.0 / self._device.memory_bytes_per_second
            experts = best("all_reduce", groups.expert_data) * self._gradient
            return Rates(scatter * self._gradient, gather * self._element, experts, 0.0)
        kind: Collective = "all_reduce" if self._zero == 0 else "reduce_scatter"
        sharded = self._element if self._zero else 0.0
        return Rates(
            best(kind, groups.data) * self._gradient,
            best("all_gather", groups.data) * sharded,
            best(kind, groups.expert_data) * self._gradient,
            best("all_gather", groups.expert_data) * sharded,
        )

    def _gathering(self, passes: Passes) -> tuple[Floats, Floats]:
        """Exposed seconds of ZeRO-3's collectives of one microbatch on one rank, forward and backward."""
        p, overlap = self._options.splits.pipeline, self._pricer.calibration.overlap_share
        if not (self._pricer.stack.overlap_parameters and self._pricer.cluster.has_accelerators):
            overlap = 0.0
        sent = self._least_dense * self.rates.gather
        back = sent + self._least_dense * self.rates.reduce
        ahead = np.maximum(0.0, sent - overlap * passes.forward / p)
        return ahead, np.maximum(0.0, back - overlap * (passes.input + passes.weight) / p)

    def _unloading(self, passes: Passes, held: Held, ahead: Floats, back: Floats) -> Floats:
        """Exposed seconds of one microbatch's activations on their way to host memory and back, on one rank; they also
        hide beside the waits for weights."""
        p = self._options.splits.pipeline
        moved = held.kept / self._pricer.calibration.host_link_bytes_per_second
        return np.maximum(0.0, (moved - passes.forward) / p - ahead) + np.maximum(
            0.0, (moved - passes.input) / p - back
        )

    def _reductions(self, passes: Passes) -> Floats:
        """Exposed seconds of reducing gradients, and of gathering renewed weights."""
        p, rates, stack = self._options.splits.pipeline, self.rates, self._pricer.stack
        overlap = self._pricer.calibration.overlap_share * self._uneven
        whole = self._experts * rates.reduce_experts + (self._least_dense * rates.reduce if self._zero < 3 else 0.0)
        times = self._options.splits.microbatches if self._zero == 2 else 1
        window = overlap * (passes.input + passes.weight) / p if stack.overlap_gradients else np.zeros_like(whole)
        exposed = self._beside(whole / self._uneven, window) * (1.0 * times)
        if self._zero in (1, 2):
            publish = self._least_dense * rates.gather + self._experts * rates.gather_experts
            beside = overlap * passes.forward / p if stack.overlap_parameters else np.zeros_like(publish)
            exposed = exposed + self._beside(publish / self._uneven, beside)
        return exposed.astype(np.float64)

    def _beside(self, whole: Floats, window: Floats) -> Floats:
        """What no window hides: see `weft.price._update`."""
        splits, chunks = self._options.splits, self._options.chunks
        wide = window * (1.0 + (np.minimum(splits.pipeline, splits.microbatches) - 1) * (chunks - 1) / chunks)
        return np.maximum(0.0, np.maximum(whole - wide, (whole - window) / chunks))

    def _optimizer(self, offload: Offload) -> Floats:
        base, device = self._costs.base, self._device
        mine = self._least_dense / self._shards + self._experts / self._expert_shards
        if offload == "optimizer":
            calibration = self._pricer.calibration
            moved = (self._gradient + self._element) / calibration.host_link_bytes_per_second
            return mine * (moved + 2.0 * base.master_bytes / calibration.host_optimizer_bytes_per_second)
        if device.speeds:  # measured: see `weft.price._update`
            return np.zeros_like(mine)
        held = mine if self._zero >= 2 else self._least_dense + self._experts
        touched = mine * (2.0 * self._gradient + 2.0 * base.master_bytes + self._element) + held * self._gradient
        return touched / device.memory_bytes_per_second

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def device_bytes(self, held: Held, offload: Offload) -> Floats:
        """Return the bytes of the fullest of the first and the last rank."""
        options, base = self._options, self._costs.base
        p = options.splits.pipeline
        kept = held.kept / p / self._uneven
        first, last = kept * options.flight, kept * options.last_flight
        if offload == "activations":
            first = last = np.minimum(2.0 * kept / options.chunks, first)
        loss = max(held.live, self._costs.logits) + held.tail
        fixed = self._fixed_bytes(base)
        outer = self._states(self._dense, offload) + first + held.stem
        outer = outer + np.where(options.joined_ends, loss, held.live)
        inner = self._states(self._last_dense, offload) + last + loss
        return self._outside(np.maximum(outer, inner) + fixed)

    def least_share(self, light: Held, heavy: Held, need: Floats, usable: float) -> Floats:
        """Return the share of all blocks that must be computed again like `heavy` so that every rank fits: later ranks
        hold fewer microbatches."""
        options, p = self._options, self._options.splits.pipeline
        saved = (light.kept - heavy.kept) / p * options.flight * self._fragmented
        fewer = light.kept / p * np.maximum(options.flight - options.last_flight, 0.0) * self._fragmented
        over = [np.clip((need - usable - fewer * part) / np.maximum(saved, 1.0), 0.0, 1.0) for part in _QUANTILES]
        return np.where(p > 1, sum(over) / len(over), over[0])

    def _states(self, dense: Floats, offload: Offload) -> Floats:
        return dense * self._state_bytes(self._shards, offload) + self._experts * self._state_bytes(
            self._expert_shards, offload
        )

    def _state_bytes(self, shards: Ints, offload: Offload) -> Floats:
        zero, master = self._zero, 0.0 if offload == "optimizer" else float(self._costs.base.master_bytes)
        parts = 1.0 / shards
        weights = self._element * (parts if zero == 3 else 1.0)
        gradients = np.where(self._waiting, 1.0, parts) if zero >= 2 else 1.0
        return weights + self._gradient * gradients + master * parts

    def _whole_gradients(self) -> Bools:
        """Whether gradients stay whole until the step's last microbatch (`weft.price.holds_whole_gradients`)."""
        splits = self._options.splits
        waits = (splits.pipeline > 1) | ((self._zero == 3) & (splits.microbatches > 1))
        return waits & self._pricer.stack.memory.accumulates_whole

    def _fixed_bytes(self, base: Layout) -> Floats:
        habits = self._pricer.stack.memory
        workspace = habits.workspace_bytes if self._pricer.memories.on_accelerator else 0.0
        if self._zero == 3:
            wide = self._costs.weights.widest
            size = habits.gathered_blocks * wide * self._element
            size += wide * (self._element + (self._gradient if self._gradient > self._element else 0.0))
            ends = (self._costs.weights.stem + self._costs.weights.tail) * self._element * habits.gathers_ends
            held = np.maximum(self._dense, self._last_dense) + self._experts
            holds = (self._options.splits.pipeline > 1) & habits.holds_gathered
            size = np.where(holds, held * self._element, size + ends)
            return np.where(self._shard > 1, size, 0.0) + workspace
        bucket = min(base.bucket_bytes, SMALLEST_BUCKET)
        return np.where(self._ranks > 1, habits.bucket_copies * bucket, 0.0) + workspace

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

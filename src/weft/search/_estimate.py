"""Time and memory of many layouts at once: what pricing says of equal stages, over arrays.

The same costs of blocks and collectives as in `weft.price`, with stages taken for equal (but for whole blocks) and
reductions at the speed of one usual group of data ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from weft.cluster import Collective
from weft.plan import SPLIT_BACKWARD, Schedule
from weft.price import PROCESS_BYTES, Layout, Pricer
from weft.search._bounds import Floats
from weft.search._group import GroupCosts, Held, Passes
from weft.search._options import Options, Way
from weft.search._space import Offload
from weft.search._splits import Bools, Ints

_LARGE_BYTES = float(1 << 26)
"""Of the collectives whose speed stands for all of ZeRO-3's."""


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
    copies: float = 0.0
    """ZeRO-3: of adding up the gradients of its copies."""


class Estimates:
    """Of options that share a group's costs and a way of sharding."""

    def __init__(
        self,
        pricer: Pricer,
        schedules: tuple[Schedule, ...],
        costs: GroupCosts,
        options: Options,
        way: Way,
        rates: Rates | None = None,
    ) -> None:
        """`rates` are those of other estimates of the same group and way of sharding."""
        self._pricer, self._schedules, self._costs, self._options = pricer, schedules, costs, options
        zero, shard = self._zero, self._shard = way.zero, way.shard
        splits = options.splits
        self._ranks = splits.data * splits.context
        self._shards = np.ones_like(shard) if zero == 0 else self._ranks if zero < 3 else shard * splits.context
        self._expert_shards = np.maximum(1, self._shards * (splits.tensor if zero else 1) // splits.expert)
        weights, p = costs.weights, splits.pipeline
        self._dense = weights.dense / p + np.where(options.joined_ends, weights.stem + weights.tail, weights.stem)
        self._last_dense = weights.dense / p + np.where(options.joined_ends, weights.stem + weights.tail, weights.tail)
        self._experts = weights.experts / p
        self._device = pricer.device(costs.base)
        element = {"fp64": 8, "fp32": 4, "tf32": 4}.get(costs.base.precision, 2)
        self._element, self._gradient = float(element), float(costs.base.gradient_bytes)
        self._once = self._reduces_once(way)
        self._waiting = self._whole_gradients()
        self.rates = rates or self._find_rates()

    # ── time ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def seconds(self, passes: Passes, held: Held, offload: Offload) -> Floats:
        """Return the seconds of a step."""
        none = np.zeros(len(self._options))
        ahead, back, once = self._gathering(passes) if self._zero == 3 else (none, none, none)
        waits = ahead + back
        if offload == "activations":
            waits = waits + self._unloading(passes, held, ahead, back)
        blocks = len(self._pricer.profile.blocks)
        pipeline = pipeline_seconds(self._schedules, blocks, self._costs.hop, self._options, passes, waits)
        step = pipeline + once + self._reductions(passes) + self._optimizer(offload)
        calibration, stack = self._pricer.calibration, self._pricer.stack
        return step * stack.slowdown + calibration.step_seconds

    def _find_rates(self) -> Rates:
        base, pricer, zero = self._costs.base, self._pricer, self._zero
        seconds, every = pricer.seconds, self._options.splits.data
        row = int(np.argsort(every, kind="stable")[len(every) // 2])
        data, shard = int(every[row]), int(self._shard[row])
        layout = replace(
            base,
            pipeline=1,
            shard=shard if zero == 3 else data,
            replicate=max(1, data // shard) if zero == 3 else 1,
        )
        groups = pricer.groups(layout)
        bucket = float(base.bucket_bytes)
        if zero == 3:
            gather = seconds("all_gather", _LARGE_BYTES, groups.shard) / _LARGE_BYTES
            scatter = seconds("reduce_scatter", _LARGE_BYTES, groups.shard) / _LARGE_BYTES
            if not pricer.cluster.has_accelerators and shard > 1:  # see `Pricer`
                gather += 2.0 / self._device.memory_bytes_per_second
                scatter += 2.0 / self._device.memory_bytes_per_second
            experts = seconds("all_reduce", bucket, groups.expert_data) / bucket * self._gradient
            copies = seconds("all_reduce", bucket, groups.replicate) / bucket * self._gradient / max(1, shard)
            return Rates(scatter * self._gradient, gather * self._element, experts, 0.0, copies)
        kind: Collective = "all_reduce" if zero == 0 else "reduce_scatter"
        sharded, by = self._element if zero else 0.0, base.reduced_by
        return Rates(
            seconds(kind, bucket, groups.data, by) / bucket * self._gradient,
            seconds("all_gather", bucket, groups.data, by) / bucket * sharded,
            seconds(kind, bucket, groups.expert_data, by) / bucket * self._gradient,
            seconds("all_gather", bucket, groups.expert_data, by) / bucket * sharded,
        )

    def _gathering(self, passes: Passes) -> tuple[Floats, Floats, Floats]:
        """Exposed seconds of ZeRO-3's collectives of one microbatch on one rank, forward and backward; and what a
        reduction once per step adds to it."""
        p, overlap = self._options.splits.pipeline, self._pricer.calibration.overlap_share
        if not (self._pricer.stack.overlap_parameters and self._pricer.cluster.has_accelerators):
            overlap = 0.0
        sent = self._dense * self.rates.gather
        beside = overlap * (passes.input + passes.weight) / p
        ahead = np.maximum(0.0, sent - overlap * passes.forward / p)
        gathers = np.maximum(0.0, sent - beside)
        reducing = np.maximum(0.0, sent + self._dense * self.rates.reduce - beside)
        return ahead, np.where(self._once, gathers, reducing), np.where(self._once, reducing - gathers, 0.0)

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
        overlap = self._pricer.calibration.overlap_share
        dense_rate = rates.copies if self._zero == 3 else rates.reduce
        whole = self._dense * dense_rate + self._experts * rates.reduce_experts
        times = np.where(self._once, 1, self._options.splits.microbatches) if self._zero == 2 else 1
        hidden = overlap * (passes.input + passes.weight) / p if stack.overlap_gradients else 0.0
        exposed: Floats = (np.maximum(0.0, whole - hidden) * (1.0 * times)).astype(np.float64)
        if self._zero in (1, 2):
            publish = self._dense * rates.gather + self._experts * rates.gather_experts
            beside = overlap * passes.forward / p if stack.overlap_parameters else 0.0
            exposed = exposed + np.maximum(0.05 * publish, publish - beside)
        return exposed

    def _optimizer(self, offload: Offload) -> Floats:
        base, device = self._costs.base, self._device
        mine = self._dense / self._shards + self._experts / self._expert_shards
        if offload == "optimizer":
            calibration = self._pricer.calibration
            moved = (self._gradient + self._element) / calibration.host_link_bytes_per_second
            return mine * (moved + 2.0 * base.master_bytes / calibration.host_optimizer_bytes_per_second)
        held = mine if self._zero >= 2 else self._dense + self._experts
        touched = mine * (2.0 * self._gradient + 2.0 * base.master_bytes + self._element) + held * self._gradient
        return touched / device.memory_bytes_per_second

    # ── memory ────────────────────────────────────────────────────────────────────────────────────────────────────

    def device_bytes(self, held: Held, offload: Offload) -> Floats:
        """Return the bytes of the fullest of the first and the last rank."""
        options, base = self._options, self._costs.base
        p = options.splits.pipeline
        kept = held.kept / p
        first, last = kept * options.flight, kept * options.last_flight
        if offload == "activations":
            first = last = np.minimum(2.0 * kept / options.chunks, first)
        loss = max(held.live, self._costs.logits) + held.tail
        fixed = self._fixed_bytes(base)
        outer = self._states(self._dense, offload) + first + held.stem
        outer = outer + np.where(options.joined_ends, loss, held.live)
        inner = self._states(self._last_dense, offload) + last + loss
        return self._outside(np.maximum(outer, inner) + fixed)

    def saved_bytes(self, light: Held, heavy: Held) -> Floats:
        """Return what the first rank saves when all of its blocks are computed again like `heavy`."""
        return (light.kept - heavy.kept) / self._options.splits.pipeline * self._options.flight * self._fragmented

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
        several = splits.microbatches > 1
        return (self._zero >= 2) & np.where(self._once, (splits.pipeline > 1) | several, splits.uneven & several)

    def _reduces_once(self, way: Way) -> Bools:
        """`weft.price.reduces_once`, by row."""
        pipeline = self._options.splits.pipeline
        if way.every != "auto":
            return np.full(len(pipeline), way.every == "step")
        return (pipeline > 1) & self._pricer.stack.memory.accumulates_whole | (way.zero < 2)

    def _fixed_bytes(self, base: Layout) -> Floats:
        habits = self._pricer.stack.memory
        workspace = habits.workspace_bytes if self._pricer.memories.on_accelerator else 0.0
        if self._zero == 3:
            wide = self._costs.weights.widest
            size = habits.gathered_blocks * wide * self._element
            size += wide * (self._element + (self._gradient if self._gradient > self._element else 0.0))
            ends = (self._costs.weights.stem + self._costs.weights.tail) * self._element * habits.gathers_ends
            held = np.maximum(self._dense, self._last_dense) + self._experts
            holds = ((self._options.splits.pipeline > 1) | self._options.splits.uneven) & habits.holds_gathered
            size = np.where(holds, held * self._element, size + ends)
            return np.where(self._shard > 1, size, 0.0) + workspace
        return np.where(self._ranks > 1, habits.bucket_copies * base.bucket_bytes, 0.0) + workspace

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

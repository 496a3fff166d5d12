"""Work that a step does once: gradients reduced beside the last backward, the optimizer, parameters gathered again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from weft.techniques.buckets.cost import Reductions
from weft.techniques.cost_terms import Device, Groups, Layout, RankLoad, Seconds
from weft.techniques.offload.cost import host_step, reading
from weft.techniques.pipeline.cost import PipelineTimes
from weft.techniques.registry import update_seconds
from weft.techniques.zero.cost import holds_whole_gradients, sharing_ranks
from weft.vectorized import Column, chosen


class Update(NamedTuple):
    """Exposed seconds."""

    data: float
    optimizer: float
    offload: float


def update_of(
    layout: Layout,
    loads: Sequence[RankLoad],
    step: PipelineTimes,
    device: Device,
    groups: Groups,
    seconds: Seconds,
) -> Update:
    """Return the exposed seconds after (and before) the pipeline, of the rank that ends last."""
    if layout.trained_share == 0.0:
        return Update(0.0, 0.0, 0.0)
    loads = trained_loads(layout, loads)
    rates = Reductions(layout, device, groups, seconds)
    # A rank that ends its pipeline early reduces while others still compute.
    ends = [rates.reduce(load) + load.scatter - early for load, early in zip(loads, step.slack, strict=True)]
    data = max(0.0, *ends) if len(ends) > 1 else max(0.0, ends[0])
    data += max(rates.gather_seconds(load) + rates.average(load) for load in loads)
    fullest = max(loads, key=lambda load: load.dense + load.experts)
    optimizer, offload = optimizer_seconds(layout, fullest.dense, fullest.experts, device)
    return Update(data, optimizer, offload)


def trained_loads(layout: Layout, loads: Sequence[RankLoad]) -> list[RankLoad]:
    """Return what of the loads is trained: only that is reduced, stepped and published."""
    trained = layout.trained_share
    return [load._replace(dense=load.dense * trained, experts=load.experts * trained) for load in loads]


def optimizer_seconds(layout: Layout, dense: Column, experts: Column, device: Device) -> tuple[Column, Column]:
    """Return the seconds of the optimizer's step on a rank with so many elements of weights, and of moving what it
    needs from and to host memory."""
    shards, expert_shards = 1, 1
    if layout.shards_states:
        shards, expert_shards = sharing_ranks(layout), sharing_ranks(layout, experts=True)
    mine = dense / shards + experts / expert_shards
    if layout.steps_on_host:
        return host_step(layout, mine, device.calibration)
    # Gradients that are kept whole are cleared whole, though each rank steps its shard alone.
    whole = holds_whole_gradients(layout, device.framework) | (not layout.shards_gradients)
    elements = chosen(whole, dense + experts, mine)
    waits = update_seconds(layout, mine * layout.master_bytes) + reading(layout, mine, device.calibration)
    corrections = device.calibration.corrections
    factor, more = corrections.optimizer, corrections.optimizer_seconds
    known = device.speeds.update_seconds(mine) if device.speeds else None
    if known is not None:
        return (known + device.moved((mine + elements) * layout.gradient_bytes).seconds) * factor + more, waits
    # Norm and clearing of the gradients; state read and written; the weight in compute precision written.
    touched = mine * (2.0 * layout.gradient_bytes + 2.0 * layout.master_bytes + layout.element_bytes)
    touched += elements * layout.gradient_bytes
    return device.moved(touched).seconds * factor + more, waits

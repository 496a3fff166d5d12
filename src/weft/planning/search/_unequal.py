"""Clusters of unequal devices: every data rank gets as many microbatches as its devices can do in the same time.

A data rank's devices lie side by side (data axes outermost), so that it is as fast as its slowest node.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from weft.config.cluster import Cluster, Devices
from weft.config.plan import Axis
from weft.planning.price import CostModel, Prediction
from weft.planning.search._orders import outermost
from weft.planning.search._shares import unequal_shares
from weft.planning.search._space import divisors
from weft.techniques.cost_terms import Layout

_DATA: tuple[Axis, ...] = ("replicate", "shard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """A layout whose data ranks have unequal shares."""

    layout: Layout
    """Layout of the data rank that has most microbatches."""
    shares: tuple[int, ...]
    """Microbatches of each data rank."""
    prediction: Prediction
    """Prediction of the data rank that is done last."""


class Balancer:
    """Balances layouts over the kinds of devices of one cluster."""

    def __init__(self, cost_model: CostModel) -> None:
        self._cost_model = cost_model
        self._kinds = {devices: _all_alike(cost_model, devices) for devices in kinds_of(cost_model.cluster)}

    def balance(self, layout: Layout, global_batch_size: int) -> Balanced | None:
        """Return a layout with the shares that make its slowest data rank fastest, in microbatches of its own size or
        of a part of it, which divide more finely; None where it does not fit some kind of device, or where there are
        fewer microbatches than data ranks."""
        # Data axes outermost: then a data rank's devices lie together, and are of one kind as far as nodes allow.
        layout = replace(layout, order=outermost(layout.order, _DATA))
        sizes = (replace(layout, microbatch_size=size) for size in divisors(layout.microbatch_size))
        balanced_layouts = [
            balanced for size in sizes if (balanced := self._balanced(size, global_batch_size)) is not None
        ]
        return min(balanced_layouts, key=lambda balanced: balanced.prediction.step_seconds, default=None)

    def _balanced(self, layout: Layout, global_batch_size: int) -> Balanced | None:
        total = global_batch_size // layout.microbatch_size
        if total < layout.data:
            return None
        owners = list(self._owners(layout))
        speeds = {devices: self._speed(devices, layout) for devices in dict.fromkeys(owners)}
        shares = unequal_shares(
            total, [speeds[devices][0] for devices in owners], [speeds[devices][1] for devices in owners]
        )
        if len(set(shares)) > 1:
            # Gradients wait whole then, however often they are reduced.
            layout = replace(layout, uneven=True, reduce_every="step" if layout.shards_weights else layout.reduce_every)
        most = dict[Devices, int]()
        for count, devices in zip(shares, owners, strict=True):
            most[devices] = max(count, most.get(devices, 0))
        predictions = [
            self._kinds[devices].predict(replace(layout, microbatches=count), exact=True)
            for devices, count in most.items()
        ]
        if not all(prediction.fits for prediction in predictions):
            return None
        # All data ranks meet in the reduction: the step is the slowest one's.
        slowest = max(predictions, key=lambda prediction: prediction.step_seconds)
        return Balanced(layout=replace(layout, microbatches=max(shares)), shares=shares, prediction=slowest)

    def _speed(self, devices: Devices, layout: Layout) -> tuple[float, float]:
        """Seconds of a microbatch in the steady state, and of a step besides."""
        # Two runs long enough to have filled the pipeline: their difference is the steady state, the rest is paid once
        # per step.
        cost_model, count = self._kinds[devices], 4 * layout.pipeline
        more = cost_model.time(replace(layout, microbatches=2 * count)).total
        fewer = cost_model.time(replace(layout, microbatches=count)).total
        each = (more - fewer) / count
        return each, max(0.0, fewer - count * each)

    def _owners(self, layout: Layout) -> Iterator[Devices]:
        """The slowest devices of every data rank."""
        places: list[tuple[int, int, Devices]] = []
        end = 0
        for node in self._cost_model.cluster.nodes:
            places.append((end, end + node.count * node.devices.count, node.devices))
            end = places[-1][1]
        ranks = layout.world_size // layout.data
        for first in range(0, layout.world_size, ranks):
            touched = [devices for start, end, devices in places if start < first + ranks and first < end]
            yield one_of(min(touched, key=speed_of))


def kinds_of(cluster: Cluster) -> Sequence[Devices]:
    """Return each kind of device once, the slowest first; sizes of nodes do not count."""
    return sorted({one_of(node.devices) for node in cluster.nodes}, key=speed_of)


def one_of(devices: Devices) -> Devices:
    """Return devices without their number."""
    return replace(devices, count=1)


def speed_of(devices: Devices) -> float:
    """The highest peak of a device."""
    return max(devices.peak_flops.values(), default=0.0)


def _all_alike(cost_model: CostModel, devices: Devices) -> CostModel:
    """Return a cost model for the same nodes and links with devices of one kind."""
    nodes = tuple(
        replace(node, devices=replace(devices, count=node.devices.count)) for node in cost_model.cluster.nodes
    )
    return CostModel(
        cost_model.profile, replace(cost_model.cluster, nodes=nodes), cost_model.framework, cost_model.calibration
    )

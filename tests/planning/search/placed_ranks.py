"""Ranks on links that are not alike for all: recursive bisection of who speaks with whom, then swaps that help.

Rings, tori and part-failed nodes have no order of axes that is best by its shape alone.  Ranks that exchange most bytes
are kept together while the devices are halved, again and again; afterwards pairs of ranks change places while that
lowers the bytes times distance (the quadratic assignment problem; swaps after Koopmans and Beckmann 1957, bisection
after Kernighan and Lin 1970).  No plan can say such a placement: it shows what orders of axes leave to be won.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.config.cluster import Cluster
from weft.config.plan import Axis
from weft.model.profile import Profile
from weft.techniques.cost_terms import Layout, slot_numbers

Floats = npt.NDArray[np.float64]
_REGULAR = ("switch", "fully_connected")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Which device each rank takes."""

    devices: tuple[int, ...]
    """Device of each rank; devices are numbered node by node."""
    cost: float
    """Bytes of a step times seconds per byte, over all pairs."""
    in_order: float
    """The same when rank n takes device n."""


def place_ranks(traffic: Floats, distance: Floats) -> npt.NDArray[np.int64]:
    """Return the device of each rank, so that bytes times distance is small; never worse than rank n on device n.

    Args:
        traffic: (ranks, ranks) bytes, symmetric, zero on the diagonal.
        distance: (devices, devices), as many devices as ranks, symmetric, zero on the diagonal.
    """
    ranks = np.arange(len(traffic))
    bisected = np.empty_like(ranks)
    _bisect(traffic, distance, ranks, ranks, bisected)
    found = [_swapped(traffic, distance, start) for start in (ranks, bisected)]
    return min(found, key=lambda devices: _cost(traffic, distance, devices))


def placement_of(profile: Profile, cluster: Cluster, layout: Layout) -> Placement | None:
    """Return where a layout's ranks lie best; None where the links are alike for all, so that order is enough."""
    if all(tier.topology in _REGULAR for tier in cluster.links) and len({n.devices.count for n in cluster.nodes}) == 1:
        return None
    traffic = layout_traffic(profile, layout)
    distance = device_distances(cluster)[: layout.world_size, : layout.world_size]
    devices = place_ranks(traffic, distance)
    return Placement(
        devices=tuple(int(device) for device in devices),
        cost=_cost(traffic, distance, devices),
        in_order=_cost(traffic, distance, np.arange(layout.world_size)),
    )


def device_distances(cluster: Cluster) -> Floats:
    """Return seconds per byte between each two devices: hops over the bandwidth of the outermost tier they cross."""
    slots = slot_numbers(cluster)
    places = np.arange(cluster.num_devices) if slots is None else np.array(slots)
    first, second = places[:, None], places[None, :]
    distance = np.zeros((len(places), len(places)))
    unit = 1
    for tier in cluster.links:
        apart = (first // unit != second // unit) & (distance == 0)
        inside = apart & (first // tier.devices == second // tier.devices)
        hops = np.ones_like(distance)
        if tier.topology in ("ring", "double_ring", "torus"):
            units = max(1, tier.devices // unit)
            shape = tier.shape if tier.topology == "torus" else (units,)
            hops = _ring_hops(first // unit % units, second // unit % units, shape)
        distance = np.where(inside, np.maximum(hops, 1) / tier.bandwidth_bytes_per_second, distance)
        unit = tier.devices
    return distance


def layout_traffic(profile: Profile, layout: Layout) -> Floats:
    """Return the bytes that ranks exchange in a step, on rings: each rank with its neighbours of every axis."""
    volumes = _volumes(profile, layout)
    axes: list[Axis] = [axis for axis in layout.order if axis != "expert"]
    sizes = [int(getattr(layout, axis)) for axis in axes]
    ranks = np.arange(layout.world_size).reshape(sizes)
    traffic = np.zeros((layout.world_size, layout.world_size))
    for place, axis in enumerate(axes):
        if sizes[place] > 1:
            here, there = ranks, np.roll(ranks, -1, axis=place)
            if axis == "pipeline":
                here, there = (np.delete(each, -1, axis=place) for each in (here, there))
            np.add.at(traffic, (here.ravel(), there.ravel()), volumes[axis])
    return traffic + traffic.T


def _volumes(profile: Profile, layout: Layout) -> dict[Axis, float]:
    """Bytes that a rank sends to its neighbour of each axis in a step."""
    tokens = layout.microbatch_size * layout.microbatches * profile.sequence_length / layout.context
    activation = tokens * profile.hidden_size * 2.0
    blocks = len(profile.blocks) / layout.pipeline
    weights = profile.num_parameters / layout.tensor / layout.pipeline
    gradients = 2.0 * weights * layout.gradient_bytes
    gathered = 3.0 * weights * 2.0 * layout.microbatches if layout.shards_weights else gradients
    return {
        "tensor": 8.0 * activation * blocks,
        "context": 4.0 * activation * blocks,
        "pipeline": 2.0 * activation / (layout.tensor if layout.sequence_parallel else 1) * layout.chunks,
        "shard": gathered,
        "replicate": gradients / (layout.shard if layout.shards_weights else 1),
    }


def _ring_hops(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64], shape: tuple[int, ...]) -> Floats:
    """Hops between units of a torus, the last axis of neighbouring units."""
    hops = np.zeros(np.broadcast(first, second).shape)
    stride = 1
    for size in reversed(shape):
        apart = np.abs(first // stride % size - second // stride % size)
        hops += np.minimum(apart, size - apart)
        stride *= size
    return hops


def _cost(traffic: Floats, distance: Floats, devices: npt.NDArray[np.int64]) -> float:
    return float((traffic * distance[np.ix_(devices, devices)]).sum() / 2)


def _bisect(
    traffic: Floats,
    distance: Floats,
    ranks: npt.NDArray[np.int64],
    devices: npt.NDArray[np.int64],
    found: npt.NDArray[np.int64],
) -> None:
    """Give `devices` to `ranks`: both in halves, devices by nearness, ranks by what they exchange."""
    if len(ranks) == 1:
        found[ranks] = devices
        return
    half = len(ranks) // 2
    near = _grown(-distance, devices, half)
    close = _grown(traffic, ranks, half)
    for inside, taken in ((close, near), (~close, ~near)):
        _bisect(traffic, distance, ranks[inside], devices[taken], found)


def _grown(weights: Floats, members: npt.NDArray[np.int64], count: int) -> npt.NDArray[np.bool_]:
    """Mark `count` members that belong together: from the one least tied to all others, always adding the one most tied
    to those chosen."""
    inner = weights[np.ix_(members, members)]
    chosen = np.zeros(len(members), dtype=bool)
    start = int(np.argmin(inner.sum(axis=1)))
    chosen[start] = True
    ties = inner[start].copy()
    for _ in range(count - 1):
        best = int(np.argmax(np.where(chosen, -np.inf, ties)))
        chosen[best] = True
        ties += inner[best]
    return chosen


def _swapped(traffic: Floats, distance: Floats, start: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Let pairs of ranks change places, the most useful pair first, until no pair helps."""
    devices = start.copy()
    while True:
        here = distance[np.ix_(devices, devices)]
        sent = traffic @ here
        own = np.diag(sent)
        change = sent + sent.T - own[:, None] - own[None, :] + 2 * traffic * here
        first, second = np.unravel_index(int(np.argmin(change)), change.shape)
        if change[first, second] >= -1e-9 * max(1e-300, float(np.abs(own).sum())):
            return devices
        devices[[first, second]] = devices[[second, first]]

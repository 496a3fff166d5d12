"""Where the groups of each axis lie on the links, and what share of them they get while their siblings use them too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal, NamedTuple

from weft.config.cluster import Cluster, Collective
from weft.config.plan import EXPERT_LENDERS, Axis
from weft.techniques.cost_terms._kept import BoundedCache
from weft.techniques.cost_terms._layout import Layout
from weft.techniques.cost_terms._network import Level, levels_of, slot_numbers

COPY_PASSES = 3.7
"""Times that an all-reduce reads or writes its tensor in device memory beside the links.

From vTrain's A100 tables (2, 4 and 8 devices; bus bandwidth 193, 218, 227 GB/s): S/t = 1 / (2(n−1)/n / B + γ) fits all
three within 0.3 % with B = 296 GB/s, the links' own speed, and γ = 1.81 ps/byte, 3.7 passes at 2039 GB/s.
"""

GroupName = Literal[
    "tensor", "context", "expert", "pipeline", "data", "shard", "replicate", "expert_data", "expert_shard", "world"
]  # fmt: skip
Lattice = tuple[tuple[int, int], ...]
"""(size, stride) of each dimension of a group, innermost first: its ranks are base + Σ index·stride."""

_EXAMINED = 4096
"""Ranks looked at, at most, where sizes are uneven and every group lies differently."""
NCCL = frozenset({"ring", "double_ring", "torus", "double_tree", "in_network", "hierarchical", "grouped"})
"""Algorithms of the accelerators' library: rings and trees, NVLS, grouped sends for all-to-all."""


@dataclass(frozen=True, slots=True, eq=False)
class Leg:
    """What a group uses of one level.  Bandwidths are bytes per second, one way, of one member."""

    level: Level
    units: int
    """Units of this level that the group has members in, in the block that has most."""
    members: int
    """Members of the group in the unit that has fewest: all of them pass through this level at once."""
    stride: int
    """Units from one that holds members to the next."""
    bandwidth: float
    """Bandwidth to all other units together, while every sibling group does the same."""
    ring: float
    """Bandwidth around one ring of units."""
    rings: int
    """Rings that have links of their own."""
    pair: float
    """Bandwidth to one other unit, while one member of each group sends to its next unit."""

    @property
    def place(self) -> tuple[Level, int, int, int]:
        """What all the rest follows from."""
        return self.level, self.units, self.members, self.stride

    @property
    def latency(self) -> float:
        """Seconds from a unit to the next that has members."""
        hops = self.stride if self.level.topology in ("ring", "double_ring") else 1
        return self.level.latency * hops


class CostLine(NamedTuple):
    """Seconds of an algorithm: `fixed` and `per_byte` times the size."""

    algorithm: str
    fixed: float
    per_byte: float


@dataclass(frozen=True, slots=True, eq=False)
class AxisGroup:
    """The ranks of an axis that work together, as the worst placed of its groups lies; compared by identity."""

    size: int
    legs: tuple[Leg, ...]
    """Levels that it crosses, innermost first."""
    siblings: int
    """Groups of this axis that work at the same time."""
    seconds_per_copied_byte: float
    """γ of an all-reduce: see `COPY_PASSES`."""
    algorithms: frozenset[str] | None
    """Algorithms that the library of these devices has; None: these are cores, between which Weft chooses itself."""
    lines: dict[Collective, tuple[CostLine, ...]] = field(default_factory=dict["Collective", "tuple[CostLine, ...]"])
    """Costs that were worked out once; see `is_affine`."""

    @property
    def is_affine(self) -> bool:
        """Whether each algorithm's seconds are a line over the size: NCCL's are, where no torus has its axes wait."""
        return self.algorithms is not None and self.algorithms <= NCCL and not any(x.level.is_torus for x in self.legs)

    @property
    def is_on_one_node(self) -> bool:
        """Whether its ranks share memory, where cores are the devices."""
        return all(leg.level.is_inside for leg in self.legs)

    @property
    def members(self) -> tuple[int, ...]:
        """Units by leg: 8, 4 for eight devices in each of four nodes."""
        return tuple(leg.units for leg in self.legs)


class Groups(NamedTuple):
    """All groups of a layout.  A group of one member has no legs, and its collectives cost nothing."""

    tensor: AxisGroup
    context: AxisGroup
    expert: AxisGroup
    pipeline: AxisGroup
    """A stage's rank and the next one's, at the worst boundary: two members."""
    data: AxisGroup
    """Ranks that add up gradients of the same weights: replicate × shard × context."""
    shard: AxisGroup
    """Ranks that share weights out under ZeRO-3: shard × context."""
    replicate: AxisGroup
    expert_data: AxisGroup
    """Ranks that add up gradients of the same experts."""
    expert_shard: AxisGroup
    """Ranks that share out the weights of the same experts under ZeRO-3: those of `expert_data` but for replicas."""
    world: AxisGroup


class Network:
    """The links of one cluster; works out and keeps where groups lie on them."""

    def __init__(
        self, cluster: Cluster, *, slowdowns: Sequence[float] = (), algorithms: frozenset[str] | None = None
    ) -> None:
        """`slowdowns`, by tier, divide the bandwidths; the last stands for all further tiers.

        `algorithms` names those that may be used, of which the cheapest is; by default NCCL's between accelerators,
        and between cores what Weft does there.
        """
        self.cluster = cluster
        self._algorithms = algorithms if algorithms is not None or not cluster.has_accelerators else NCCL
        self._slowdowns = tuple(slowdowns)
        self._slots = slot_numbers(cluster)
        bandwidths = [node.devices.memory_bandwidth_bytes_per_second for node in cluster.nodes]
        known = [bandwidth for bandwidth in bandwidths if bandwidth is not None]
        self._per_copied_byte = COPY_PASSES / min(known) if known and cluster.has_accelerators else 0.0
        self._levels: dict[int, tuple[Level, ...]] = {}
        self._placed: dict[tuple[Lattice, int, int], AxisGroup] = {}
        self._alike: dict[tuple[object, ...], AxisGroup] = {}
        self._groups = BoundedCache[tuple[object, ...], Groups]()

    def groups(self, layout: Layout) -> Groups:
        """Return where the groups of every axis lie."""
        sizes = (layout.pipeline, layout.replicate, layout.shard, layout.context, layout.tensor, layout.expert)
        key = (layout.order, *sizes, layout.cuts_experts)
        groups = self._groups.get(key)
        if groups is None:
            groups = self._groups[key] = self._place_all(layout)
        return groups

    def group(self, layout: Layout, *axes: Axis) -> AxisGroup:
        """Return where the groups over the product of `axes` lie; expert stands for what it borrows."""
        return self._place(_merge([(size, stride) for axis, size, stride in _axes(layout) if axis in axes]), layout)

    def boundary(self, layout: Layout, stage: int) -> AxisGroup:
        """Return a rank of pipeline rank `stage` and its partner of the next one, as the worst placed pair lies.

        The last one's next is the first: interleaved schedules send there.
        """
        stride = next(stride for axis, _, stride in _axes(layout) if axis == "pipeline")
        distance = stride if stage < layout.pipeline - 1 else -stride * (layout.pipeline - 1)
        return self._pair(layout, stage, distance, stride)

    def _place_all(self, layout: Layout) -> Groups:
        axes = _axes(layout)
        taken, left = _borrowed(layout, axes)
        chosen = {axis: (size, stride) for axis, size, stride in axes}
        return Groups(
            tensor=self._place(_merge([chosen["tensor"]]), layout),
            context=self._place(_merge([chosen["context"]]), layout),
            expert=self._place(_merge(taken), layout),
            pipeline=self._worst_boundary(layout),
            data=self.group(layout, "replicate", "shard", "context"),
            shard=self.group(layout, "shard", "context"),
            replicate=self._place(_merge([chosen["replicate"]]), layout),
            expert_data=self._place(_merge(sorted([*left, chosen["replicate"]], key=itemgetter(1))), layout),
            expert_shard=self._place(_merge(left), layout),
            world=self._place(_merge([(size, stride) for _, size, stride in axes]), layout),
        )

    # ── ranks to slots ────────────────────────────────────────────────────────────────────────────────────────────

    def _scale(self, world: int) -> tuple[int, int]:
        """Return slots per rank and ranks per slot.  Ranks on cores spread over all cores, and may outnumber them."""
        devices = self.cluster.num_devices
        if self.cluster.has_accelerators:
            return 1, 1
        return max(1, devices // world), max(1, math.ceil(world / devices))

    def _levels_at(self, density: int) -> tuple[Level, ...]:
        if density not in self._levels:
            self._levels[density] = levels_of(self.cluster, self._slowdowns, density)
        return self._levels[density]

    def _place(self, lattice: Lattice, layout: Layout) -> AxisGroup:
        world = layout.world_size
        spacing, density = self._scale(world)
        regular = self._slots is None
        key = (lattice, world, density)
        if key not in self._placed:
            levels = self._levels_at(density)
            size = math.prod(size for size, _ in lattice)
            # From the inside out: how many blocks of each level a group touches, and how many members it has in each.
            # A formula where groups lie regularly, and a look at a sample of them where they do not.
            spans = [(size, 1)]
            for level in levels[:-1]:
                span = _even_span([(n, stride * spacing) for n, stride in lattice], level.slots) if regular else None
                if span is None and regular and spacing == 1 and len(lattice) == 1:
                    span = _uneven_span(*lattice[0], world, level.slots)
                spans.append(span or self._examine(lattice, world, spacing, level.slots))
            spans.append((1, size))  # the last level joins all
            self._placed[key] = self._group_of(size, _legs(levels, spans, lattice, spacing), max(1, world // size))
        return self._placed[key]

    def _group_of(self, size: int, legs: tuple[Leg, ...], siblings: int) -> AxisGroup:
        """Return one object for all groups that cost the same, so that a price of one is known for the others.

        Siblings count where links were measured with several groups at work.
        """
        counts = any(leg.level.measured for leg in legs)
        key = (size, tuple(leg.place for leg in legs), siblings if counts else 1)
        if key not in self._alike:
            self._alike[key] = AxisGroup(size, legs, siblings, self._per_copied_byte, self._algorithms)
        return self._alike[key]

    def _slot(self, rank: int, spacing: int) -> int:
        slots = self._slots
        if slots is None:
            return rank * spacing
        return slots[min(rank * spacing, len(slots) - 1)]

    def _examine(self, lattice: Lattice, world: int, spacing: int, block: int) -> tuple[int, int]:
        """Look at groups one by one; return the most blocks that a group touches, and the fewest members in a block."""
        offsets = [0]
        for size, stride in lattice:
            offsets = [offset + index * stride for index in range(size) for offset in offsets]
        widest, thinnest = 1, len(offsets)
        for base in _sample(_bases(lattice, world), max(2, _EXAMINED // len(offsets))):
            counts: dict[int, int] = {}
            for offset in offsets:
                at = self._slot(base + offset, spacing) // block
                counts[at] = counts.get(at, 0) + 1
            widest, thinnest = max(widest, len(counts)), min(thinnest, *counts.values())
        return widest, thinnest

    # ── pipeline neighbours ───────────────────────────────────────────────────────────────────────────────────────

    def _worst_boundary(self, layout: Layout) -> AxisGroup:
        if layout.pipeline == 1:
            return self._place((), layout)
        stages = range(layout.pipeline - 1)
        pairs = [self.boundary(layout, stage) for stage in _sample(stages, 64)]
        return min(pairs, key=lambda pair: pair.legs[-1].pair if pair.legs else math.inf)

    def _pair(self, layout: Layout, stage: int, distance: int, stride: int) -> AxisGroup:
        """Return a pair of ranks `distance` apart, of whose kind `stride` neighbours in a row send at once."""
        world = layout.world_size
        spacing, density = self._scale(world)
        period = stride * layout.pipeline
        key = (((2, distance), (stage, stride), (layout.pipeline, period)), world, density)
        if key not in self._placed:
            first = stage * stride
            starts = (
                base + place
                for base in _sample(range(first, world, period), 256)
                for place in (0, stride - 1)
                if 0 <= base + place + distance < world
            )
            self._placed[key] = self._farthest(starts, distance, min(stride, world), spacing, density)
        return self._placed[key]

    def _farthest(self, starts: Iterable[int], distance: int, row: int, spacing: int, density: int) -> AxisGroup:
        # The pair that crosses the outermost level decides: all pairs of a boundary send at once, and a step waits for
        # the slowest.  Levels are nested, so the first one whose block holds both ranks is the outermost crossed.
        crossed = -1
        levels = self._levels_at(density)
        for start in starts:
            here, there = self._slot(start, spacing), self._slot(start + distance, spacing)
            outermost = next(i for i, level in enumerate(levels) if here // level.slots == there // level.slots)
            crossed = max(crossed, outermost)
            if crossed == len(levels) - 1:
                break
        level = levels[crossed]
        apart = max(1, abs(distance) * spacing // level.unit)
        # A row of senders shares its unit's uplink; where it is shorter than the unit, others have nothing to send.
        senders = min(row * spacing, level.unit) if level.unit > 1 else 1
        share = min(level.alone, level.bandwidth * level.unit / senders) if level.unit > 1 else level.bandwidth
        leg = _leg(level, share, units=2, members=1, stride=apart)
        # On rails a sender at another place of its unit first hands the message to the device of the receiver's rail.
        inside = [_leg(inner, inner.bandwidth, units=2, members=1, stride=1) for inner in levels[:crossed][-1:]]
        legs = (*inside, leg) if level.is_rails and abs(distance) * spacing % level.unit else (leg,)
        return AxisGroup(2, legs, row, self._per_copied_byte, self._algorithms)


def _axes(layout: Layout) -> list[tuple[Axis, int, int]]:
    """Return (axis, size, stride in ranks), innermost first."""
    axes: list[tuple[Axis, int, int]] = []
    stride = 1
    for axis in reversed(layout.order):
        if axis != "expert":
            size = int(getattr(layout, axis))
            axes.append((axis, size, stride))
            stride *= size
    return axes


def _borrowed(
    layout: Layout, axes: Sequence[tuple[Axis, int, int]]
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the parts of other axes that the expert axis takes, and those that it leaves, as (size, stride).

    It borrows from the plan's lenders just outside of it in the order first, then from those inside; from tensor only
    where they do not suffice, as other systems allow.  What it leaves are ranks with the same experts: those of tensor
    among them where they have whole experts and share out the tokens.  Replicas, which have all, are not counted.
    """
    sizes = {axis: (size, stride) for axis, size, stride in axes}
    place = layout.order.index("expert")
    outside, inside = layout.order[:place][::-1], layout.order[place + 1 :]
    lenders: list[Axis] = [axis for axis in (*outside, *inside) if axis in EXPERT_LENDERS]
    left: list[tuple[int, int]] = []
    if layout.expert > layout.expert_room:
        lenders = ["tensor", *lenders]
    elif not layout.cuts_experts:
        left.append(sizes["tensor"])
    remaining = layout.expert
    taken: list[tuple[int, int]] = []
    for axis in lenders:
        size, stride = sizes[axis]
        part = math.gcd(size, remaining)  # as much of a lender as divides both
        taken.append((part, stride))
        left.append((size // part, stride * part))
        remaining //= part
    assert remaining == 1, f"expert = {layout.expert} does not divide the ranks that it borrows"
    return sorted(taken, key=itemgetter(1)), sorted(left, key=itemgetter(1))


def _merge(dimensions: Sequence[tuple[int, int]]) -> Lattice:
    """Leave out sizes of 1, and join dimensions that follow one another without a gap."""
    merged: list[tuple[int, int]] = []
    for size, stride in dimensions:
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return tuple(merged)


def _even_span(lattice: Sequence[tuple[int, int]], block: int) -> tuple[int, int] | None:
    """Return the blocks that each group touches and its members in each; None: groups lie differently."""
    # A dimension lies inside of a block, across blocks, or is cut by their borders; each is even only if it divides.
    total, inside = 1, 1
    for size, stride in lattice:
        total *= size
        if stride >= block:
            if stride % block and inside > 1:
                return None
        elif size * stride <= block:
            if block % (size * stride):
                return None
            inside *= size
        else:
            if block % stride or size * stride % block:
                return None
            inside *= block // stride
    return total // inside, inside


def _uneven_span(size: int, stride: int, world: int, block: int) -> tuple[int, int]:
    """Return the same for one dimension that does not fit blocks, of the worst of its groups."""
    # Groups repeat in blocks after lcm(period, block) ranks, so block / gcd of them show every alignment.
    period = size * stride
    length = (size - 1) * stride
    widest, thinnest = 1, size
    for index in range(min(world // period, block // math.gcd(period, block))):
        start = index * period % block
        # Groups that begin at one of the next `stride` ranks: the outermost ones, and those beside a block's border.
        places = {0, stride - 1}
        for border in (-start % block, -(start + length) % block):
            places |= {place for place in (border - 1, border) if 0 <= place < stride}
        for place in places:
            first = (start + place) % block
            touched = (first + length) // block + 1 if stride < block else size
            widest = max(widest, touched)
            if touched > 1:
                head = -((first - block) // stride)
                tail = (first + length) % block // stride + 1
                thinnest = min(thinnest, head, tail)
    return widest, thinnest


def _bases(lattice: Lattice, world: int) -> Sequence[int]:
    """Return the first ranks of groups: all, or a sample where there are many."""
    bases: Sequence[int] = range(1)
    filled = 1
    for size, stride in (*lattice, (1, world)):
        gap = _sample(range(0, stride, filled), 64)
        bases = [low + high for high, low in itertools.product(gap, bases)] if len(bases) > 1 else gap
        filled = stride * size
    return bases


def _sample(items: Sequence[int], most: int) -> Sequence[int]:
    """Return at most `most` items: neighbours from the first on, which see every alignment, and others to the last."""
    if len(items) <= most:
        return items
    head = most // 2
    rest = most - head
    return [*items[:head], *(items[head + (index + 1) * (len(items) - head) // rest - 1] for index in range(rest))]


def _legs(levels: Sequence[Level], spans: Sequence[tuple[int, int]], lattice: Lattice, spacing: int) -> tuple[Leg, ...]:
    legs: list[Leg] = []
    for index, level in enumerate(levels):
        (below, members), (above, _) = spans[index], spans[index + 1]
        units = -(-below // above)
        if units > 1:
            beyond = [stride * spacing for size, stride in lattice if size * stride * spacing > level.unit]
            stride = max(1, min(beyond, default=1) // level.unit)
            legs.append(_leg(level, level.bandwidth, units=units, members=members, stride=stride))
    return tuple(legs)


def _leg(level: Level, bandwidth: float, *, units: int, members: int, stride: int) -> Leg:
    """Return a level's leg of a group: the level's links are shared among the groups that use them."""
    circle = max(level.circle, units)
    if level.topology == "fully_connected":
        pair = bandwidth / (circle - 1)
        together = pair * (units - 1)
        return Leg(level, units, members, stride, together, together, 1, pair)
    if level.topology == "switch":
        pair = min(max(level.alone, bandwidth), bandwidth * members)
        return Leg(level, units, members, stride, bandwidth, bandwidth, 1, pair)
    # Groups whose members stand `stride` apart share every link with as many siblings.
    closed = units * stride >= circle
    one_way = bandwidth / (2 if level.topology == "double_ring" else 1) / min(stride, max(1, circle // units))
    rings = 2 if level.topology == "double_ring" and closed else 1
    # All-to-all, by the busiest link: it carries u/4 tensors on a line, u/8 on a double ring, (u−1)/2 on a ring.
    if not closed:
        together = 4 * one_way * (units - 1) / units**2
    elif rings == 2:
        together = 8 * one_way * (units - 1) / units**2
    else:
        together = 2 * one_way / units
    return Leg(level, units, members, stride, together, one_way, rings, one_way)

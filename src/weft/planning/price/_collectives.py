"""Seconds of a collective over a group, by what will run it, or as it was measured.

Accelerators have a library that chooses the cheapest of its algorithms.  Between cores runs what Weft does without a
choice, or the algorithm that a plan names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.comm.algorithms import (
    Arrangement,
    Links,
    bruck,
    direct,
    double_ring,
    double_tree,
    find_algorithm,
    halving_doubling,
    one_shot,
    parse_choices,
    recursive_doubling,
    ring,
    scatter,
    stand_in,
    tree,
)
from weft.comm.algorithms import flat as flat_arrangement
from weft.config.cluster import Collective, CollectiveTime
from weft.planning.price import _algorithms as cost
from weft.techniques.cost_terms import AxisGroup, CostLine, Leg

_COPIES = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5, "all_to_all": 0.5, "broadcast": 0.5}
"""Multiples of γ: an all-reduce passes over its tensor twice, the others once."""


class CollectiveChoice(NamedTuple):
    """One way to do a collective."""

    algorithm: str
    """`ring`, `tree`, …; `hierarchical` names that of the outermost leg too: `hierarchical+ring`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _FlatGroup:
    """A group with all its legs taken for one link."""

    members: int
    hop: float
    """Mean latency around a ring that visits unit after unit."""
    depth: float
    """Latency of ⌈log₂⌉ steps over every leg, over ⌈log₂n⌉."""
    slowest: float
    """Latency of the farthest pair."""
    per_byte: float
    """Time per byte that one member sends around a ring, at the leg where it takes longest."""
    rings: int


def collective_seconds(kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto") -> float:
    """Return the seconds of one collective by what will run it, all sibling groups working at the same time.

    `size_bytes` counts the whole tensor on one rank: what all_reduce, reduce_scatter, all_to_all, broadcast and send
    take, and what all_gather returns.  `algorithm`: see `choose_algorithm`.  Links that `weft probe` has measured are
    looked up; formulas price the rest.
    """
    return choose_algorithm(kind, size_bytes, group, algorithm).seconds


def choose_algorithm(
    kind: Collective, size_bytes: float, group: AxisGroup, algorithm: str = "auto"
) -> CollectiveChoice:
    """Return the algorithm that will run, and its seconds.

    `algorithm` is a plan's, of the collectives that it speaks of: between cores that one runs, also where it is not the
    cheapest.  `auto` is what is done without a choice, and `measured` is priced like it: prices do not depend on what
    has been kept on some machine.
    """
    if group.size < 2 or size_bytes <= 0 or not group.legs:
        return CollectiveChoice("none", 0.0)
    named = _named(kind, size_bytes, algorithm) if group.algorithms is None else None
    known = _looked_up(kind, size_bytes, group) if named is None else None
    if known is not None:
        return CollectiveChoice("measured", known)
    if group.is_affine:
        lines = group.lines.get(kind) or _lines(kind, group)
        return min((CollectiveChoice(name, fixed + slope * size_bytes) for name, fixed, slope in lines), key=_seconds)
    if named is not None:
        best = _by_name(*named, size_bytes, group)
    elif group.algorithms is None:
        best = _built_in(kind, size_bytes, group)
    else:
        best = min(algorithm_choices(kind, size_bytes, group), key=_seconds)
    return CollectiveChoice(best.algorithm, best.seconds + _fixed(kind, size_bytes, group))


def _lines(kind: Collective, group: AxisGroup) -> tuple[CostLine, ...]:
    """Work out every algorithm at two sizes, and keep the lines through them in the group."""
    # Every formula is a straight line in the size: two points are enough, and a search asks very many sizes.
    far = 1e12
    low, high = (algorithm_choices(kind, size, group) for size in (0.0, far))
    start, copies = _fixed(kind, 0.0, group), _fixed(kind, far, group)
    lines = tuple(
        CostLine(a.algorithm, a.seconds + start, (b.seconds - a.seconds + copies - start) / far)
        for a, b in zip(low, high, strict=True)
    )
    group.lines[kind] = lines
    return lines


def _seconds(choice: CollectiveChoice) -> float:
    return choice.seconds


def algorithm_choices(kind: Collective, size_bytes: float, group: AxisGroup) -> Iterator[CollectiveChoice]:
    """Every algorithm that the group's links allow, without starting and copying, which all of them share."""
    if kind == "send":
        # Neighbours of a larger group are apart by its outermost leg at worst; between rails a pair has two legs.
        legs = group.legs if group.size == 2 else group.legs[-1:]
        yield CollectiveChoice("send", sum(cost.point_to_point(size_bytes, leg.latency, 1 / leg.pair) for leg in legs))
        return
    flat = _flat(group)
    if kind == "all_reduce":
        choices = _all_reduce_choices(size_bytes, group, flat)
    elif kind == "broadcast":
        choices = _broadcast_choices(size_bytes, group, flat)
    elif kind == "all_to_all":
        choices = _all_to_all_choices(size_bytes, group)
    else:
        choices = _half_choices(size_bytes, group, flat)
    for choice in choices:
        if _is_allowed(choice, group):
            yield choice


def _is_allowed(choice: CollectiveChoice, group: AxisGroup) -> bool:
    return group.algorithms is None or group.algorithms.issuperset(choice.algorithm.split("+"))


def _fixed(kind: Collective, size_bytes: float, group: AxisGroup) -> float:
    """Starting, and the passes over memory that run beside no link."""
    start = max(leg.level.start for leg in group.legs)
    if kind == "send":
        return start
    return start + _COPIES[kind] * size_bytes * group.seconds_per_copied_byte


def _flat(group: AxisGroup) -> _FlatGroup:
    outermost = len(group.legs) - 1
    hops, depth, left = 0.0, 0.0, group.size
    for index, leg in enumerate(group.legs):
        after = 1 if index == outermost else max(1, left // leg.units)
        # A ring visits all units of a leg before it leaves it: that many hops cost the leg's latency.
        hops += (left - after + (index == outermost)) * leg.latency
        is_chain = group.algorithms is not None and leg.level.tier == 0  # NCCL's trees are chains inside a node
        depth += (leg.units - 1 if is_chain else (leg.units - 1).bit_length()) * leg.latency
        left = after
    steps = (group.size - 1).bit_length()
    return _FlatGroup(
        members=group.size,
        hop=hops / group.size,
        depth=depth / steps,
        slowest=max(leg.latency for leg in group.legs),
        # Every byte passes each leg; the slowest one limits the ring. Members of a unit send side by side.
        per_byte=max(1 / (leg.ring * leg.members) for leg in group.legs),
        rings=min(leg.rings for leg in group.legs),
    )


def _all_reduce_choices(size: float, group: AxisGroup, flat: _FlatGroup) -> Iterator[CollectiveChoice]:
    n = flat.members
    if len(group.legs) == 1:
        yield from _leg_all_reduces(size, group.legs[0])
    else:
        yield from _hierarchical(size, group)
        yield CollectiveChoice("ring", ring.all_reduce_seconds(n, size, flat.hop, flat.per_byte))
        if flat.rings > 1:
            yield CollectiveChoice("double_ring", double_ring.all_reduce_seconds(n, size, flat.hop, flat.per_byte))
        if _is_torus(group):
            yield CollectiveChoice("torus", _torus_seconds(size, group))
    if all(leg.level.topology == "switch" for leg in group.legs):
        yield CollectiveChoice("double_tree", double_tree.all_reduce_seconds(n, size, flat.depth, flat.per_byte))
    yield CollectiveChoice("recursive_doubling", sum(_doubling(size, leg) for leg in group.legs))


def _doubling(size: float, leg: Leg) -> float:
    return recursive_doubling.all_reduce_seconds(leg.units, size, leg.latency, 1 / min(leg.pair, leg.ring))


def _leg_all_reduces(size: float, leg: Leg) -> Iterator[CollectiveChoice]:
    """All-reduce among the units of one leg; every member of a unit holds a tensor of its own."""
    n = leg.units
    yield CollectiveChoice("ring", ring.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.rings > 1:
        yield CollectiveChoice("double_ring", double_ring.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    far = _far_latency(leg)
    yield CollectiveChoice("direct", direct.all_reduce_seconds(n, size, far, 1 / leg.bandwidth))
    yield CollectiveChoice("one_shot", one_shot.all_reduce_seconds(n, size, far, 1 / leg.bandwidth))
    if leg.level.topology == "switch":
        yield CollectiveChoice(
            "halving_doubling", halving_doubling.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring)
        )
        yield CollectiveChoice("tree", tree.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.level.in_network:
        yield CollectiveChoice("in_network", cost.in_network_all_reduce(n, size, leg.latency, 1 / leg.ring))


def _hierarchical(size: float, group: AxisGroup) -> Iterator[CollectiveChoice]:
    """Reduce-scatter leg by leg outwards, all-reduce among the outermost units, gather on the way back.

    Σ 2·half(uⱼ, S/Πinner) + all_reduce(u, S/Πinner): Jain and Sabharwal's bucket algorithm, one leg at a time; the
    members of a unit send through its uplink side by side.
    """
    seconds, part = 0.0, size
    for leg, outer in zip(group.legs, group.legs[1:], strict=False):
        seconds += 2 * _leg_half(part, leg, group)
        # After the reduce-scatter inside, each unit's member goes on with its part of the tensor.
        part = size / outer.members
    for choice in _leg_all_reduces(part, group.legs[-1]):
        yield CollectiveChoice(f"hierarchical+{choice.algorithm}", seconds + choice.seconds)


def _leg_half(size: float, leg: Leg, group: AxisGroup) -> float:
    """Reduce-scatter or all-gather among the units of one leg."""
    return min(choice.seconds for choice in _leg_halves(size, leg) if _is_allowed(choice, group))


def _leg_halves(size: float, leg: Leg) -> Iterator[CollectiveChoice]:
    n = leg.units
    yield CollectiveChoice("ring", ring.half_seconds(n, size, leg.latency, 1 / leg.ring))
    yield CollectiveChoice("direct", direct.half_seconds(n, size, _far_latency(leg), 1 / leg.bandwidth))
    if leg.rings > 1:
        yield CollectiveChoice("double_ring", double_ring.half_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.level.topology == "switch":
        yield CollectiveChoice("halving_doubling", halving_doubling.half_seconds(n, size, leg.latency, 1 / leg.ring))


def _half_choices(size: float, group: AxisGroup, flat: _FlatGroup) -> Iterator[CollectiveChoice]:
    """Reduce-scatter and all-gather, which cost the same."""
    n = flat.members
    if len(group.legs) == 1:
        yield from _leg_halves(size, group.legs[0])
        return
    yield CollectiveChoice("ring", ring.half_seconds(n, size, flat.hop, flat.per_byte))
    if flat.rings > 1:
        yield CollectiveChoice("double_ring", double_ring.half_seconds(n, size, flat.hop, flat.per_byte))
    yield CollectiveChoice("hierarchical", sum(_leg_half(size / leg.members, leg, group) for leg in group.legs))
    if _is_torus(group):
        yield CollectiveChoice("torus", _torus_seconds(size, group) / 2)


def _is_torus(group: AxisGroup) -> bool:
    return all(leg.level.is_torus for leg in group.legs)


def _torus_seconds(size: float, group: AxisGroup) -> float:
    """All-reduce of a torus's axes at once: each a-th of the tensor goes through the axes in an order of its own.

    In each of the 2a phases every axis is busy with another part; a phase lasts as long as its slowest axis (Jain and
    Sabharwal, §4).
    """
    legs = group.legs
    axes = len(legs)
    seconds = 0.0
    for phase in range(axes):
        slowest = 0.0
        for first in range(axes):
            done = math.prod(legs[(first + before) % axes].units for before in range(phase))
            slowest = max(slowest, _leg_half(size / axes / done, legs[(first + phase) % axes], group))
        seconds += 2 * slowest
    return seconds


def _broadcast_choices(size: float, group: AxisGroup, flat: _FlatGroup) -> Iterator[CollectiveChoice]:
    n = flat.members
    yield CollectiveChoice("tree", _tree_broadcast(size, group))
    yield CollectiveChoice("ring", ring.broadcast_seconds(n, size, flat.hop, flat.per_byte))
    yield CollectiveChoice("scatter", scatter.broadcast_seconds(n, size, flat.hop, flat.per_byte))
    if all(leg.level.topology == "switch" for leg in group.legs):
        yield CollectiveChoice("double_tree", double_tree.broadcast_seconds(n, size, flat.depth, flat.per_byte))
    if len(group.legs) == 1 and group.legs[0].level.in_network:
        yield CollectiveChoice("in_network", cost.in_network_broadcast(n, size, flat.slowest, flat.per_byte))


def _all_to_all_choices(size: float, group: AxisGroup) -> Iterator[CollectiveChoice]:
    yield CollectiveChoice("grouped", _grouped(size, group))
    phases = [direct.all_to_all_seconds(leg.units, size, _far_latency(leg), 1 / leg.bandwidth) for leg in group.legs]
    if len(phases) > 1:
        yield CollectiveChoice("hierarchical", sum(phases))
    jumps = [bruck.all_to_all_seconds(leg.units, size, leg.latency, 1 / leg.pair) for leg in group.legs]
    yield CollectiveChoice("bruck", sum(jumps))


def _tree_broadcast(size: float, group: AxisGroup) -> float:
    return sum(tree.broadcast_seconds(leg.units, size, leg.latency, 1 / leg.pair) for leg in group.legs)


def _grouped(size: float, group: AxisGroup) -> float:
    """Every member sends an n-th of its tensor to every other, all at once."""
    n = group.size
    latency = max(_far_latency(leg) for leg in group.legs)
    issue = direct.all_to_all_seconds(n, 0.0, latency, 0.0)
    loads, below = list[float](), 1
    for index, leg in enumerate(group.legs):
        within = n if index == len(group.legs) - 1 else min(n, below * leg.units)
        # Parts for ranks that this leg is the innermost to reach, evened out to the leg's own all-to-all bandwidth.
        loads.append((within - below) / n * size / leg.bandwidth)
        below = within
    rails = any(leg.level.is_rails for leg in group.legs)
    return issue + (sum(loads) if rails else max(loads))


def _far_latency(leg: Leg) -> float:
    """Return the latency to the farthest unit: half of the circle on a double ring, all of it on a ring."""
    if leg.level.topology == "double_ring":
        return leg.latency * max(1, leg.units // 2)
    return leg.latency * (leg.units - 1 if leg.level.topology == "ring" else 1)


# ── what runs between cores ───────────────────────────────────────────────────────────────────────────────────────────


def _built_in(kind: Collective, size: float, group: AxisGroup) -> CollectiveChoice:
    """Return the cost where no algorithm is chosen (`weft.comm.flat.Collectives`). On one node each rank reads straight
    from the others' memory; between nodes Gloo's all-reduce is a ring, and the rest are direct messages."""
    if kind == "send":
        return next(algorithm_choices(kind, size, group))
    if group.is_on_one_node:
        return _in_memory(kind, size, group)
    if kind == "broadcast":
        return CollectiveChoice("tree", _tree_broadcast(size, group))
    if kind == "all_reduce":
        flat = _flat(group)
        return CollectiveChoice("ring", ring.all_reduce_seconds(flat.members, size, flat.hop, flat.per_byte))
    return CollectiveChoice("grouped", _grouped(size, group))


def _in_memory(kind: Collective, size: float, group: AxisGroup) -> CollectiveChoice:
    n, far = group.size, max(_far_latency(leg) for leg in group.legs)
    per_byte = max(1 / leg.bandwidth for leg in group.legs)
    if kind == "all_reduce":
        whole = CollectiveChoice("one_shot", one_shot.all_reduce_seconds(n, size, far, per_byte))
        return min(whole, CollectiveChoice("direct", direct.all_reduce_seconds(n, size, far, per_byte)), key=_seconds)
    if kind == "broadcast":
        return CollectiveChoice("direct", cost.point_to_point(size, far, per_byte))
    return CollectiveChoice("direct", direct.half_seconds(n, size, far, per_byte))


def _named(kind: Collective, size_bytes: float, algorithm: str) -> tuple[str, Collective] | None:
    """The way that a plan names for a tensor of this size, and what it does there; None: it says nothing of it."""
    if algorithm in ("auto", "measured") or kind not in ("all_reduce", "reduce_scatter", "all_gather"):
        return None
    return stand_in(parse_choices(algorithm).algorithm_for(int(size_bytes)), kind)


def _by_name(name: str, kind: Collective, size: float, group: AxisGroup) -> CollectiveChoice:
    """Return the cost of a named algorithm: by the links that it crosses where these are known, else at the slowest
    ones."""
    if name == "exchange":
        return CollectiveChoice(name, _grouped(size, group))
    if name == "backend":
        if group.is_on_one_node:
            return CollectiveChoice(name, _in_memory(kind, size, group).seconds)
        flat, seconds = _flat(group), ring.half_seconds if kind == "all_gather" else ring.all_reduce_seconds
        return CollectiveChoice(name, seconds(flat.members, size, flat.hop, flat.per_byte))
    spelled = "hierarchical+ring" if name == "hierarchical" and kind == "all_reduce" else name
    for choice in algorithm_choices(kind, size, group):
        if choice.algorithm == spelled:
            return CollectiveChoice(name, choice.seconds)
    place, links = _as_links(group)
    return CollectiveChoice(name, find_algorithm(name).methods[kind].seconds(place, size, links))


def _as_links(group: AxisGroup) -> tuple[Arrangement, Links]:
    """A group as the formulas of `weft.comm.algorithms` see it: ranks of nodes, and two kinds of links."""

    def slowest(legs: Sequence[Leg]) -> tuple[float, float]:
        return max(_far_latency(leg) for leg in legs), max(1 / leg.bandwidth for leg in legs)

    inside = [leg for leg in group.legs if leg.level.is_inside]
    of_node = math.prod(leg.units for leg in inside)
    of_node = of_node if group.size % of_node == 0 else 1
    place = flat_arrangement(group.size, nodes=(of_node,) * (group.size // of_node))
    latency, per_byte = slowest(group.legs)
    if not inside:
        return place, Links(latency=latency, per_byte=per_byte)
    inner_latency, inner_per_byte = slowest(inside)
    return place, Links(latency=latency, per_byte=per_byte, inner_latency=inner_latency, inner_per_byte=inner_per_byte)


# ── what weft probe measured ──────────────────────────────────────────────────────────────────────────────────────────


def _looked_up(kind: Collective, size_bytes: float, group: AxisGroup) -> float | None:
    """Seconds after measurements of the same kind on the only leg, or None without any.

    Between two sizes, and between two worlds, the logarithm of the time is taken to be straight; beyond the largest
    size the bandwidth stays, beyond the largest world the time grows with the ranks.
    """
    if len(group.legs) != 1 or group.legs[0].units != group.size and kind != "send":
        return None
    leg = group.legs[0]
    rows = [row for row in leg.level.measured if row.kind == kind]
    if not rows:
        return None
    busy = group.size * (min(group.siblings, max(1, leg.level.slots // group.size)) if kind != "send" else 1)
    members = {row.members for row in rows}
    fitting = [row for row in rows if row.members == group.size or group.size not in members]
    worlds: dict[int, list[CollectiveTime]] = {}
    for row in fitting:
        worlds.setdefault(row.members * row.groups, []).append(row)
    curve = [(float(world), _at_size(worlds[world], size_bytes)) for world in sorted(worlds)]
    return _on_line(curve, float(busy)) * leg.level.slowdown


def _at_size(rows: Sequence[CollectiveTime], size_bytes: float) -> float:
    points = sorted((float(row.size_bytes), row.seconds) for row in rows)
    if size_bytes <= points[0][0]:
        return points[0][1]
    return _on_line(points, size_bytes)


def _on_line(points: Sequence[tuple[float, float]], at: float) -> float:
    """Interpolate logarithms; before the first point its value, beyond the last in proportion."""
    if at <= points[0][0]:
        return points[0][1]
    if at >= points[-1][0]:
        return points[-1][1] * at / points[-1][0]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if at <= x1:
            share = math.log(at / x0) / math.log(x1 / x0)
            return y0 * (y1 / y0) ** share
    raise AssertionError("the loop covers all points")

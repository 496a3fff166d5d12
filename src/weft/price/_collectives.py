"""Seconds of a collective over a group: the cheapest algorithm that its links allow, or what was measured."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.cluster import Collective, CollectiveTime
from weft.collective import (
    bruck,
    direct,
    double_ring,
    double_tree,
    halving_doubling,
    one_shot,
    recursive_doubling,
    ring,
    scatter,
    tree,
)
from weft.price import _algorithms as cost
from weft.price._placement import CostLine, Group, Leg

_COPIES = {"all_reduce": 1.0, "reduce_scatter": 0.5, "all_gather": 0.5, "all_to_all": 0.5, "broadcast": 0.5}
"""Of γ: an all-reduce passes over its tensor twice, the others once."""

HalfCost = Callable[[int, float, float, float], float]


class Choice(NamedTuple):
    """One way to do a collective."""

    algorithm: str
    """`ring`, `tree`, …; `hierarchical` names that of the outermost leg too: `hierarchical+ring`."""
    seconds: float


@dataclass(frozen=True, slots=True)
class _Flat:
    """A group with all its legs taken for one link."""

    members: int
    hop: float
    """Mean latency around a ring that visits unit after unit."""
    depth: float
    """Latency of ⌈log₂⌉ steps over every leg, over ⌈log₂n⌉."""
    slowest: float
    """Latency of the farthest pair."""
    per_byte: float
    """Of what one member sends around a ring, at the leg where it takes longest."""
    rings: int


def collective_seconds(kind: Collective, size_bytes: float, group: Group) -> float:
    """Return the seconds of one collective: the least of its algorithms, all sibling groups working at the same time.

    `size_bytes` counts the whole tensor on one rank: what all_reduce, reduce_scatter, all_to_all, broadcast and send
    take, and what all_gather returns.  Links that `weft probe` has measured are looked up; formulas price the rest.
    """
    return choose_algorithm(kind, size_bytes, group).seconds


def choose_algorithm(kind: Collective, size_bytes: float, group: Group) -> Choice:
    """Return the cheapest algorithm and its seconds."""
    if group.size < 2 or size_bytes <= 0 or not group.legs:
        return Choice("none", 0.0)
    known = _looked_up(kind, size_bytes, group)
    if known is not None:
        return Choice("measured", known)
    if group.is_affine:
        lines = group.lines.get(kind) or _lines(kind, group)
        return min((Choice(name, fixed + slope * size_bytes) for name, fixed, slope in lines), key=_seconds)
    best = min(algorithm_choices(kind, size_bytes, group), key=_seconds)
    return Choice(best.algorithm, best.seconds + _fixed(kind, size_bytes, group))


def _lines(kind: Collective, group: Group) -> tuple[CostLine, ...]:
    """Work out every algorithm at two sizes, and keep the lines through them in the group."""
    far = 1e12
    low, high = (algorithm_choices(kind, size, group) for size in (0.0, far))
    start, copies = _fixed(kind, 0.0, group), _fixed(kind, far, group)
    found = tuple(
        CostLine(a.algorithm, a.seconds + start, (b.seconds - a.seconds + copies - start) / far)
        for a, b in zip(low, high, strict=True)
    )
    group.lines[kind] = found
    return found


def _seconds(choice: Choice) -> float:
    return choice.seconds


def algorithm_choices(kind: Collective, size_bytes: float, group: Group) -> Iterator[Choice]:
    """Every algorithm that the group's links allow, without starting and copying, which all of them share."""
    if kind == "send":
        # Neighbours of a larger group are apart by its outermost leg at worst; between rails a pair has two legs.
        legs = group.legs if group.size == 2 else group.legs[-1:]
        yield Choice("send", sum(cost.point_to_point(size_bytes, leg.latency, 1 / leg.pair) for leg in legs))
        return
    flat = _flat(group)
    if kind == "all_reduce":
        choices = _all_reduce_choices(size_bytes, group, flat)
    elif kind == "broadcast":
        choices = _broadcast_choices(size_bytes, group, flat)
    elif kind == "all_to_all":
        choices = _all_to_all_choices(size_bytes, group, flat)
    else:
        choices = _half_choices(size_bytes, group, flat)
    for choice in choices:
        if _is_allowed(choice, group):
            yield choice


def _is_allowed(choice: Choice, group: Group) -> bool:
    return group.algorithms is None or group.algorithms.issuperset(choice.algorithm.split("+"))


def _fixed(kind: Collective, size_bytes: float, group: Group) -> float:
    """Starting, and the passes over memory that run beside no link."""
    start = max(leg.level.start for leg in group.legs)
    if kind == "send":
        return start
    return start + _COPIES[kind] * size_bytes * group.seconds_per_copied_byte


def _flat(group: Group) -> _Flat:
    outermost = len(group.legs) - 1
    hops, depth, left = 0.0, 0.0, group.size
    for index, leg in enumerate(group.legs):
        after = 1 if index == outermost else max(1, left // leg.units)
        hops += (left - after + (index == outermost)) * leg.latency
        is_chain = group.algorithms is not None and leg.level.tier == 0  # NCCL's trees are chains inside a node
        depth += (leg.units - 1 if is_chain else (leg.units - 1).bit_length()) * leg.latency
        left = after
    steps = (group.size - 1).bit_length()
    return _Flat(
        members=group.size,
        hop=hops / group.size,
        depth=depth / steps,
        slowest=max(leg.latency for leg in group.legs),
        per_byte=max(1 / (leg.ring * leg.members) for leg in group.legs),
        rings=min(leg.rings for leg in group.legs),
    )


def _all_reduce_choices(size: float, group: Group, flat: _Flat) -> Iterator[Choice]:
    n = flat.members
    if len(group.legs) == 1:
        yield from _leg_all_reduces(size, group.legs[0])
    else:
        yield from _hierarchical(size, group)
        yield Choice("ring", ring.all_reduce_seconds(n, size, flat.hop, flat.per_byte))
        if flat.rings > 1:
            yield Choice("double_ring", double_ring.all_reduce_seconds(n, size, flat.hop, flat.per_byte))
        if _is_torus(group):
            yield Choice("torus", _torus_seconds(size, group))
    if all(leg.level.topology == "switch" for leg in group.legs):
        yield Choice("double_tree", double_tree.all_reduce_seconds(n, size, flat.depth, flat.per_byte))
    yield Choice("recursive_doubling", sum(_doubling(size, leg) for leg in group.legs))


def _doubling(size: float, leg: Leg) -> float:
    return recursive_doubling.all_reduce_seconds(leg.units, size, leg.latency, 1 / min(leg.pair, leg.ring))


def _leg_all_reduces(size: float, leg: Leg) -> Iterator[Choice]:
    """All-reduce among the units of one leg; every member of a unit holds a tensor of its own."""
    n = leg.units
    yield Choice("ring", ring.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.rings > 1:
        yield Choice("double_ring", double_ring.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    far = _far_latency(leg)
    yield Choice("direct", direct.all_reduce_seconds(n, size, far, 1 / leg.bandwidth))
    yield Choice("one_shot", one_shot.all_reduce_seconds(n, size, far, 1 / leg.bandwidth))
    if leg.level.topology == "switch":
        yield Choice("halving_doubling", halving_doubling.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
        yield Choice("tree", tree.all_reduce_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.level.in_network:
        yield Choice("in_network", cost.in_network_all_reduce(n, size, leg.latency, 1 / leg.ring))


def _hierarchical(size: float, group: Group) -> Iterator[Choice]:
    """Reduce-scatter leg by leg outwards, all-reduce among the outermost units, gather on the way back.

    Σ 2·half(uⱼ, S/Πinner) + all_reduce(u, S/Πinner): Jain and Sabharwal's bucket algorithm, one leg at a time; the
    members of a unit send through its uplink side by side.
    """
    seconds, part = 0.0, size
    for leg, outer in zip(group.legs, group.legs[1:], strict=False):
        seconds += 2 * _leg_half(part, leg, group)
        part = size / outer.members
    for choice in _leg_all_reduces(part, group.legs[-1]):
        yield Choice(f"hierarchical+{choice.algorithm}", seconds + choice.seconds)


def _leg_half(size: float, leg: Leg, group: Group) -> float:
    """Reduce-scatter or all-gather among the units of one leg."""
    return min(choice.seconds for choice in _leg_halves(size, leg) if _is_allowed(choice, group))


def _leg_halves(size: float, leg: Leg) -> Iterator[Choice]:
    n = leg.units
    yield Choice("ring", ring.half_seconds(n, size, leg.latency, 1 / leg.ring))
    yield Choice("direct", direct.half_seconds(n, size, _far_latency(leg), 1 / leg.bandwidth))
    if leg.rings > 1:
        yield Choice("double_ring", double_ring.half_seconds(n, size, leg.latency, 1 / leg.ring))
    if leg.level.topology == "switch":
        yield Choice("halving_doubling", halving_doubling.half_seconds(n, size, leg.latency, 1 / leg.ring))


def _half_choices(size: float, group: Group, flat: _Flat) -> Iterator[Choice]:
    """Reduce-scatter and all-gather, which cost the same."""
    n = flat.members
    if len(group.legs) == 1:
        yield from _leg_halves(size, group.legs[0])
        return
    yield Choice("ring", ring.half_seconds(n, size, flat.hop, flat.per_byte))
    if flat.rings > 1:
        yield Choice("double_ring", double_ring.half_seconds(n, size, flat.hop, flat.per_byte))
    yield Choice("hierarchical", sum(_leg_half(size / leg.members, leg, group) for leg in group.legs))
    if _is_torus(group):
        yield Choice("torus", _torus_seconds(size, group) / 2)


def _is_torus(group: Group) -> bool:
    return all(leg.level.is_torus for leg in group.legs)


def _torus_seconds(size: float, group: Group) -> float:
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


def _broadcast_choices(size: float, group: Group, flat: _Flat) -> Iterator[Choice]:
    n = flat.members
    yield Choice("tree", sum(tree.broadcast_seconds(leg.units, size, leg.latency, 1 / leg.pair) for leg in group.legs))
    yield Choice("ring", ring.broadcast_seconds(n, size, flat.hop, flat.per_byte))
    yield Choice("scatter", scatter.broadcast_seconds(n, size, flat.hop, flat.per_byte))
    if all(leg.level.topology == "switch" for leg in group.legs):
        yield Choice("double_tree", double_tree.broadcast_seconds(n, size, flat.depth, flat.per_byte))
    if len(group.legs) == 1 and group.legs[0].level.in_network:
        yield Choice("in_network", cost.in_network_broadcast(n, size, flat.slowest, flat.per_byte))


def _all_to_all_choices(size: float, group: Group, flat: _Flat) -> Iterator[Choice]:
    n = flat.members
    latency = max(_far_latency(leg) for leg in group.legs)
    issue = direct.all_to_all_seconds(n, 0.0, latency, 0.0)
    loads, below = list[float](), 1
    for index, leg in enumerate(group.legs):
        within = n if index == len(group.legs) - 1 else min(n, below * leg.units)
        # Parts for ranks that this leg is the innermost to reach, evened out to the leg's own all-to-all bandwidth.
        loads.append((within - below) / n * size / leg.bandwidth)
        below = within
    rails = any(leg.level.is_rails for leg in group.legs)
    yield Choice("grouped", issue + (sum(loads) if rails else max(loads)))
    phases = [direct.all_to_all_seconds(leg.units, size, _far_latency(leg), 1 / leg.bandwidth) for leg in group.legs]
    if len(phases) > 1:
        yield Choice("hierarchical", sum(phases))
    jumps = [bruck.all_to_all_seconds(leg.units, size, leg.latency, 1 / leg.pair) for leg in group.legs]
    yield Choice("bruck", sum(jumps))


def _far_latency(leg: Leg) -> float:
    """To the farthest unit: half of the circle on a double ring, all of it on a ring."""
    if leg.level.topology == "double_ring":
        return leg.latency * max(1, leg.units // 2)
    return leg.latency * (leg.units - 1 if leg.level.topology == "ring" else 1)


# ── what weft probe measured ──────────────────────────────────────────────────────────────────────────────────────────


def _looked_up(kind: Collective, size_bytes: float, group: Group) -> float | None:
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

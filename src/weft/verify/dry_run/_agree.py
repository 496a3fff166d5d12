"""Checks that ranks which share a group would start the same operations on it; otherwise a job hangs or is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest

from weft.config.plan import AXES, Axis, MeshPlan, axis_coordinates
from weft.verify.dry_run._collective_recorder import IssuedCollective
from weft.verify.dry_run._dry_run import RankReport

_MESSAGES = ("send", "receive")


def peers_to_ask(mesh: MeshPlan, rank: int) -> tuple[int, ...]:
    """Return the rank's next neighbour on every axis that has one: enough to see each of its groups from two sides."""
    neighbours: list[int] = []
    place = axis_coordinates(mesh, rank)
    for axis in AXES:
        size = int(getattr(mesh, axis)) if axis != "expert" else 1
        if size > 1:
            neighbours.append(rank_at(mesh, {**place, axis: (place[axis] + 1) % size}))
    return tuple(dict.fromkeys(neighbours))


def disagreements(one: RankReport, other: RankReport) -> list[str]:
    """Return, for every group that both ranks are in, the first operation that they would not start alike."""
    problems: list[str] = []
    # Group by group, because a backend keeps the order within a group alone; between groups ranks may differ.
    mine, theirs = _by_group(one.issued), _by_group(other.issued)
    for ranks in mine.keys() | theirs.keys():
        if one.rank not in ranks or other.rank not in ranks:
            continue
        for number, (a, b) in enumerate(zip_longest(mine.get(ranks, []), theirs.get(ranks, []))):
            if _signature(a) != _signature(b):
                problems.append(
                    f"operation {number} over {_axis(a, b)} ({len(ranks)} ranks): rank {one.rank} starts {_spell(a)},"
                    f" rank {other.rank} {_spell(b)}"
                )
                break
    return sorted(problems)


def _by_group(issued: tuple[IssuedCollective, ...]) -> dict[tuple[int, ...], list[IssuedCollective]]:
    """Collectives by group.  Messages are no part of this: their two ends differ by nature."""
    by_group: dict[tuple[int, ...], list[IssuedCollective]] = {}
    for one in issued:
        if one.op not in _MESSAGES:
            by_group.setdefault(one.ranks, []).append(one)
    return by_group


def _signature(one: IssuedCollective | None) -> tuple[object, ...] | None:
    if one is None:
        return None
    size_bytes = None if one.op == "all_to_all" else one.size_bytes  # of an exchange each has what it has
    return one.op, size_bytes, one.dtype, one.peer


def _axis(a: IssuedCollective | None, b: IssuedCollective | None) -> str:
    known = a or b
    assert known is not None
    return known.axis


def _spell(one: IssuedCollective | None) -> str:
    if one is None:
        return "nothing more"
    return f"{one.op} of {one.size_bytes:,} bytes of {str(one.dtype).removeprefix('torch.')}"


def rank_at(mesh: MeshPlan, place: Mapping[Axis, int]) -> int:
    """Return the rank that stands at these coordinates: the inverse of `axis_coordinates`."""
    rank = 0
    for axis in mesh.order:
        if axis != "expert":
            rank = rank * int(getattr(mesh, axis)) + place[axis]
    return rank

"""Groups of a mesh: the ranks that differ in some of its axes only. No torch."""

from __future__ import annotations

import math
from collections.abc import Collection

from weft.config.plan._plan import Axis, MeshPlan
from weft.errors import PlanError
from weft.techniques.expert.settings import EXPERT_LENDERS


def groups_over(mesh: MeshPlan, axes: Collection[Axis], holding: Collection[Axis] = ()) -> tuple[tuple[int, ...], ...]:
    """Return all groups of ranks that differ in `axes` alone, and not in what they have of `holding`; ranks rise.

    Raises:
        PlanError: the expert axis does not divide the ranks that it borrows.
    """
    # Ranks of a group agree in every digit that no axis of the group moves.
    fixed = [
        (size, stride)
        for owners, size, stride in _digits(mesh)
        if owners.isdisjoint(axes) or not owners.isdisjoint(holding)
    ]
    parts: dict[tuple[int, ...], list[int]] = {}
    for rank in range(mesh.world_size):
        parts.setdefault(tuple(rank // stride % size for size, stride in fixed), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


def _digits(mesh: MeshPlan) -> list[tuple[frozenset[Axis], int, int]]:
    """A rank's number as digits, fastest first: (axes that a digit belongs to, its size, ranks from one to the next).

    Every axis is one digit, but a lender of experts may be two, of which the faster is shared with `expert`: it borrows
    of the lender just outside of it in the mesh's order first.
    """
    place = mesh.order.index("expert")
    lenders: list[Axis] = [a for a in (*mesh.order[:place][::-1], *mesh.order[place + 1 :]) if a in EXPERT_LENDERS]
    lent: dict[Axis, int] = {}
    experts = mesh.expert
    # Experts borrow from the lender next to them as much as it has in common with their number, and the rest from the
    # next one.
    for axis in lenders:
        lent[axis] = math.gcd(int(getattr(mesh, axis)), experts)
        experts //= lent[axis]
    if experts > 1:
        raise PlanError(
            f"plan.mesh.expert = {mesh.expert} does not divide {' × '.join(EXPERT_LENDERS)} = {mesh.expert_room}, from"
            " which experts borrow their ranks. Use a divisor of it."
        )
    digits: list[tuple[frozenset[Axis], int, int]] = []
    stride = 1
    for axis in reversed(mesh.order):
        if axis != "expert":
            size, part = int(getattr(mesh, axis)), lent.get(axis, 1)
            digits.append((frozenset((axis, "expert")), part, stride))
            digits.append((frozenset((axis,)), size // part, stride * part))
            stride *= size
    return digits

"""Which plans can be timed one after another in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.config.plan import Plan

Team = tuple[int, Literal["auto", "gloo", "weft"]]


def teams_of(plans: Sequence[Plan]) -> list[Team]:
    """The worlds and backends that occur; ranks of the first team come first, then those of the next."""
    return list(dict.fromkeys(map(team_of, plans)))


def team_of(plan: Plan) -> Team:
    """What plans must have in common to run in the same processes: the size of the world, and what carries it."""
    return plan.mesh.world_size, plan.compute.backend

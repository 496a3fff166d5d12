"""Groups plans into teams: those of one team can be timed one after another in the same processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.config.plan import Plan

Team = tuple[int, Literal["auto", "gloo", "weft"]]


def teams_of(plans: Sequence[Plan]) -> list[Team]:
    """The worlds and backends that occur; ranks of the first team come first, then those of the next."""
    return list(dict.fromkeys(map(team_of, plans)))


def team_of(plan: Plan) -> Team:
    """Return the key of a plan's team, which holds all that plans of one process must share: world size and backend."""
    return plan.mesh.world_size, plan.compute.backend

"""Local steps (local SGD, DiLoCo): what replicas hold for them, and with what they cannot be joined."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.plan._plan import DataParallelPlan, Plan

OUTER_LEARNING_RATE, OUTER_MOMENTUM = 0.7, 0.9
"""Defaults: those of DiLoCo (Douillard et al., arXiv 2311.08105, §3)."""


def outer_copies(data: DataParallelPlan) -> int:
    """Return how many copies of its masters a rank keeps for local steps: the anchor, and the outer momentum if there
    is any."""
    if not data.local_steps:
        return 0
    return 2 if data.outer_momentum else 1


def local_conflicts(plan: Plan) -> Iterator[str]:
    """Yield why a plan's local steps cannot be joined with its other settings, with the change to make."""
    mesh, data = plan.mesh, plan.data_parallel
    named = f"plan.data_parallel.local_steps = {data.local_steps}"
    if not data.local_steps:
        return
    if data.compression != "none":
        yield (
            f'{named} cannot join data_parallel.compression = "{data.compression}": between replicas no gradients'
            ' travel any more, and inside a replica links are fast. Use compression = "none", or local_steps = 0.'
        )
    if data.zero in (1, 2) and mesh.shard == 1:
        yield (
            f"{named} cannot join data_parallel.zero = {data.zero} with mesh.shard = 1: replicas step by themselves, so"
            " each holds its whole optimizer state, and there is nobody to share it with. Use zero = 0, or mesh.shard"
            " = 2 or more."
        )
    if data.algorithm != "auto":
        yield (
            f'{named} cannot join data_parallel.algorithm = "{data.algorithm}": it chooses how gradients are summed'
            ' over all data ranks, and they are not. Use algorithm = "auto".'
        )

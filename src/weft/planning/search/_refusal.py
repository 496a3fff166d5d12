"""The error where no plan was found: too little memory, or processes that cannot share the batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from weft.config.cluster import Cluster
from weft.config.plan import Plan
from weft.errors import PlanError
from weft.formatting import format_memory, format_number
from weft.model.profile import Profile
from weft.planning.search._result import Candidate
from weft.techniques.check import mesh_sizes, runnability

Find = Callable[[Cluster, int | None], Sequence[Candidate]]
"""Candidates on a cluster for exactly so many processes, or for as many as are of use."""

_ROOMIEST = 2.0**20
"""Times the cluster's memory: more than any model needs."""
_CLOSE = 1.05
"""How close to the least memory is close enough, as a ratio."""


def no_plan(find: Find, cluster: Cluster, processes: int | None, profile: Profile, batch: int, pins: Plan) -> PlanError:
    """Return why `find` finds nothing, with the change to make: it is asked again with more memory, and with fewer
    processes."""
    if not find(cluster.with_memory(_ROOMIEST), processes):
        return _nothing_at_all(find, cluster, processes, profile, batch, pins)
    least = _least(find, cluster, processes)
    need, kinds, plan = least.prediction.fullest.device, least.prediction.fullest.kinds, least.plan
    assert plan is not None
    usable = cluster.usable_memory_bytes
    devices = math.ceil(plan.mesh.world_size * need / usable)
    states = kinds.weights + kinds.gradients + kinds.optimizer
    parts = (("states", states), ("activations", kinds.activations), ("logits", kinds.logits))
    listed = ", ".join(f"{part} {format_number(size / 2**30)}" for part, size in parts)
    what = f"a {profile.name} of {profile.num_parameters:,} parameters"
    return PlanError(
        f"No plan fits: {what} needs about {format_memory(need)} per process"
        f" ({mesh_sizes(plan)}, {plan.data_parallel.stage_name}, {plan.memory.recompute_line}: {listed}), and"
        f" {format_memory(usable)} can be used.\nUse about {devices:,} devices of this size, or a smaller model."
    )


def _least(find: Find, cluster: Cluster, processes: int | None) -> Candidate:
    """The candidate that needs least memory, by halving what lies between too little and enough."""
    times = 2.0
    while not (candidate := find(cluster.with_memory(times), processes)):
        times *= 2
    least = min(candidate, key=_bytes_of)
    too_little, enough = times / 2, _bytes_of(least) / cluster.usable_memory_bytes
    while enough > _CLOSE * too_little:
        middle = (too_little * enough) ** 0.5
        candidate = find(cluster.with_memory(middle), processes)
        if not candidate:
            too_little = middle
            continue
        least = min(candidate, key=_bytes_of)
        enough = min(middle, _bytes_of(least) / cluster.usable_memory_bytes)
    return least


def _bytes_of(candidate: Candidate) -> float:
    return candidate.prediction.fullest.device


def _nothing_at_all(
    find: Find, cluster: Cluster, processes: int | None, profile: Profile, batch: int, pins: Plan
) -> PlanError:
    # Settings that the engine cannot run are in no space that is searched: each technique says so of itself.
    if reasons := runnability(pins):
        return PlanError("\n".join(reasons))
    roomy = cluster.with_memory(_ROOMIEST)
    fewer = range((processes or 1) - 1, 0, -1)
    usable = next((number for number in fewer if find(roomy, number)), None)
    if usable is not None:
        return PlanError(
            f"processes = {processes} cannot share the recipe's global_batch_size = {batch} exactly, and the"
            f" {profile.name} cannot be cut into enough parts.\nUse processes = {usable}."
        )
    fixed = ", ".join(f"plan.{key}" for key in pins.origins)
    problem = f"No plan for a {profile.name} has all of {fixed} as they were given, with global_batch_size = {batch}."
    if profile.facts.has_batch_norm and any(key.startswith("microbatch") for key in pins.origins):
        return PlanError(
            f"{problem} Its BatchNorm takes the statistics of the whole batch, so that gradients cannot accumulate over"
            " several microbatches: take one, or call eval() of each BatchNorm beforehand, which then takes none."
        )
    return PlanError(f"{problem} Leave one of them out.")

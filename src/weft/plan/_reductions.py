"""How often a step reduces gradients over the data ranks: after every microbatch, or once.

Under ZeRO-2 and 3 a rank keeps its share of the summed gradients.  Reduced after every microbatch, nothing else
outlives a backward, and each microbatch sends all gradients.  Reduced once per step, they travel once and stay whole
until then: between a step's first backward and its last nothing of what these stages save of gradients is saved.
"""

from __future__ import annotations

from typing import Literal

from weft.document import spell
from weft.plan._plan import Plan
from weft.plan._schedules import SPLIT_BACKWARD

ReduceEvery = Literal["auto", "step", "microbatch"]


def reduction_rounds(plan: Plan) -> int:
    """Return how many microbatches of a step end with a reduction, the same on all data ranks, 1 or more.

    Collectives must match, so data ranks with unequal shares reduce as often as the one with the fewest microbatches
    has some; what the others compute before that stays whole until their first reduction.
    """
    return min(plan.microbatch.shares(plan.mesh.data)) if reduces_every_microbatch(plan) else 1


def reduces_every_microbatch(plan: Plan) -> bool:
    """Whether gradients are reduced after every microbatch: what the plan says, and under `auto` ZeRO-2 and 3 without a
    pipeline, whose microbatches follow so close on one another that once per step is usual."""
    if plan.data_parallel.reduce_every == "auto":
        return plan.data_parallel.zero >= 2 and plan.mesh.pipeline == 1
    return plan.data_parallel.reduce_every == "microbatch"


def keeps_whole_gradients(plan: Plan) -> bool:
    """Whether some rank holds all of its gradients between two microbatches although ZeRO-2 or 3 shares them out."""
    shares = plan.microbatch.shares(plan.mesh.data)
    return plan.data_parallel.zero >= 2 and max(shares) > reduction_rounds(plan)


def reduction_conflict(plan: Plan) -> str | None:
    """Return why gradients cannot be reduced as often as the plan says, with the change to make."""
    data, chosen = plan.data_parallel, plan.pipeline_parallel
    if data.reduce_every != "microbatch":
        return None
    if data.zero < 2:
        problem = f"has no effect with zero = {data.zero}: every rank keeps whole gradients, which meet once per step."
        return f'{problem}\nUse "auto", or zero = 2 or 3.'
    if plan.mesh.pipeline == 1:
        return None
    if data.zero == 2:
        problem = "cannot join mesh.pipeline > 1 with zero = 2: buckets of gradients fill up over all microbatches."
        return f'{problem}\nUse "step", or zero = 3.'
    if chosen.schedule in SPLIT_BACKWARD:
        problem = f'cannot join schedule = "{chosen.schedule}": weight gradients come in passes of their own, after the'
        return f'{problem} backward that would reduce them.\nUse "step", or schedule = "1f1b".'
    if chosen.chunks_per_rank > 1 and len(set(plan.microbatch.shares(plan.mesh.data))) > 1:
        problem = (
            f"cannot join chunks_per_rank = {chosen.chunks_per_rank} with unequal shares, per_step = "
            f"{spell(plan.microbatch.per_step)}: data ranks would reduce their chunks in different orders."
        )
        return f'{problem}\nUse "step", or equal shares.'
    return None

"""ZeRO: what a rank keeps of each stage, when gradients are reduced, and what cannot be joined with them.

Source: Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (arXiv 1910.02054).
Under stages 2 and 3 a rank keeps its share of the summed gradients.  Reduced after every microbatch, nothing else
outlives a backward, and each microbatch sends all gradients.  Reduced once per step, they travel once and stay whole
until then: between a step's first backward and its last nothing of what these stages save of gradients is saved.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, final

from weft.config.document import format_value
from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique
from weft.techniques.zero.settings import ZERO_KEY, ZeroSettings


class Shares(NamedTuple):
    """What a data rank keeps between steps: 1, or its share.  Numbers, or arrays of as many candidates."""

    weights: Any
    gradients: Any
    """Once they are reduced."""
    states: Any
    """Masters and what the optimizer keeps."""


def shares_of(stage: int, ranks: Any) -> Shares:
    """Return what each of `ranks` data ranks keeps (figure 1 of the paper).  `ranks`: a number or an array."""
    part = 1.0 / ranks
    return Shares(*(part if stage >= least else 1.0 for least in (3, 2, 1)))


def _without(plan: Plan) -> Plan:
    if plan.mesh.data * plan.mesh.context == 1:
        return plan
    mesh = replace(plan.mesh, replicate=plan.mesh.data, shard=1)
    return replace(plan, mesh=mesh, data_parallel=plan.data_parallel.unsharded())


@final
class Zero(Technique):
    """Data ranks that share out what each of them would hold."""

    name = "ZeRO"
    part = ZeroSettings
    ablations = (Ablation("ZeRO", _without),)

    def sends(self, plan: Plan) -> bool:
        return plan.data_parallel.shards_weights and plan.mesh.shard * plan.mesh.context > 1

    def check(self, case: Case) -> None:
        mesh, data = case.plan.mesh, case.plan.data_parallel
        if not data.shards_states and mesh.shard > 1 and mesh.expert == 1:  # else experts are shared out
            problem = f"has nothing to shard with data_parallel.zero = 0.\nUse replicate = {mesh.data} and shard = 1,"
            raise case.refuse(("mesh", "shard"), f"{problem} or zero = 1, 2 or 3.")
        if data.shards_weights and mesh.shard == 1 and mesh.replicate > 1:
            problem = "shards the weights over mesh.shard only, which is 1: every rank would hold all of them."
            fix = f"Use replicate = 1 and shard = {mesh.replicate}, or zero = 1 or 2, which shard over replicate ×"
            raise case.refuse(("data_parallel", "zero"), f"{problem}\n{fix} shard.")
        adapter = case.recipe.model.adapter
        if data.shards_weights and mesh.shard > 1 and adapter is not None and adapter.base != "plain":
            problem = f"would cut and cast frozen weights, which model.adapter.base holds as {adapter.base} codes."
            fix = "Use zero = 1 or 2, tensor ranks or pipeline stages, which take them as they are."
            raise case.refuse(("data_parallel", "zero"), f"{problem}\n{fix}")
        conflict = reduction_conflict(case.plan)
        if conflict is not None:
            raise case.refuse(("data_parallel", "reduce_every"), conflict)

    def search_values(self, plan: Plan) -> Mapping[str, tuple[Any, ...]]:
        # ZeRO-1 and 2 share out over data ranks what each replica of local steps keeps for itself.
        return {ZERO_KEY: (0, 3)} if plan.data_parallel.replicas_step_alone and plan.mesh.shard == 1 else {}

    def lighter_settings(self, settings: ZeroSettings) -> Iterator[str]:
        yield from (f"zero={stage}" for stage in range(settings.zero + 1, 4))
        if settings.shards_weights and settings.reduce_every != "microbatch":
            yield "reduce_every=microbatch"

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.pipeline > 1 and reduces_every_microbatch(plan):
            yield (
                'plan.data_parallel.reduce_every = "microbatch": torch\'s own schedules reduce gradients once per step.'
                ' Use "step".'
            )
        if plan.data_parallel.shards_gradients and plan.microbatch.has_unequal_shares:
            yield (
                f"plan.microbatch.per_step = {format_value(plan.microbatch.per_step)}: `fully_shard` communicates in"
                " every microbatch, so ranks with fewer of them would be waited for. Use equal shares, or zero = 1."
            )


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
        return plan.data_parallel.shards_gradients and plan.mesh.pipeline == 1
    return plan.data_parallel.reduce_every == "microbatch"


def reduction_conflict(plan: Plan) -> str | None:
    """Return why gradients cannot be reduced as often as the plan says, with the change to make."""
    data, chosen = plan.data_parallel, plan.pipeline_parallel
    if data.reduce_every != "microbatch":
        return None
    if not data.shards_gradients:
        problem = f"has no effect with zero = {data.zero}: every rank keeps whole gradients, which meet once per step."
        return f'{problem}\nUse "auto", or zero = 2 or 3.'
    if plan.mesh.pipeline == 1:
        return None
    if not data.shards_weights:
        problem = "cannot join mesh.pipeline > 1 with zero = 2: buckets of gradients fill up over all microbatches."
        return f'{problem}\nUse "step", or zero = 3.'
    if chosen.splits_backward:
        problem = f"cannot join {chosen.schedule_setting}: weight gradients come in passes of their own, after the"
        return f'{problem} backward that would reduce them.\nUse "step", or schedule = "1f1b".'
    if chosen.chunks_per_rank > 1 and len(set(plan.microbatch.shares(plan.mesh.data))) > 1:
        problem = (
            f"cannot join chunks_per_rank = {chosen.chunks_per_rank} with unequal shares, per_step = "
            f"{format_value(plan.microbatch.per_step)}: data ranks would reduce their chunks in different orders."
        )
        return f'{problem}\nUse "step", or equal shares.'
    return None

"""Fill the settings that a given plan leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.config.plan._plan import Plan
from weft.config.recipe import Recipe
from weft.techniques.compute.settings import THREADS
from weft.techniques.data.settings import MicrobatchPlan

_SIZE = "microbatch.size"
_NUMBER = "microbatch.per_step"


def over_ranks(plan: Plan, num_ranks: int | None, *, num_accelerators: int | None = None) -> Plan:
    """Return a plan that leaves an axis of data ranks open with the ranks that no other axis takes.

    Under ZeRO-3 and with experts that is `shard`, and `replicate` where the plan names the shards; otherwise it is
    `replicate`.  A plan that names both, or whose ranks do not divide `num_ranks`, is returned as it is.

    Args:
        num_ranks: of the job; None where nobody has said.
        num_accelerators: of the machine; then there is a rank for each, unless the plan computes on the CPU.
    """
    if num_ranks is None and plan.compute.device != "cpu":
        num_ranks = num_accelerators
    mesh = plan.mesh
    axes = ("shard", "replicate") if plan.data_parallel.shards_weights or mesh.expert > 1 else ("replicate",)
    axis = next((axis for axis in axes if getattr(mesh, axis) == 1 and f"mesh.{axis}" not in plan.origins), None)
    if not isinstance(num_ranks, int) or axis is None or num_ranks < 2 or num_ranks % mesh.world_size:
        return plan  # what is no number of ranks is refused where it is checked
    if num_ranks == mesh.world_size:
        return plan
    filled = replace(mesh, **{axis: num_ranks // mesh.world_size})
    return replace(plan, mesh=filled, origins={**plan.origins, f"mesh.{axis}": f"the job's {num_ranks} ranks"})


def filled_in(plan: Plan, recipe: Recipe) -> Plan:
    """Return a plan that leaves its microbatches open with those of the global batch, as far as it can be divided so:
    as many on each data rank as the plan says; otherwise one, or where stages follow one another as many as they are.
    """
    batch, ranks, number = recipe.batch.global_batch_size, plan.mesh.data, plan.microbatch.per_step
    is_open = plan.microbatch.size == 1 and _SIZE not in plan.origins
    if not is_open or not isinstance(number, int) or batch % ranks or batch == ranks:
        return plan
    share = batch // ranks
    why = f"a batch of {batch} over {ranks} data ranks" if ranks > 1 else f"the whole batch of {batch}"
    if number == 1 and _NUMBER not in plan.origins:
        microbatch = MicrobatchPlan.of_share(share, at_least=plan.mesh.pipeline)
    elif share % number == 0:
        microbatch = MicrobatchPlan(size=share // number, per_step=number)
    else:
        return plan
    return replace(plan, microbatch=microbatch, origins={**plan.origins, _SIZE: why})


def complete_plan(
    plan: Plan, recipe: Recipe, reasons: Mapping[str, str], threads: int | None, *, is_chosen: bool
) -> tuple[Plan, Mapping[str, str]]:
    """Return the plan with what it leaves open (`filled_in`) and the threads that the user's environment asks for,
    where the plan itself does not name them; and the reasons that still hold.

    Args:
        reasons: dotted key → why (from `choose_plan`).
        threads: what `OMP_NUM_THREADS` asks for; None: nothing.
        is_chosen: a search has made the plan, and its number of threads is nobody's wish.
    """
    plan = filled_in(plan, recipe)
    named = THREADS in plan.origins or (not is_chosen and plan.compute.num_threads != 1)
    if threads is None or named or plan.compute.num_threads == threads:
        return plan, reasons
    origins = {**plan.origins, THREADS: "OMP_NUM_THREADS"}
    plan = replace(plan, compute=plan.compute.with_threads(threads), origins=origins)
    return plan, {key: why for key, why in reasons.items() if key != THREADS}

"""What a plan that somebody gave leaves open, and what it becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.config.plan._plan import Plan
from weft.config.recipe import Recipe
from weft.techniques.compute.settings import THREADS
from weft.techniques.data.settings import MicrobatchPlan

_SIZE = "microbatch.size"


def filled_in(plan: Plan, recipe: Recipe) -> Plan:
    """Return a plan that says nothing of microbatches with those of the global batch: one for each data rank, or where
    stages follow one another as many as they are, as far as the batch can be divided so."""
    said = any(key.partition(".")[0] == "microbatch" for key in plan.origins)
    batch, ranks = recipe.batch.global_batch_size, plan.mesh.data
    if said or plan.microbatch != MicrobatchPlan() or batch % ranks or batch == ranks:
        return plan
    why = f"a batch of {batch} over {ranks} data ranks" if ranks > 1 else f"the whole batch of {batch}"
    microbatch = MicrobatchPlan.of_share(batch // ranks, at_least=plan.mesh.pipeline)
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

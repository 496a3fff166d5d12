"""What stands against ranks that share out experts: one sentence for contract and search.  No torch."""

from __future__ import annotations

from collections.abc import Iterator

from weft.config.recipe import Recipe
from weft.techniques.contract import Case, list_choices

_NOT_PROVEN = "the two have not been put together"
_ELEMENTWISE = ("adamw", "sgd")
"""Optimizers that look at no whole parameter."""


def model_problem(case: Case) -> str:
    """Return why ranks can share out no experts of this model in any plan: the end of a sentence, and the change to
    make; empty: they can."""
    if problem := _recipe_problem(case.recipe):
        return f"{problem}.\nUse 1."
    ranks, experts = case.plan.mesh.expert, case.facts.num_experts
    if experts == 0 and (reason := case.facts.why_not("expert")):
        return f"cannot share out the experts of a {case.facts.name}: {reason}.\nUse 1."
    if experts == 0:
        return f"has nothing to share out: a {case.facts.name} has no mixtures that ranks can take apart.\nUse 1."
    if experts is not None and experts % ranks:
        return f"does not divide {experts}, the experts of a mixture.\nUse {list_choices(choices_of(experts))}."
    return ""


def choices_of(experts: int) -> Iterator[int]:
    """Yield the numbers of ranks that can share out so many experts."""
    return (ranks for ranks in range(1, experts + 1) if experts % ranks == 0)


def plan_problem(case: Case) -> str:
    """Return which other setting of the plan ranks that share out experts cannot join: the end of a sentence, and the
    change to make; empty: none."""
    plan, data = case.plan, case.plan.data_parallel
    if plan.microbatch.has_unequal_shares:
        what = "cannot join unequal shares of microbatches: experts would wait for the tokens of ranks that have fewer."
        return f"{what}\nUse 1, or the same number for all data ranks."
    if plan.compute.compile:
        what = "cannot join compute.compile: what waits for the tokens of other ranks is no code for a compiler."
        return f"{what}\nUse 1, or compile = false."
    joined = {
        data.compression_setting: data.compresses,
        "rounds of local steps": data.replicas_step_alone,
        f'data_parallel.algorithm = "{data.algorithm}"': data.algorithm != "auto",
        f'tensor_parallel.scheme = "{plan.tensor_parallel.scheme}"': plan.tensor_parallel.scheme != "1d",
        "what waits elsewhere in memory": plan.memory.offloads,
        "a loss over all samples of a step": not case.facts.per_sample_loss,
    }
    named = next((name for name, is_there in joined.items() if is_there), None)
    return "" if named is None else f"cannot join {named}: {_NOT_PROVEN}.\nUse 1, or leave that out."


def _recipe_problem(recipe: Recipe) -> str:
    if recipe.model.adapter is not None:
        return f"cannot be had with model.adapter: {_NOT_PROVEN}"
    if recipe.optimizer.name not in _ELEMENTWISE:
        return (
            f'cannot be had with optimizer.name = "{recipe.optimizer.name}", which looks at whole parameters: what it'
            " sums over parts of stacked experts has not been proven"
        )
    return ""

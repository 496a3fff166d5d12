"""Context parallelism: its settings, and which models and plans it fits.

Sources: ring attention, Liu et al. 2023 (arXiv 2310.01889); Ulysses, Jacobs et al. 2023 (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, final

from weft.techniques.contract import Case, Removal, Technique
from weft.techniques.settings import setting

if TYPE_CHECKING:
    from weft.plan import Plan
    from weft.recipe import Recipe

TOKEN_LOSS = "tokens"
ContextScheme = Literal["ring", "all_gather", "ulysses"]


@dataclass(frozen=True, kw_only=True)
class ContextSettings:
    """The section `context_parallel`."""

    scheme: ContextScheme = setting("ring", layout="context_scheme", space="context_schemes", asked=("context_scheme",))
    """`ring`: keys and values go round; `all_gather`: all are gathered at once; `ulysses`: heads are exchanged for
    positions."""


def heads_problem(heads: int, kv_heads: int, *, tensor: int, ranks: int) -> str:
    """Return why `ranks` cannot exchange heads for tokens, each having as many; empty: they can."""
    from weft.techniques.context.shares import copies_of

    own, keys = heads // tensor, max(1, kv_heads // tensor)
    if own % ranks == 0 and copies_of(keys, ranks):
        return ""
    return f"gives no equal shares of {own} heads and {keys} heads of keys to {ranks} ranks under ulysses."


def length_problem(length: int, *, ranks: int, tensor: int, sequence: bool) -> str:
    """Return why `ranks` cannot share out `length` tokens, each two runs of them, and under sequence parallelism every
    tensor rank its part; empty: they can."""
    least = 2 * ranks * (tensor if sequence else 1)
    if length >= least:
        return ""
    parts = f" and {tensor} tensor ranks under sequence parallelism" if sequence and tensor > 1 else ""
    return f"needs samples of {least} tokens or more, two runs for each of {ranks} ranks{parts}: they have {length}."


def recipe_problem(recipe: Recipe) -> str:
    """Return what a recipe asks for that ranks which share a sequence have not got: the beginning of a sentence; empty:
    nothing."""
    if recipe.model.adapter is not None:
        return "cannot be had with model.adapter: the two have not been put together"
    if recipe.model.loss not in (None, TOKEN_LOSS):
        return (
            f'cannot be had with model.loss = "{recipe.model.loss}": a rank that has some of the tokens gets its sum'
            f' only of a loss that is a sum over tokens, as "{TOKEN_LOSS}" is'
        )
    return ""


def _without(plan: Plan) -> Plan:
    if plan.mesh.context == 1:
        return plan
    return replace(
        plan,
        mesh=replace(plan.mesh, context=1),
        context_parallel=replace(plan.context_parallel, scheme="ring"),
    )


@final
class Context(Technique):
    """One sequence on several ranks."""

    name = "context parallelism"
    part = ContextSettings
    removals = (Removal("context ranks", _without, frees_ranks=True),)
    judged_alone = ("mesh.context",)

    def runs(self, plan: Plan) -> bool:
        return plan.mesh.context > 1

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.context > 1:
            yield (
                f"plan.mesh.context = {plan.mesh.context} cannot be had in a loop of one's own, whose loss would need"
                " the labels of the tokens that a rank has. Use 1, or `weft train`."
            )

    def unwritten(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.context > 1:
            yield (
                f"plan.mesh.context = {plan.mesh.context}: torch's own context parallelism does not run on CPUs, and"
                " the script has no attention over ranks. Use 1."
            )

    def check(self, case: Case) -> None:
        plan = case.plan
        if plan.mesh.context == 1 and plan.context_parallel.scheme != "ring":
            problem = 'has no effect with mesh.context = 1.\nUse "ring", or more context ranks.'
            raise case.refuse(("context_parallel", "scheme"), problem)
        if plan.mesh.context > 1 and plan.compute.compile:
            problem = "cannot join mesh.context > 1: attention that waits for other ranks is no code for a compiler."
            raise case.refuse(("compute", "compile"), f"{problem}\nUse false, or mesh.context = 1.")

    def check_model(self, case: Case) -> None:
        ranks, facts, path = case.plan.mesh.context, case.facts, ("mesh", "context")
        if ranks == 1:
            return
        if problem := recipe_problem(case.recipe):
            raise case.refuse(path, f"{problem}.\nUse 1.")
        if facts.no_context:
            raise case.refuse(path, f"cannot be had for this model: {facts.no_context}.\nUse 1.")
        if facts.num_blocks is not None and facts.sequence_length is None:
            problem = f"has no sequence to share: samples of a {facts.name} are no sequences.\nUse 1."
            raise case.refuse(path, problem)
        swaps, heads = case.plan.context_parallel.scheme == "ulysses", facts.attention_heads
        if swaps and heads and (problem := heads_problem(*heads, tensor=case.plan.mesh.tensor, ranks=ranks)):
            raise case.refuse(path, f'{problem}\nUse context_parallel.scheme = "ring".')
        tensor, length = case.plan.mesh.tensor, facts.sequence_length
        sequence = case.plan.tensor_parallel.sequence
        if length and (problem := length_problem(length, ranks=ranks, tensor=tensor, sequence=sequence)):
            most = length // (2 * (tensor if sequence else 1))
            raise case.refuse(path, f"{problem}\nUse {max(1, most)}{' or less' if most > 1 else ''}.")

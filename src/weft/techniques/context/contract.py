"""Context parallelism: which models and plans it fits.

Sources: ring attention, Liu et al. 2023 (arXiv 2310.01889); Ulysses, Jacobs et al. 2023 (arXiv 2309.14509);
both at once, Fang and Zhao 2024 (arXiv 2405.07719).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from weft.config.plan import Plan
from weft.techniques.context.settings import ContextSettings
from weft.techniques.contract import Ablation, Case, Technique


def _without(plan: Plan) -> Plan:
    if plan.mesh.context == 1:
        return plan
    return replace(
        plan,
        mesh=replace(plan.mesh, context=1),
        context_parallel=replace(plan.context_parallel, scheme="ring", ulysses=0),
    )


@final
class Context(Technique):
    """One sequence on several ranks."""

    name = "context parallelism"
    part = ContextSettings
    ablations = (Ablation("context ranks", _without, frees_ranks=True),)
    judged_alone = ("mesh.context",)

    def runs(self, plan: Plan) -> bool:
        return plan.mesh.context > 1

    def sends(self, plan: Plan) -> bool:
        return plan.mesh.context > 1

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.context > 1:
            yield (
                f"plan.mesh.context = {plan.mesh.context} cannot be had in a loop of one's own: its loss would be given"
                " some tokens of each sample, where nothing says that it is a sum over tokens, and labels that it"
                " shifts itself, or a padding mask, would be lost at the cuts. Use 1 with mesh.tensor and"
                " tensor_parallel.sequence, or memory.recompute, for long samples; or `weft train`."
            )

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
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
        self._check_exchanging(case)

    def _check_exchanging(self, case: Case) -> None:
        ranks, settings = case.plan.mesh.context, case.plan.context_parallel
        among = [divisor for divisor in range(2, ranks) if ranks % divisor == 0]
        path = ("context_parallel", "ulysses")
        if settings.scheme != "usp":
            if settings.ulysses:
                raise case.refuse(path, f'has no effect with scheme = "{settings.scheme}".\nUse 0, or scheme = "usp".')
            return
        if not among:
            problem = f'is "usp", and {ranks} context ranks are no groups of neighbours.\nUse "ring", or "ulysses".'
            raise case.refuse(("context_parallel", "scheme"), problem)
        if settings.ulysses and settings.ulysses not in among:
            problem = f"is {settings.ulysses}, which makes no several groups of mesh.context = {ranks} ranks.\n"
            raise case.refuse(path, f"{problem}Use {', '.join(map(str, among))}, or 0.")

    def check_model(self, case: Case) -> None:
        ranks, facts, path = case.plan.mesh.context, case.facts, ("mesh", "context")
        if ranks == 1:
            return
        from weft.techniques.context.limits import (  # where ranks share
            heads_problem,
            length_problem,
            mixed_problem,
            recipe_problem,
        )

        if problem := recipe_problem(case.recipe):
            raise case.refuse(path, f"{problem}.\nUse 1.")
        if reason := facts.why_not("context"):
            raise case.refuse(path, f"cannot be had for this model: {reason}.\nUse 1.")
        if (reason := facts.why_not("sequence")) and case.plan.mesh.pipeline > 1:
            raise case.refuse(path, f"cannot join mesh.pipeline > 1 for this model: {reason}.\nUse 1.")
        if facts.num_blocks is not None and facts.sequence_length is None:
            problem = f"has no sequence to share: samples of a {facts.name} are no sequences.\nUse 1."
            raise case.refuse(path, problem)
        swaps, heads = case.plan.context_parallel.scheme == "ulysses", facts.attention_heads
        if swaps and heads and (problem := heads_problem(heads[0], tensor=case.plan.mesh.tensor, ranks=ranks)):
            raise case.refuse(path, f'{problem}\nUse context_parallel.scheme = "ring".')
        if case.plan.context_parallel.scheme == "usp" and (
            problem := mixed_problem(
                heads,
                tensor=case.plan.mesh.tensor,
                ranks=ranks,
                exchanging=case.plan.context_parallel.ulysses,
            )
        ):
            raise case.refuse(path, f'{problem}\nUse context_parallel.scheme = "ring".')
        tensor, length = case.plan.mesh.tensor, facts.sequence_length
        sequence = case.plan.tensor_parallel.sequence
        if length and (problem := length_problem(length, ranks=ranks, tensor=tensor, sequence=sequence)):
            most = length // (2 * (tensor if sequence else 1))
            raise case.refuse(path, f"{problem}\nUse {max(1, most)}{' or less' if most > 1 else ''}.")

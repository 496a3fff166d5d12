"""Expert parallelism: which models and plans it fits.

Source: Lepikhin et al. 2020 (GShard, https://arxiv.org/abs/2006.16668).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import final

from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Case, Technique, list_choices
from weft.techniques.expert.settings import EXPERT_LENDERS, ExpertSettings


def _without(plan: Plan) -> Plan:
    return plan if plan.mesh.expert == 1 else replace(_without_gather(plan), mesh=replace(plan.mesh, expert=1))


def _without_gather(plan: Plan) -> Plan:
    return replace(plan, expert_parallel=replace(plan.expert_parallel, exchange="all_to_all"))


@final
class Expert(Technique):
    """Experts on different ranks, to which tokens travel."""

    name = "expert parallelism"
    part = ExpertSettings
    ablations = (
        Ablation("expert ranks", _without),
        Ablation("the all-gather of tokens", _without_gather),
    )
    judged_alone = ("mesh.expert", "expert_parallel.exchange")

    def runs(self, plan: Plan) -> bool:
        return plan.mesh.expert > 1

    def sends(self, plan: Plan) -> bool:
        return plan.mesh.expert > 1

    def needs_loop(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.expert > 1:
            yield (
                f"plan.mesh.expert = {plan.mesh.expert} cannot be had in a loop of one's own, whose forwards nobody"
                " keeps in step over the ranks that share experts out. Use 1, or `weft train`."
            )

    def unsupported_in_script(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.expert > 1:
            yield (
                f"plan.mesh.expert = {plan.mesh.expert}: the script has no exchange of tokens between ranks that share"
                " experts out. Use 1."
            )

    def check_model(self, case: Case) -> None:
        if case.plan.mesh.expert > 1:
            from weft.techniques.expert.limits import model_problem  # where ranks share experts out

            if problem := model_problem(case):
                raise case.refuse(("mesh", "expert"), problem)

    def check(self, case: Case) -> None:
        mesh, path = case.plan.mesh, ("mesh", "expert")
        room = mesh.expert_room
        if room % mesh.expert:
            choices = list_choices(n for n in range(1, room + 1) if room % n == 0)
            lenders = " × ".join(EXPERT_LENDERS)
            problem = f"does not divide {lenders} = {room}, from which experts borrow their ranks.\nUse {choices}."
            raise case.refuse(path, problem)
        if mesh.expert == 1 and case.plan.expert_parallel.exchange != "all_to_all":
            problem = 'has no effect with mesh.expert = 1.\nUse "all_to_all", or more expert ranks.'
            raise case.refuse(("expert_parallel", "exchange"), problem)
        if mesh.expert > 1:
            from weft.techniques.expert.limits import plan_problem  # as above

            if problem := plan_problem(case):
                raise case.refuse(path, problem)

"""Expert parallelism: from whom experts borrow their ranks; predicted, not run yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, final

from weft.techniques.contract import Case, Technique, list_choices

if TYPE_CHECKING:
    from weft.plan import Plan

EXPERT_LENDERS: tuple[Literal["shard", "context"], ...] = ("shard", "context")
"""Axes whose ranks share out experts: the one place that says so."""


@final
class Expert(Technique):
    """Experts on different ranks, to which tokens travel."""

    name = "expert parallelism"
    part = type(None)

    def unrunnable(self, plan: Plan) -> Iterator[str]:
        if plan.mesh.expert > 1:
            yield (
                f"plan.mesh.expert = {plan.mesh.expert} can be predicted but not run yet: the engine has not got expert"
                " parallelism. Use 1."
            )

    def check_model(self, case: Case) -> None:
        mesh = case.plan.mesh
        room = mesh.expert_room
        if room % mesh.expert:
            choices = list_choices(n for n in range(1, room + 1) if room % n == 0)
            lenders = " × ".join(EXPERT_LENDERS)
            problem = f"does not divide {lenders} = {room}, from which experts borrow their ranks.\nUse {choices}."
            raise case.refuse(("mesh", "expert"), problem)

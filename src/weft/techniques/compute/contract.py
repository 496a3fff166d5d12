"""Compilation: which models it fits."""

from __future__ import annotations

from typing import final

from weft.config.plan import Plan
from weft.techniques.compute.settings import ComputePlan
from weft.techniques.contract import Case, Technique


@final
class Compilation(Technique):
    """Blocks that run as compiled code."""

    name = "compilation"
    part = ComputePlan

    def runs(self, plan: Plan) -> bool:
        return plan.compute.compile

    def check_model(self, case: Case) -> None:
        if case.plan.compute.compile and case.facts.num_experts:
            problem = "has not been proven with mixtures of experts, whose shapes are others in every microbatch."
            raise case.refuse(("compute", "compile"), f"{problem}\nUse false.")

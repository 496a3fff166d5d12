"""The fused vocabulary loss: when it runs."""

from __future__ import annotations

from dataclasses import replace
from typing import final

from weft.config.plan import Plan
from weft.techniques.contract import Ablation, Technique
from weft.techniques.fused_loss.settings import FusedLossSettings


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, fused_loss=False))


@final
class FusedLoss(Technique):
    """Head and loss in chunks of tokens."""

    name = "the fused loss"
    part = FusedLossSettings
    ablations = (Ablation("the fused loss", _without),)

    def runs(self, plan: Plan) -> bool:
        return plan.memory.fuses_loss or plan.mesh.tensor > 1  # split logits need a loss that knows of the split

    def sends(self, plan: Plan) -> bool:
        return plan.mesh.tensor > 1

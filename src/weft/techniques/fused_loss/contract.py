"""The fused vocabulary loss: its setting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

from weft.config.settings import setting
from weft.techniques.contract import Removal, Technique

if TYPE_CHECKING:
    from weft.config.plan import Plan


@dataclass(frozen=True, kw_only=True)
class FusedLossSettings:
    """The part of `memory` that is about logits."""

    fused_loss: bool = setting(True, space="fused_losses", asked=("fused_loss",))
    """Compute head and vocabulary loss together in token chunks, so that full logits never exist."""

    @property
    def fuses_loss(self) -> bool:
        """Whether logits exist in chunks only."""
        return self.fused_loss


def _without(plan: Plan) -> Plan:
    return replace(plan, memory=replace(plan.memory, fused_loss=False))


@final
class FusedLoss(Technique):
    """Head and loss in chunks of tokens."""

    name = "the fused loss"
    part = FusedLossSettings
    removals = (Removal("the fused loss", _without),)

    def runs(self, plan: Plan) -> bool:
        return plan.memory.fuses_loss or plan.mesh.tensor > 1  # split logits need a loss that knows of the split

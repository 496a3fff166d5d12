"""The setting of the fused vocabulary loss."""

from __future__ import annotations

from dataclasses import dataclass

from weft.config.settings import setting


@dataclass(frozen=True, kw_only=True)
class FusedLossSettings:
    """The part of `memory` that is about logits."""

    fused_loss: bool = setting(True, space="fused_losses", asked=("fused_loss",))
    """Compute head and vocabulary loss together in token chunks, so that full logits never exist."""

    @property
    def fuses_loss(self) -> bool:
        """Whether logits exist in chunks only."""
        return self.fused_loss

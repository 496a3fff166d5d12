"""What stands in parts where tensor ranks form a grid."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from weft.comm.mesh import GroupView


class PartGrid(Protocol):
    """What a part must know of a grid of tensor ranks beside its layout."""

    @property
    def features(self) -> GroupView:
        """Ranks that have the other features of this rank's samples between the layers."""
        ...

    @property
    def heads(self) -> GroupView:
        """Ranks that have the other heads of the samples whose attention this rank computes, and of their logits."""
        ...

    def head_operands(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return all features of the activation, and all columns of this rank's rows of the head's weight; with
        gradients."""
        ...

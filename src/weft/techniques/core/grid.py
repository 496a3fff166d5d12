"""What stands in layouts and parts where tensor ranks form a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from weft.comm.mesh import GroupView

if TYPE_CHECKING:
    from weft.techniques.core._layout import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSplit:
    """A cut over an axis whose ranks form a grid: in several dimensions, or along some lines of the grid alone."""

    cuts: tuple[Split, ...]
    """One after another, as in `NestedSplit`; at least one."""
    copies: GroupView
    """Ranks of the axis that hold the same part."""
    is_partial: bool
    """Whether each of these has a part of the gradient's sum; if not, backward has made the sum on all of them."""


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

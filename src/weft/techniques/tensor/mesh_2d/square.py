"""A square of tensor ranks, or several layers of one: samples by features, and inputs by outputs of every weight.

Layers of a grid see other samples and have the same weights, whose gradients they sum: two dimensions, and data ranks
inside the tensor axis.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

from weft.comm.mesh import GroupView, Mesh
from weft.techniques.core import GridSplit, Split
from weft.techniques.tensor.mesh_2d.mesh import SampleShares, create_line
from weft.techniques.tensor.mesh_2d.roles import Kind
from weft.techniques.tensor.mesh_2d.shape import COLUMN, COPIES, DEPTH, ROW, GridCut, GridShape
from weft.techniques.tensor.mesh_2d.summa import Gathered, embed, enter, gather_rows, product


@dataclass(frozen=True, slots=True)
class SquareGrid:
    """This rank's lines; see `TensorGrid`."""

    shape: GridShape
    row: GroupView
    """Ranks with the other features of the same samples, and the other outputs of the same inputs."""
    column: GroupView
    """Ranks with other samples, and other inputs of the same outputs."""
    depth: GroupView
    """Ranks at this place of other layers: other samples, the same block of every weight."""
    copies: GroupView
    """Ranks that hold the same features, of other samples."""

    @property
    def features(self) -> GroupView:
        """See `weft.techniques.core.PartGrid`."""
        return self.row

    @property
    def heads(self) -> GroupView:
        """See `weft.techniques.core.PartGrid`."""
        return self.row

    def enter(self, x: Tensor, *, is_inside: bool) -> tuple[Tensor, Gathered]:
        """Gather all features of the row's samples."""
        return enter(x, self.row, x.dim() - 1), Gathered(self.row, x.dim() - 1)

    def multiply(
        self, entered: tuple[Tensor, Gathered], x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int, kind: Kind
    ) -> Tensor:
        """Return the rank's samples and outputs."""
        whole, gathered = entered
        return product(whole, x, weight, bias, gathered, self.column, inputs)

    def look_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Return the rank's samples and features."""
        return embed(tokens, weight, self.row, self.column, padding)

    def shares(self, rank: int, inputs: Collection[str]) -> SampleShares:
        """Model and loss see the same samples."""
        part = self.shape.sample_part(rank)
        return SampleShares(self.shape.sample_parts, part, part, frozenset(inputs))

    def head_operands(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `weft.techniques.core.PartGrid`."""
        return enter(hidden, self.row, hidden.dim() - 1), gather_rows(weight, self.column)

    def split_of(self, cut: GridCut) -> GridSplit:
        """Return the rank's part: outputs or features by its column, inputs by its row."""
        along = Split(dim=cut.dim, parts=self.shape.side, index=self.row.index, blocks=cut.blocks)
        if not cut.is_matrix:
            return GridSplit(cuts=(along,), copies=self.copies, is_partial=True)
        inputs = Split(dim=1 - cut.dim, parts=self.shape.side, index=self.column.index)
        return GridSplit(cuts=(along, inputs), copies=self.depth, is_partial=self.depth.size > 1)


def create_square(mesh: Mesh, shape: GridShape) -> SquareGrid:
    """Return this rank's lines.  Call it on every rank alike."""
    row = create_line(mesh, shape, ROW, lambda layer, row, column: (layer, row))
    column = create_line(mesh, shape, COLUMN, lambda layer, row, column: (layer, column))
    depth = create_line(mesh, shape, DEPTH, lambda layer, row, column: (row, column))
    if shape.depth == 1:
        return SquareGrid(shape, row, column, depth, column)
    return SquareGrid(shape, row, column, depth, create_line(mesh, shape, COPIES, lambda layer, row, column: (column,)))

"""Tensor ranks as a grid: its sides, and where a rank stands in it.  No torch.

`2d` is a square of side q, `2.5d` as many squares as its depth, `3d` a cube.  Ranks count row by row: in layer k of a
grid, row i and column j are rank k·q² + i·q + j of the tensor axis.  In a cube the three numbers are l, j and i, as the
source has them.

A product Y = X·W is cut as follows, with [a, b] for a cut of the first dimension by a and of the second by b:

    2d, 2.5d    X [k i, j]    W [i, j]      Y [k i, j]     rows of X are samples, columns of X and Y features
    3d          X [i j, l]    W [l i, j]    Y [i l, j]     j and l change places from product to product

Sources: SUMMA, van de Geijn and Watts 1997; 2-D Xu et al. 2021, https://arxiv.org/abs/2104.05343; 2.5-D Wang et al.
2021, https://arxiv.org/abs/2105.14500; 3-D Bian et al. 2021, https://arxiv.org/abs/2105.14450.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

ROW, COLUMN, DEPTH, COPIES = "tensor_row", "tensor_column", "tensor_depth", "tensor_copies"
"""Names of lines of a square, by which their collectives are recorded: ranks of one row, which exchange activations; of
one column, which exchange weights; at one place of all layers; and all that hold the same features."""

LINE_I, LINE_J, LINE_L, SWAP = "tensor_i", "tensor_j", "tensor_l", "tensor_swap"
"""Names of lines of a cube, along which one of a rank's three numbers differs; and of the pair that has two of them
exchanged."""
BETWEEN_COPIES, INSIDE_COPIES = "tensor_ij", "tensor_il"
"""Names of planes of a cube: ranks that hold the same features between layers, and inside of them."""

OnGrid = Literal["product", "lookup", "rms_norm", "layer_norm"]
"""The operation that ranks of a grid do together in a module."""


class GridCut(NamedTuple):
    """How a grid cuts a parameter: along its outputs or features, and a weight also along its inputs."""

    dim: int
    """Dimension of the outputs or features."""
    blocks: int = 1
    """Equal blocks that are fused along it, each cut by itself."""
    is_matrix: bool = False
    """Whether the other one of two dimensions is that of inputs."""
    is_inside: bool = False
    """Whether its outputs or features are those inside of a layer, which a cube cuts along another line."""


@dataclass(frozen=True, slots=True)
class GridShape:
    """How many ranks a grid has along its sides."""

    side: int
    depth: int = 1
    """Layers."""
    is_cube: bool = False

    @property
    def ranks(self) -> int:
        return self.side * self.side * self.depth

    @property
    def heads(self) -> str:
        """Name of the line whose ranks share out heads, and the vocabulary."""
        return LINE_J if self.is_cube else ROW

    @property
    def sample_parts(self) -> int:
        """Parts that the samples of a microbatch are cut into."""
        return self.side * self.depth

    def place(self, rank: int) -> tuple[int, int, int]:
        """Return layer, row and column of a rank of the tensor axis."""
        layer, rest = divmod(rank, self.side * self.side)
        return layer, *divmod(rest, self.side)

    def loss_part(self, rank: int) -> int:
        """Return of which part of the samples a rank takes the loss."""
        layer, _, column = self.place(rank)
        return column * self.side + layer if self.is_cube else self.sample_part(rank)

    def local_shape(self, shape: Sequence[int], cut: GridCut) -> tuple[int, ...]:
        """Return the shape of a rank's part of a parameter."""
        inputs = self.side * (self.side if self.is_cube else 1)
        parts = [self.side if dim == cut.dim else inputs if cut.is_matrix else 1 for dim in range(len(shape))]
        return tuple(size // part for size, part in zip(shape, parts, strict=True))

    def partial_over(self, cut: GridCut | None) -> str:
        """Return the line over whose ranks the gradient of a parameter is summed; empty: backward sums it."""
        if cut is None:
            return "tensor"
        if cut.is_matrix:
            return DEPTH if self.depth > 1 and not self.is_cube else ""
        if self.is_cube:
            return INSIDE_COPIES if cut.is_inside else BETWEEN_COPIES
        return COLUMN if self.depth == 1 else COPIES

    def is_first_copy(self, cut: GridCut | None, rank: int) -> bool:
        """Return whether norms and checkpoints count a rank's part among its copies."""
        layer, row, column = self.place(rank)
        if cut is None:
            return rank == 0
        if self.is_cube:
            return cut.is_matrix or (column, layer if cut.is_inside else row) == (0, 0)
        return layer == 0 and (cut.is_matrix or row == 0)

    def sample_part(self, rank: int) -> int:
        """Return which part of the samples a rank has."""
        layer, row, column = self.place(rank)
        return column * self.side + row if self.is_cube else layer * self.side + row


class _Mesh(Protocol):
    @property
    def tensor(self) -> int: ...


class _Settings(Protocol):
    @property
    def scheme(self) -> str: ...


class GridPlan(Protocol):
    """What a plan says of a grid."""

    @property
    def mesh(self) -> _Mesh:
        """Sizes of the axes."""
        ...

    @property
    def tensor_parallel(self) -> _Settings:
        """Settings of the tensor axis."""
        ...


def grid_shape(scheme: str, ranks: int) -> GridShape | None:
    """Return the grid that so many ranks form; None: one dimension, or a number that makes no such grid."""
    if scheme == "1d" or ranks == 1:
        return None
    if scheme == "2.5d":
        depth, side = tesseract(ranks)
        return GridShape(side, depth) if side > 1 else None
    power = 3 if scheme == "3d" else 2
    side = round(ranks ** (1 / power))
    if side**power != ranks:
        return None
    return GridShape(side, side, is_cube=True) if power == 3 else GridShape(side)


def grid_of_plan(plan: GridPlan) -> GridShape | None:
    """Return the grid of a plan's tensor ranks; None: they form none."""
    return grid_shape(plan.tensor_parallel.scheme, plan.mesh.tensor)


def tesseract(ranks: int) -> tuple[int, int]:
    """Return depth and side of ranks = depth · side²: the largest side that is at least the depth."""
    for side in range(math.isqrt(ranks), 0, -1):
        if ranks % (side * side) == 0:
            return ranks // (side * side), side
    return ranks, 1


def least_ranks(scheme: str) -> int:
    """Return the ranks of the smallest grid of a scheme."""
    return 4 if scheme == "2d" else 8


def num_loss_replicas(plan: GridPlan) -> int:
    """Return how many tensor ranks see the same samples, and so compute the same loss: those that share out heads and
    features."""
    shape = grid_of_plan(plan)
    return plan.mesh.tensor if shape is None else shape.side

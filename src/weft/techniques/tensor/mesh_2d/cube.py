"""A cube of tensor ranks: activations and weights are cut into as many parts as there are ranks.

Rank (i, j, l) has part (i, j) of the samples and part l of the features between layers.  The first product of a layer
gathers samples along j, its weight along i, and sums along l, which leaves part (i, l) of the samples on each rank.  So
inside of a layer j and l have changed places, and the second product changes them back:

    between layers   X [i j, l]     product 1: gather along j, sum along l
    inside           Y [i l, j]     product 2: gather along l, sum along j
    between layers   Z [i j, l]

Per rank a product of M×K by K×N elements moves (q−1)/q³ of 3·(M·K + K·N) and 2·M·N elements.  Gathered blocks are not
kept for the backward.

Source: Bian et al. 2021, https://arxiv.org/abs/2105.14450.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.comm.collectives import all_gather, reduce_scatter_shards
from weft.comm.mesh import GroupView, Mesh
from weft.model.derivatives import once
from weft.techniques.core import GridSplit, Split
from weft.techniques.tensor.mesh_2d.mesh import SampleShares, create_line
from weft.techniques.tensor.mesh_2d.roles import Kind
from weft.techniques.tensor.mesh_2d.shape import (
    BETWEEN_COPIES,
    INSIDE_COPIES,
    LINE_I,
    LINE_J,
    LINE_L,
    SWAP,
    GridCut,
    GridShape,
)
from weft.techniques.tensor.mesh_2d.summa import Gathered, enter, gather, local_ids, look_up, product, table_gradient


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView) -> Tensor:
        ctx.view = view
        return reduce_scatter_shards(x, view, 0)

    @staticmethod
    @once("a product over a cube of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return gather(grads[0], ctx.view, 0), None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView) -> Tensor:
        ctx.view = view
        # An exchange with one partner, as a gather over two ranks: (2, …), of which the other one's is taken.
        return all_gather(x, view)[1 - view.index]

    @staticmethod
    @once("a product over a cube of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_gather(grads[0], ctx.view)[1 - ctx.view.index], None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, samples: GroupView, inputs: GroupView, padding: int | None
    ) -> Tensor:
        every = gather(tokens, samples, 0)
        ids = local_ids(every, samples.index * weight.shape[0], weight.shape[0])
        ctx.save_for_backward(ids if padding is None else ids.masked_fill(every == padding, weight.shape[0]))
        ctx.samples, ctx.inputs, ctx.num_rows = samples, inputs, weight.shape[0]
        return reduce_scatter_shards(look_up(ids, gather(weight, inputs, 1)), samples, 0)

    @staticmethod
    @once("a product over a cube of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        by_table = table_gradient(gather(grads[0], ctx.samples, 0), ids, ctx.num_rows)
        return None, reduce_scatter_shards(by_table, ctx.inputs, 1), None, None, None


@dataclass(frozen=True, slots=True)
class CubeGrid:
    """This rank's lines; see `TensorGrid`."""

    shape: GridShape
    i: GroupView
    """Ranks with other samples, and other parts of the same inputs of weights."""
    j: GroupView
    """Ranks with the other features inside of layers."""
    l: GroupView  # noqa: E741 - as in the source
    """Ranks with the other features between layers."""
    between: GroupView
    """Ranks with the same features between layers."""
    inside: GroupView
    """Ranks with the same features inside of layers."""
    swap: GroupView
    """The rank with j and l exchanged."""

    @property
    def features(self) -> GroupView:
        """See `weft.techniques.core.PartGrid`."""
        return self.l

    @property
    def heads(self) -> GroupView:
        """See `weft.techniques.core.PartGrid`."""
        return self.j

    def enter(self, x: Tensor, *, is_inside: bool) -> tuple[Tensor, Gathered]:
        """Gather the samples along the line of the product's outputs."""
        view = self.l if is_inside else self.j
        return enter(x, view, 0), Gathered(view, 0)

    def multiply(
        self, entered: tuple[Tensor, Gathered], x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int, kind: Kind
    ) -> Tensor:
        """Return the rank's samples and outputs; of a product alone, where they lie between layers."""
        whole, gathered = entered
        # Without the bias: this is a partial sum over the inputs, and the bias must be added once.
        partial = product(whole, x, weight, None, gathered, self.i, inputs)
        made: Tensor = _Sum.apply(partial, self.j if kind == "row" else self.l)  # pyright: ignore[reportAssignmentType, reportUnknownMemberType]
        made = made if bias is None else made + bias
        # A product by itself (the head) has no second one to change j and l back.
        if kind != "alone" or self.swap.group is None:
            return made
        return _Swap.apply(made, self.swap)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

    def look_up(self, tokens: Tensor, weight: Tensor, padding: int | None) -> Tensor:
        """Return the rank's samples and features between layers."""
        return _Lookup.apply(tokens, weight, self.j, self.i, padding)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

    def shares(self, rank: int, inputs: Collection[str]) -> SampleShares:
        """The model begins between layers, and its head ends inside of one."""
        layer, _, column = self.shape.place(rank)
        of_loss = column * self.shape.side + layer
        return SampleShares(
            self.shape.sample_parts, self.shape.sample_part(rank), of_loss, frozenset(inputs), fills=True
        )

    def head_operands(self, hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """See `weft.techniques.core.PartGrid`: plans that fuse head and loss are refused."""
        raise AssertionError("logits of a cube are sums over ranks")

    def split_of(self, cut: GridCut) -> GridSplit:
        """Return the rank's part: outputs or features by j or l, inputs by the other one and by i."""
        side, along, across = self.shape.side, *((self.j, self.l) if cut.is_inside else (self.l, self.j))
        outputs = Split(dim=cut.dim, parts=side, index=along.index, blocks=cut.blocks)
        if not cut.is_matrix:
            copies = self.inside if cut.is_inside else self.between
            return GridSplit(cuts=(outputs,), copies=copies, is_partial=True)
        inputs = (Split(dim=1 - cut.dim, parts=side, index=view.index) for view in (across, self.i))
        alone = GroupView((self.i.ranks[self.i.index],), 0, None)
        return GridSplit(cuts=(outputs, *inputs), copies=alone, is_partial=False)


def create_cube(mesh: Mesh, shape: GridShape) -> CubeGrid:
    """Return this rank's lines.  Call it on every rank alike."""
    # The layer of a cube's rank is its number l, the row j and the column i.
    return CubeGrid(
        shape,
        create_line(mesh, shape, LINE_I, lambda layer, row, column: (layer, row)),
        create_line(mesh, shape, LINE_J, lambda layer, row, column: (layer, column)),
        create_line(mesh, shape, LINE_L, lambda layer, row, column: (row, column)),
        create_line(mesh, shape, BETWEEN_COPIES, lambda layer, row, column: (layer,)),
        create_line(mesh, shape, INSIDE_COPIES, lambda layer, row, column: (row,)),
        create_line(mesh, shape, SWAP, lambda layer, row, column: (column, min(layer, row), max(layer, row))),
    )

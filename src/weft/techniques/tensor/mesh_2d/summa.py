"""Products of two matrices that are cut in both dimensions over a square of ranks, with gradients.

Rank (i, j) of the q × q mesh has the block of X with samples i and features j, of W with inputs i and outputs j, and of
Y with samples i and outputs j:

    Y[i, j] = Σₖ X[i, k] · W[k, j]        X gathered along row i, W gathered along column j, one local product
    dX[i, k] = Σⱼ dY[i, j] · W[k, j]ᵀ     partial sums, reduce-scattered along row i
    dW[k, j] = Σᵢ X[i, k]ᵀ · dY[i, j]     partial sums, reduce-scattered along column j

Gathered blocks are not kept; the backward gathers them once more.  Per rank that moves 3·(q−1)/q²·(|X| + |W|) elements.
SUMMA broadcasts one block after another, which is as many elements in more and smaller messages.

Source: van de Geijn and Watts 1997, SUMMA; Xu et al. 2021, https://arxiv.org/abs/2104.05343.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.comm.collectives import all_gather_shards, reduce_scatter_shards
from weft.comm.mesh import GroupView
from weft.model.derivatives import once
from weft.techniques.core.views import no_view


@dataclass(slots=True)
class Gathered:
    """An activation that several products read after one gather (query, key, value; gate, up).

    In the backward the first of these products gathers the activation again, and the last one drops it.
    """

    view: GroupView
    """The ranks that have parts of it."""
    dim: int
    """The dimension along which their parts lie."""
    readers: int = 0
    """Products whose backward still needs it."""
    whole: Tensor | None = None
    """The gathered activation while a backward uses it; None: nobody has gathered it."""

    def again(self, x: Tensor) -> Tensor:
        """Return the activation gathered from this rank's part `x`, for one reader's backward.  Call on every rank."""
        # Counted in the forward by the readers that need it, so the count reaches 0 in the last backward, in whatever
        # order autograd runs them.  The count is the same on all ranks of the row: so is who gathers.
        whole = self.whole if self.whole is not None else gather(x, self.view, self.dim)
        self.readers -= 1
        self.whole = whole if self.readers else None
        return whole


def gather(x: Tensor, view: GroupView, dim: int) -> Tensor:
    """Return the tensor whose equal parts along `dim` the members have."""
    return all_gather_shards(x, view, dim, x.shape[dim] * view.size)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, view: GroupView, dim: int) -> Tensor:
        ctx.view, ctx.dim = view, dim
        return no_view(gather(x, view, dim))  # (samples / q, …, features / q) → (samples / q, …, features)

    @staticmethod
    @once("a product over a square of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # One reduce-scatter for all readers: autograd has summed their gradients of the gathered activation by now.
        return reduce_scatter_shards(grads[0], ctx.view, ctx.dim), None, None


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, view: GroupView) -> Tensor:
        ctx.view = view
        return gather(weight, view, 1)

    @staticmethod
    @once("a product over a square of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return reduce_scatter_shards(grads[0], ctx.view, 1), None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        whole: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        gathered: Gathered,
        column: GroupView,
        inputs: int,
    ) -> Tensor:
        # The block `x` is saved, and not `whole`, which is q times as large and gathered again in the backward.
        ctx.save_for_backward(x, weight)
        ctx.gathered, ctx.column, ctx.inputs = gathered, column, inputs
        # Only the gradient of the weight reads the activation again; a frozen weight leaves it alone.
        gathered.readers += ctx.needs_input_grad[2]
        # (samples / q, …, features) · (features, outputs / q), with the weight gathered along its column.
        return multiply(whole, gather(weight, column, inputs), bias, inputs)

    @staticmethod
    @once("a product over a square of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        gradient, (by_whole, _, by_weight, by_bias) = grads[0], ctx.needs_input_grad[:4]
        d_whole = d_weight = d_bias = None
        if by_whole:
            # This rank's outputs only, so a partial sum over the row; `_Enter`'s backward completes it.
            d_whole = input_gradient(gradient, gather(weight, ctx.column, ctx.inputs), ctx.inputs)
        if by_weight:
            # This rank's samples only: summed over the column, whose ranks have the other samples, to the blocks'
            # owners.
            d_weight = weight_gradient(gradient, ctx.gathered.again(x), ctx.inputs)
            d_weight = reduce_scatter_shards(d_weight, ctx.column, ctx.inputs)
        if by_bias:
            d_bias = gradient.flatten(0, -2).sum(0)
        return d_whole, None, d_weight, d_bias, None, None, None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, row: GroupView, column: GroupView, padding: int | None
    ) -> Tensor:
        # The rows of the table lie along the row of the mesh: each rank looks up its part of the vocabulary, for all
        # features, and the sum over the row gives each rank its features.
        ids = local_ids(tokens, row.index * weight.shape[0], weight.shape[0])
        ctx.save_for_backward(ids if padding is None else ids.masked_fill(tokens == padding, weight.shape[0]))
        ctx.row, ctx.column, ctx.num_rows = row, column, weight.shape[0]
        return no_view(reduce_scatter_shards(look_up(ids, gather(weight, column, 1)), row, tokens.dim()))

    @staticmethod
    @once("a product over a square of tensor ranks", 'Use plan.tensor_parallel.scheme = "1d".')
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None, None, None]:
        (ids,) = ctx.saved_tensors
        whole = gather(grads[0], ctx.row, grads[0].dim() - 1)
        return None, reduce_scatter_shards(table_gradient(whole, ids, ctx.num_rows), ctx.column, 1), None, None, None


def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, inputs: int) -> Tensor:
    """Return X·W + b; `inputs` is the dim of the weight that stands for the features of X."""
    if inputs == 1:
        return F.linear(x, weight, bias)
    made = x @ weight
    return made if bias is None else made + bias


def input_gradient(gradient: Tensor, weight: Tensor, inputs: int) -> Tensor:
    """Return the gradient of X, from that of Y."""
    return gradient @ (weight if inputs == 1 else weight.t())


def weight_gradient(gradient: Tensor, x: Tensor, inputs: int) -> Tensor:
    """Return the gradient of W as it is stored, from that of Y."""
    rows, read = gradient.flatten(0, -2), x.flatten(0, -2)
    return rows.t() @ read if inputs == 1 else read.t() @ rows


def local_ids(tokens: Tensor, first: int, num_rows: int) -> Tensor:
    """Return the rows of a part of a table that tokens ask for; `num_rows` where another part has it."""
    ids = tokens - first  # (…), as `tokens`
    return ids.masked_fill((ids < 0) | (ids >= num_rows), num_rows)


def look_up(ids: Tensor, table: Tensor) -> Tensor:
    """Return the rows of a table; zeros for ids that it has not (`local_ids`)."""
    elsewhere = ids == table.shape[0]
    return F.embedding(ids.masked_fill(elsewhere, 0), table).masked_fill(elsewhere[..., None], 0)


def table_gradient(gradient: Tensor, ids: Tensor, num_rows: int) -> Tensor:
    """Return the gradient (num_rows, features) of a part of a table; ids of `num_rows` count for nothing."""
    # One row more, for the ids of other parts, which is its padding and is dropped.
    return torch.ops.aten.embedding_dense_backward(gradient, ids, num_rows + 1, num_rows, False)[:num_rows]


def enter(x: Tensor, view: GroupView, dim: int) -> Tensor:
    """Return the tensor whose parts along `dim` the members have; grad: this rank's part of the sum over them."""
    return _Enter.apply(x, view, dim)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def gather_rows(weight: Tensor, column: GroupView) -> Tensor:
    """Return (outputs / side, inputs) from the column's blocks; grad: this rank's block of the sum over the column."""
    return _Rows.apply(weight, column)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def product(
    whole: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gathered: Gathered, column: GroupView, inputs: int
) -> Tensor:
    """Return this rank's block (samples / side, …, outputs / side) of X·W + b.

    `whole` (…, features) is `enter(x)` of `x` (…, features / side), which it keeps alone; `weight` is the rank's block
    as stored, with the features of X along dim `inputs`; `bias` (outputs / side).  grad of `whole`: a part of a sum
    over the row.  Call on every rank of the grid.
    """
    return _Product.apply(whole, x.detach(), weight, bias, gathered, column, inputs)  # pyright: ignore[reportReturnType, reportUnknownMemberType]


def embed(tokens: Tensor, weight: Tensor, row: GroupView, column: GroupView, padding: int | None) -> Tensor:
    """Return (…, features / side) for tokens (…) of this rank's samples: a product with rows of ones and zeros.

    `weight` is (vocabulary / side, features / side), the block of the product with its transpose, so that embedding and
    head may share it: part of the vocabulary by column, of the features by row.  A row of `padding` gets no gradient.
    Call on every rank of the grid.
    """
    return _Lookup.apply(tokens, weight, row, column, padding)  # pyright: ignore[reportReturnType, reportUnknownMemberType]

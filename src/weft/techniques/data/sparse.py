"""Embedding tables with sparse gradients (`nn.Embedding(sparse=True)`), outside the flat buckets.

A step names few rows of such a table, and only those are summed, sent and updated: data ranks exchange indices and
values, never the table.  The table and its optimizer state stay whole on every data rank under every ZeRO stage, also
under ZeRO-3, because a cut would make each rank ask others for rows in every forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.collectives import all_gather
from weft.comm.mesh import GroupView
from weft.errors import RecipeError
from weft.techniques.buckets.bucket_state import BucketMember
from weft.techniques.core._rows import SparseRows
from weft.techniques.core._shard import CheckpointShard, Segment, Shard


@dataclass(slots=True)
class _Table:
    member: BucketMember
    shard: Shard
    parts: list[SparseRows] = field(default_factory=list[SparseRows])
    """This rank's rows of the step so far, one entry per backward."""

    @property
    def is_copy(self) -> bool:
        """Whether the master is a tensor of its own, and not the parameter."""
        return self.shard.master.dtype != self.member.parameter.dtype


@dataclass(frozen=True, slots=True)
class _Hook:
    """Tells the store of a gradient; weak for the reason that the buckets' hooks are."""

    store: weakref.ref[SparseReducer]
    index: int

    def __call__(self, parameter: Tensor) -> None:
        store = self.store()
        if store is not None:
            store.on_gradient(self.index)


class SparseReducer:
    """The tables with sparse gradients of this rank: a `GradientReducer` whose shards carry `rows`, not `gradient`.

    Create it on every rank.  `members` are in master dtype; weights become `compute_dtype`, masters stay as they are.
    Rows are added up
    and exchanged in `gradient_dtype`.
    """

    def __init__(
        self, members: Sequence[BucketMember], *, compute_dtype: torch.dtype, gradient_dtype: torch.dtype
    ) -> None:
        self._compute_dtype = compute_dtype
        self._gradient_dtype = gradient_dtype
        self._used: set[str] = set()
        self.most_rows: dict[tuple[str, int], int] = {}
        """Rows that the rank with the most brought in the last step, by table and number of the exchange."""
        self._tables = [self._take_over(member) for member in members]
        self._handles = [
            table.member.parameter.register_post_accumulate_grad_hook(_Hook(weakref.ref(self), index))
            for index, table in enumerate(self._tables)
        ]

    def _take_over(self, member: BucketMember) -> _Table:
        parameter, layout = member.parameter, member.layout
        whole = parameter.detach().contiguous()
        parameter.data = whole.to(self._compute_dtype)  # the same storage where the dtype is the same
        parameter.grad_dtype = self._gradient_dtype
        segment = Segment(layout=layout, local_shape=whole.shape, offset=0, start=0, length=whole.numel())
        shard = Shard(
            master=whole.view(-1),
            segments=[segment],
            group=member.group,
            counts=member.reducing.index == 0 and member.counts,
            sparse=True,
        )
        return _Table(member, shard)

    @property
    def shards(self) -> Sequence[Shard]:
        return [table.shard for table in self._tables]

    def begin_step(self) -> None:
        self._used.clear()
        for table in self._tables:
            table.parts.clear()
            table.shard.rows = None
            table.member.parameter.grad = None

    def on_microbatch(self, remaining: int) -> None:
        """Nothing to do: rows are exchanged once per step, when it is known how many there are."""

    def on_backward(self, part: int, remaining: int) -> None:
        """Nothing to do: hooks tell which gradients are complete."""

    def on_last_forward(self, part: int) -> None:
        """Nothing to do."""

    def on_last_backward(self, part: int) -> None:
        """Nothing to do."""

    @property
    def takes_back(self) -> bool:
        return True

    def take_back(self) -> None:
        """Nothing to do."""

    def on_gradient(self, index: int) -> None:
        """Autograd has made a gradient of a table: take its rows out of the model.

        Raises:
            RecipeError: the gradient is dense, because the model also reads the weight in another way.
        """
        table = self._tables[index]
        parameter, name = table.member.parameter, table.member.layout.name
        if parameter.grad is None:
            return
        if not parameter.grad.is_sparse:
            raise RecipeError(
                f"{name} belongs to an embedding with sparse=True, but its gradient is dense: the model also"
                " reads the weight outside the embedding. Build the embedding with sparse=False."
            )
        self._used.add(name)
        table.parts.append(SparseRows.from_gradient(parameter.grad))
        parameter.grad = None
        if sum(len(part.indices) for part in table.parts) > parameter.shape[0]:  # never more than the table itself
            table.parts = [SparseRows.merge(table.parts)]

    def finish(self) -> None:
        for table in self._tables:
            member = table.member
            empty = SparseRows.none(member.parameter, self._gradient_dtype)
            rows = SparseRows.merge(table.parts) if table.parts else empty
            views = [view for view in (member.reducing, *member.completing) if view.group is not None]
            for number, view in enumerate(views):
                rows, most = exchange_rows(rows, view)
                self.most_rows[member.layout.name, number] = most
            table.parts.clear()
            table.shard.rows = rows

    def on_applied(self, skipped: Collection[str]) -> None:
        """Nothing to do: rows travel as they are."""

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return nothing."""
        return []

    @torch.no_grad()
    def start_weight_gather(self) -> None:
        """Cast the masters where the model computes in another dtype; no communication, every rank has all rows."""
        for table in self._tables:
            if table.is_copy:
                table.member.parameter.copy_(table.shard.master.view(table.member.parameter.shape))

    def wait_weights(self) -> None:
        """Nothing to wait for."""

    def release(self) -> None:
        """Nothing to do: weights are always whole here."""

    def names(self) -> frozenset[str]:
        return frozenset(table.member.layout.name for table in self._tables)

    def unused(self) -> frozenset[str]:
        return self.names() - self._used

    def model_state_bytes(self) -> dict[str, int]:
        rows = [tensor for t in self._tables if (r := t.shard.rows) is not None for tensor in (r.indices, r.values)]
        return {
            "parameters": sum(_size(table.member.parameter) for table in self._tables),
            "gradients": sum(_size(tensor) for tensor in rows),
            "masters": sum(_size(table.shard.master) for table in self._tables if table.is_copy),
            "residuals": 0,
        }

    def close(self) -> None:
        """Take the hooks out of the model."""
        for handle in self._handles:
            handle.remove()


def exchange_rows(rows: SparseRows, view: GroupView) -> tuple[SparseRows, int]:
    """Return the sum of all members' rows, the same bits on each, and how many the member with the most has.  Call on
    every rank of the group.

    Two gathers of tensors as long as the longest member's, after one that tells the lengths.
    """
    mine = torch.tensor([len(rows.indices)], dtype=torch.int64, device=rows.indices.device)
    lengths: list[int] = all_gather(mine, view).view(-1).tolist()
    longest = max(lengths)
    if longest == 0:
        return rows, 0
    indices = all_gather(_padded(rows.indices, longest), view)
    values = all_gather(_padded(rows.values, longest), view)
    merged = SparseRows.merge(
        [
            SparseRows(indices=their_indices[:length], values=their_values[:length])
            for their_indices, their_values, length in zip(indices, values, lengths, strict=True)
        ]
    )
    return merged, longest


def _padded(tensor: Tensor, length: int) -> Tensor:
    padded = tensor.new_zeros(length, *tensor.shape[1:])
    padded[: len(tensor)] = tensor
    return padded


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

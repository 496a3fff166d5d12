"""Gradients of a few rows of a table, which is what `nn.Embedding(sparse=True)` gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseRows:
    """Gradients of some rows of a table."""

    indices: Tensor
    """int64, (rows,), ascending and unique."""
    values: Tensor
    """(rows, width)."""

    @classmethod
    def from_gradient(cls, gradient: Tensor) -> Self:
        """Take the rows of a sparse COO gradient (rows, width), adding up rows that it names twice."""
        assert gradient.is_sparse, "the gradient of a sparse embedding"
        coalesced = gradient.coalesce()
        return cls(indices=coalesced.indices()[0], values=coalesced.values())

    @classmethod
    def none(cls, table: Tensor, dtype: torch.dtype) -> Self:
        """No rows of a table (rows, width)."""
        return cls(
            indices=torch.zeros(0, dtype=torch.int64, device=table.device),
            values=torch.zeros(0, *table.shape[1:], dtype=dtype, device=table.device),
        )

    @classmethod
    def merge(cls, parts: Sequence[SparseRows]) -> Self:
        """Add up the rows of several sources, at least one, in their order.

        One source after the other: a source names a row once, so that also on GPUs, whose `index_add_` adds
        duplicates in any order, all ranks that merge the same sources get the same bits.
        """
        indices, places = torch.unique(torch.cat([part.indices for part in parts]), return_inverse=True)
        merged = parts[0].values.new_zeros(len(indices), *parts[0].values.shape[1:])
        for part, where in zip(parts, places.split([len(part.indices) for part in parts]), strict=True):
            merged.index_add_(0, where, part.values)
        return cls(indices=indices, values=merged)

    def spread(self, shape: torch.Size) -> Tensor:
        """Return the dense gradient of a table of this shape."""
        return self.values.new_zeros(shape).index_add_(0, self.indices, self.values)

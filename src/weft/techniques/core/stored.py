"""Reading what a rank holds of a tensor, and no more of it; loaded where weights lie on disk, or ZeRO-3 cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.model.stored import Box, StoredTensor
from weft.techniques.core._layout import NestedSplit


@dataclass(frozen=True, slots=True)
class InMemory:
    """A tensor that is there, as one that is read; see `StoredTensor`."""

    whole: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.whole.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self, box: Box | None = None) -> Tensor:
        return self.whole if box is None else self.whole[tuple(slice(*ends) for ends in box)]


@torch.no_grad()
def read_local(target: Tensor, source: StoredTensor, split: NestedSplit, first_row: int = 0) -> None:
    """Copy into `target` this rank's part of the whole tensor `source`, or the rows of it that begin at `first_row`.

    The dtype may change.  Under one cut nothing else is read; under several the whole is.
    """
    if len(split.cuts) > 1:
        local = split.slice(source.read())
        target.copy_(local.narrow(0, first_row, target.shape[0]) if local.dim() else local)
        return
    if target.dim() == 0:
        target.copy_(source.read())
        return
    for dim, start, length, first in _pieces(split, source.shape):
        box = [(0, size) for size in source.shape]
        if dim:
            box[0] = (first_row, first_row + target.shape[0])
            box[dim] = (first, first + length)
            target.narrow(dim, start, length).copy_(source.read(box))
            continue
        begin, end = max(start, first_row), min(start + length, first_row + target.shape[0])
        if begin < end:
            box[0] = (first + begin - start, first + end - start)
            target.narrow(0, begin - first_row, end - begin).copy_(source.read(box))


def _pieces(split: NestedSplit, shape: torch.Size) -> Iterator[tuple[int, int, int, int]]:
    """The runs of a part along its cut dimension: (dim, first here, length, first in the whole)."""
    if not split:
        yield 0, 0, shape[0], 0
        return
    cut = split.cuts[0]
    block = shape[cut.dim] // cut.blocks
    length = block // cut.parts
    for index in range(cut.blocks):
        yield cut.dim, index * length, length, index * block + cut.index * length

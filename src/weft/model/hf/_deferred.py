"""Tensors of files, and what torch's rearranging functions make of them, read in parts when somebody asks.

The operations by which transformers turns a folder's tensors into a model's (experts stacked, projections joined or
taken apart) are its own code, which calls `torch.cat`, `torch.stack`, `torch.chunk` and the like.  Called on a
`DeferredBuild` they move nothing: the result knows from where each of its elements comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.model.stored import Box


class NotDeferrableError(Exception):
    """An operation was asked for that needs whole tensors in memory."""


class DeferredBuild:
    """A tensor of which only shape and dtype are known until it is read; see `weft.model.stored.StoredTensor`."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, read: Callable[[Box], Tensor]) -> None:
        self._shape, self._dtype, self._read = torch.Size(shape), dtype, read

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    def read(self, box: Box | None = None) -> Tensor:
        """Return what is in the box; see `StoredTensor.read`."""
        return self._read([(0, size) for size in self.shape] if box is None else box)

    # ── what rearranging code asks of a tensor ──

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> DeferredBuild:
        return self

    def narrow(self, dim: int, start: int, length: int) -> DeferredBuild:
        dim %= self.ndim

        def read(box: Box) -> Tensor:
            return self.read(_with(box, dim, box[dim][0] + start, box[dim][1] + start))

        sizes = list(self.shape)
        sizes[dim] = length
        return DeferredBuild(sizes, self.dtype, read)

    def select(self, dim: int, index: int) -> DeferredBuild:
        dim %= self.ndim

        def read(box: Box) -> Tensor:
            return self.read([*box[:dim], (index, index + 1), *box[dim:]]).squeeze(dim)

        return DeferredBuild([size for at, size in enumerate(self.shape) if at != dim], self.dtype, read)

    def squeeze(self, dim: int) -> DeferredBuild:
        return self.select(dim, 0) if self.shape[dim] == 1 else self

    def unbind(self, dim: int = 0) -> tuple[DeferredBuild, ...]:
        return tuple(self.select(dim, index) for index in range(self.shape[dim]))

    def split(self, sizes: int | Sequence[int], dim: int = 0) -> tuple[DeferredBuild, ...]:
        whole = self.shape[dim]
        if isinstance(sizes, int):
            sizes = [min(sizes, whole - start) for start in range(0, whole, sizes)]
        if sum(sizes) != whole:
            raise NotDeferrableError
        starts = accumulate(sizes, initial=0)
        return tuple(self.narrow(dim, start, length) for start, length in zip(starts, sizes, strict=False))

    def chunk(self, chunks: int, dim: int = 0) -> tuple[DeferredBuild, ...]:
        return self.split(-(-self.shape[dim] // chunks), dim)

    def transpose(self, dim0: int, dim1: int) -> DeferredBuild:
        order = list(range(self.ndim))
        order[dim0], order[dim1] = order[dim1], order[dim0]

        def read(box: Box) -> Tensor:
            return self.read([box[dim] for dim in order]).transpose(dim0, dim1)

        return DeferredBuild([self.shape[dim] for dim in order], self.dtype, read)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = _FUNCTIONS.get(func)
        if made is None:
            raise NotDeferrableError
        return made(*args, **(kwargs or {}))


def _with(box: Box, dim: int, start: int, stop: int) -> Box:
    return [*box[:dim], (start, stop), *box[dim + 1 :]]


def _alike(tensors: Sequence[Any]) -> list[DeferredBuild]:
    """The tensors, if all are deferred and of one dtype: their parts can then be copied side by side."""
    deferred = [tensor for tensor in tensors if isinstance(tensor, DeferredBuild)]
    if not deferred or len(deferred) != len(tensors) or len({tensor.dtype for tensor in deferred}) > 1:
        raise NotDeferrableError
    return deferred


def _empty(box: Box, dtype: torch.dtype) -> Tensor:
    return torch.empty([stop - start for start, stop in box], dtype=dtype)


def _concatenate(tensors: Sequence[Any], dim: int = 0) -> DeferredBuild:
    pieces = _alike(tensors)
    dim %= pieces[0].ndim
    if len({(*piece.shape[:dim], *piece.shape[dim + 1 :]) for piece in pieces}) > 1:
        raise NotDeferrableError

    def read(box: Box) -> Tensor:
        out = _empty(box, pieces[0].dtype)
        for piece, start, first, last in _overlaps(pieces, dim, *box[dim]):
            out.narrow(dim, start + first - box[dim][0], last - first).copy_(piece.read(_with(box, dim, first, last)))
        return out

    sizes = list(pieces[0].shape)
    sizes[dim] = sum(piece.shape[dim] for piece in pieces)
    return DeferredBuild(sizes, pieces[0].dtype, read)


def _overlaps(
    pieces: Sequence[DeferredBuild], dim: int, start: int, stop: int
) -> Iterator[tuple[DeferredBuild, int, int, int]]:
    """Pieces that lie in [start, stop) along `dim`: (piece, where it begins, first and last wanted inside it)."""
    begin = 0
    for piece in pieces:
        first, last = max(start - begin, 0), min(stop - begin, piece.shape[dim])
        if first < last:
            yield piece, begin, first, last
        begin += piece.shape[dim]


def _stack(tensors: Sequence[Any], dim: int = 0) -> DeferredBuild:
    pieces = _alike(tensors)
    dim %= pieces[0].ndim + 1
    if len({piece.shape for piece in pieces}) > 1:
        raise NotDeferrableError

    def read(box: Box) -> Tensor:
        out = _empty(box, pieces[0].dtype)
        inner = [*box[:dim], *box[dim + 1 :]]
        for at, piece in enumerate(pieces[slice(*box[dim])]):
            out.select(dim, at).copy_(piece.read(inner))
        return out

    shape = pieces[0].shape
    return DeferredBuild([*shape[:dim], len(pieces), *shape[dim:]], pieces[0].dtype, read)


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.cat: _concatenate,
    torch.stack: _stack,
    torch.chunk: DeferredBuild.chunk,
    torch.split: DeferredBuild.split,
    torch.unbind: DeferredBuild.unbind,
    torch.narrow: DeferredBuild.narrow,
    torch.select: DeferredBuild.select,
    torch.squeeze: DeferredBuild.squeeze,
    torch.transpose: DeferredBuild.transpose,
}

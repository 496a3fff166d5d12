"""PowerSGD: every gradient matrix as a product of two thin ones (Vogels et al., NeurIPS 2019, arXiv 1905.13727).

One step of subspace iteration per reduction, begun from what the last one ended with, so that over many steps the basis
follows the gradients' leading directions.  For a matrix M of rows × columns on each rank, with rank r:

    P = Σ M·Q          rows × r       all-reduced
    P̂ = orthonormal(P)                on every rank, from the same numbers
    Q = Σ Mᵀ·P̂         columns × r    all-reduced, and the next step's basis
    Σ M ≈ P̂·Qᵀ

What is lost on this rank, M − P̂·P̂ᵀM, is orthogonal to what is sent; error feedback must carry it over.  All matrices
of a bucket share the two all-reduces.  Vectors, and matrices that the factors would hardly shrink, are left to exact
buckets (`is_worthwhile`).

The bases are the same on all ranks at first (seeded by the parameter's name) and stay so: they are sums.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from weft.comm.mesh import GroupView
from weft.comm.reduce import start_all_reduce
from weft.techniques.compression.codecs._compressor import KeptTensor, Stages
from weft.techniques.compression.wire import Frame, ParameterSpan, factor_width


@final
class PowerSGD:
    """The codec of one storage whose spans are matrices; keeps one basis (columns, rank) per parameter."""

    is_biased = True

    def __init__(self, rank: int) -> None:
        """Keep factors of `rank` columns."""
        assert rank >= 1, "a rank of at least 1"
        self._rank = rank
        self._bases: dict[str, Tensor] = {}
        self._learnt: dict[str, Tensor] = {}
        """State of the step under way, which may yet be skipped."""

    def reduce(self, flat: Tensor, frame: Frame, view: GroupView, owed: Tensor | None) -> Stages:
        """See `Compressor`."""
        matrices = _matrices(flat, frame.spans)
        bases = [self._basis(span, flat) for span in frame.spans]
        # P = M·Q, (rows, r): factors of all matrices lie in one storage, so that one all-reduce carries them.
        left, lefts = _joined(flat, [(span.rows, self._width(span)) for span in frame.spans])
        for matrix, basis, out in zip(matrices, bases, lefts, strict=True):
            torch.mm(matrix, basis, out=out)
        yield start_all_reduce(left, view)
        # The sum is orthonormalised, not each rank's part: QR of equal numbers gives equal factors on all ranks.
        lefts = [torch.linalg.qr(factor)[0] for factor in lefts]
        # Q = Mᵀ·P̂, (columns, r).
        right, rights = _joined(flat, [(span.columns, self._width(span)) for span in frame.spans])
        for matrix, factor, out in zip(matrices, lefts, rights, strict=True):
            torch.mm(matrix.t(), factor, out=out)
        # The residual M − P̂·Qᵀ uses this rank's own Q, before it is summed: over ranks it adds up to what is lost.
        if owed is not None:
            owed.copy_(flat)
            for rest, factor, own in zip(_matrices(owed, frame.spans), lefts, rights, strict=True):
                rest.addmm_(factor, own.t(), alpha=-1)
        yield start_all_reduce(right, view)
        for span, matrix, factor, basis, other in zip(frame.spans, matrices, lefts, bases, rights, strict=True):
            torch.mm(factor, other.t(), out=matrix)  # P̂·Qᵀ, (rows, columns), in the place of the gradient
            self._learnt[span.name] = _next_basis(other, basis)

    def begin_step(self) -> None:
        """Forget the bases of a step that was skipped."""
        self._learnt.clear()

    def keep(self, skipped: Collection[str]) -> None:
        """Take over the bases of what was applied.  In place, because a checkpoint's pieces may look at them."""
        for name, basis in self._learnt.items():
            if name not in skipped:
                self._bases[name].copy_(basis)
        self._learnt.clear()

    def kept(self, frame: Frame) -> Iterator[KeptTensor]:
        """Yield the bases."""
        for span in frame.spans:
            yield KeptTensor(kind=f"basis-{self._rank}", name=span.name, tensor=self._bases[span.name], is_own=False)

    def prepare(self, frame: Frame, like: Tensor) -> None:
        """Draw the first bases, in the dtype and on the device of `like`."""
        # Seeded by name, so that all ranks draw alike without a broadcast, whatever the buckets are.
        for span in frame.spans:
            generator = torch.Generator().manual_seed(zlib.crc32(span.name.encode()))
            drawn = torch.randn(span.columns, self._width(span), generator=generator, dtype=torch.float64)
            self._bases[span.name] = drawn.to(like.device, like.dtype)

    def _width(self, span: ParameterSpan) -> int:
        return factor_width(span, self._rank)

    def _basis(self, span: ParameterSpan, flat: Tensor) -> Tensor:
        learnt = self._learnt.get(span.name)  # by an earlier round of this step (ZeRO-2 reduces per microbatch)
        return self._bases[span.name] if learnt is None else learnt


def _matrices(flat: Tensor, spans: Sequence[ParameterSpan]) -> list[Tensor]:
    return [flat[span.offset : span.stop].view(span.rows, -1) for span in spans]


def _joined(like: Tensor, shapes: Sequence[tuple[int, int]]) -> tuple[Tensor, list[Tensor]]:
    """One storage for matrices of these shapes, and its views."""
    flat = like.new_empty(sum(rows * columns for rows, columns in shapes))
    views, stop = list[Tensor](), 0
    for rows, columns in shapes:
        views.append(flat[stop : stop + rows * columns].view(rows, columns))
        stop += rows * columns
    return flat, views


def _next_basis(factor: Tensor, basis: Tensor) -> Tensor:
    """The factor at a size of about one, so that it neither vanishes nor overflows with the gradients' own size.

    Columns that are zero keep their old direction: a basis without them would never find one again.
    """
    sizes = torch.linalg.vector_norm(factor, dim=0)
    return torch.where(sizes > 0, factor / sizes, basis)

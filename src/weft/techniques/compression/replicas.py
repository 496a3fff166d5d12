"""Hybrid sharding with compression: the sum over the replicate axis, compressed, while shards are summed as they are.

Replicas lie on the slow links and shards on the fast ones, so only the sum over replicas is worth compressing.
`fully_shard` offers no place where a bucket of its own could be compressed; it sums over the shard axis alone, and what
it leaves on each rank is summed over the replicas here, after backward.  That sum does not overlap with backward, but
its storages overlap with one another.

A rank compresses the rows of a matrix that it holds.  Parameters that hold fewer elements than they would without a cut
may thus be compressed less well; all ranks decide alike by the size of the largest shard.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.mesh import GroupView, Mesh
from weft.comm.reduce import Wait, start_all_reduce
from weft.techniques.compression.codecs import CodecSpec, CompressedReduction, Frame, ParameterSpan, ReductionUnderWay
from weft.techniques.compression.reduction import reduction_shards
from weft.techniques.compression.wire import storages_of
from weft.techniques.core._layout import ParameterLayout
from weft.techniques.core._shard import CheckpointShard, Shard


@dataclass(frozen=True, slots=True)
class _Entry:
    shard: Shard
    layout: ParameterLayout
    shape: torch.Size
    """Shape of the rows on this rank, (rows, …)."""


@dataclass(slots=True)
class _Storage:
    entries: list[_Entry]
    frame: Frame
    flat: Tensor
    reduction: CompressedReduction | None


class ReplicaSums:
    """Sums the gradients of `fully_shard`'s shards over the replicate axis.  Create it on every rank.

    `layouts` are those of the shards' parameters, one for each; storages have `gradient_dtype`.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        layouts: Sequence[ParameterLayout],
        mesh: Mesh,
        compression: CodecSpec,
        storage_bytes: int,
        gradient_dtype: torch.dtype,
    ) -> None:
        self._mesh = mesh
        self._replicate: GroupView = mesh["replicate"]
        self._shard: GroupView = mesh["shard"]
        self._compression = compression
        compressed: list[_Entry] = []
        exact: list[_Entry] = []
        for shard, layout in zip(shards, layouts, strict=True):
            if shard.segments:
                segment = shard.segments[0]
                entry = _Entry(shard, layout, _rows(segment.local_shape, segment.length))
                (compressed if self._takes(segment.local_shape, layout) else exact).append(entry)
        size = max(1, storage_bytes // gradient_dtype.itemsize)
        self._storages = [
            self._create(group, gradient_dtype, is_compressed=entries is compressed)
            for entries in (compressed, exact)
            for run in storages_of([entry.shape.numel() for entry in entries], size)
            for group in [[entries[place] for place in run]]
        ]

    def _takes(self, whole: torch.Size, layout: ParameterLayout) -> bool:
        """Return whether the shards of a parameter are compressed; the same on all ranks, whatever rows they hold."""
        if layout.is_copied(self._mesh):
            return False
        longest = -(-whole[0] // self._shard.size) if len(whole) else 1
        return self._compression.takes((longest, *whole[1:]))

    def _create(self, entries: list[_Entry], dtype: torch.dtype, *, is_compressed: bool) -> _Storage:
        spans: list[ParameterSpan] = []
        stop = 0
        for entry in entries:
            spans.append(ParameterSpan(name=entry.layout.name, offset=stop, shape=entry.shape))
            stop += entry.shape.numel()
        frame = Frame(spans=tuple(spans), num_elements=stop)
        flat = torch.zeros(stop, dtype=dtype, device=entries[0].shard.master.device)
        reduction = CompressedReduction(self._compression, frame, flat, self._replicate) if is_compressed else None
        return _Storage(entries, frame, flat, reduction)

    def begin_step(self) -> None:
        """Forget what a step that was skipped has left."""
        for storage in self._storages:
            if storage.reduction is not None:
                storage.reduction.begin_step()

    def reduce(self) -> None:
        """Replace every shard's gradient by its sum over the replicas."""
        waits: list[Wait] = []
        for storage in self._storages:
            for span, entry in zip(storage.frame.spans, storage.entries, strict=True):
                assert entry.shard.gradient is not None
                view = storage.flat[span.offset : span.stop]
                view.copy_(entry.shard.gradient)
                entry.shard.gradient = view  # the sum is made in the storage, and read from it
            if storage.reduction is None:
                waits.append(start_all_reduce(storage.flat, self._replicate))
                continue
            # The storage before starts its second exchange now, so that it travels beside this one's first.
            if waits and isinstance(last := waits[-1], ReductionUnderWay):
                last.advance()
            waits.append(storage.reduction.start(storage.flat))
        for wait in waits:
            wait()

    def on_applied(self, skipped: Collection[str]) -> None:
        """The gradients have been applied, but for the parameters `skipped`."""
        for storage in self._storages:
            if storage.reduction is not None:
                storage.reduction.keep(skipped)

    def checkpoint_shards(self) -> list[CheckpointShard]:
        """Return what compression must keep over a restart."""
        stored: list[CheckpointShard] = []
        for storage in self._storages:
            if storage.reduction is not None:
                layouts = {entry.layout.name: entry.layout for entry in storage.entries}
                starts = {entry.layout.name: entry.shard.segments[0].start for entry in storage.entries}
                shard = (self._shard.index, self._shard.size)
                stored += reduction_shards(storage.reduction, layouts, self._replicate, starts=starts, shard=shard)
        return stored

    def state_bytes(self) -> int:
        """Bytes of storages, residuals and bases on this rank."""
        storages = sum(storage.flat.numel() * storage.flat.element_size() for storage in self._storages)
        return storages + sum(s.reduction.state_bytes() for s in self._storages if s.reduction is not None)


def _rows(whole: torch.Size, length: int) -> torch.Size:
    """Shape of the first `length` elements of a tensor, which are whole rows of it."""
    row = torch.Size(whole[1:]).numel()
    return torch.Size((length // max(row, 1), *whole[1:]))

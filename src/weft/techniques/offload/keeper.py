"""Masters and optimizer states that wait in a storage, and pass through the device's memory a group at a time.

    read      │ group 0 │ group 1 │ group 2 │
    update              │ group 0 │ group 1 │ group 2 │
    write                         │ group 0 │ group 1 │ group 2 │

Three buffers serve all groups in turn: one is read into, one is worked on, one is written from.  The last writes go on
behind the next forward.  Source: Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale
deep learning" (arXiv 2104.07857, §5.2.2), which overlaps the same three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportPrivateImportUsage]

from weft.comm.device import synchronize
from weft.techniques.core import Shard
from weft.techniques.offload.storage import ALIGNMENT, Storage, new_buffer

_GROUP_BYTES, _GROUPS = 32 << 20, 8
"""Least bytes of a group of shards, so that a transfer's start does not count; and the least number of groups, so that
the buffers of a rank that keeps little are small beside its states."""
_BUFFERS = 3
_TENSOR_ALIGNMENT = 64


@dataclass(slots=True)
class _Item:
    """A tensor that is read and written with its region."""

    tensor: Tensor
    offset: int
    """First byte within its region."""
    size: int
    """Bytes."""
    dtype: torch.dtype

    def attach(self, region: Tensor) -> None:
        self.tensor.data = region[self.offset : self.offset + self.size].view(self.dtype)

    def detach(self) -> None:
        self.tensor.data = torch.empty(0, dtype=self.dtype, device=self.tensor.device)


@dataclass(slots=True)
class _Region:
    """Neighbouring tensors, which are read and written at once."""

    start: int
    """First byte in the storage."""
    size: int = 0
    items: list[_Item] = field(default_factory=list[_Item])

    def add(self, tensor: Tensor, elements: int) -> _Item:
        size = elements * tensor.element_size()
        item = _Item(tensor, self.size, size, tensor.dtype)
        self.items.append(item)
        self.size += -(-size // _TENSOR_ALIGNMENT) * _TENSOR_ALIGNMENT
        return item

    def end(self) -> int:
        """Fill up to whole pages, and return the first byte after it."""
        self.size = -(-self.size // ALIGNMENT) * ALIGNMENT
        return self.start + self.size


@dataclass(slots=True)
class _Group:
    shards: list[Shard]
    masters: _Region
    states: _Region

    @property
    def size(self) -> int:
        return self.masters.size + self.states.size

    @property
    def end(self) -> int:
        """First byte after it in the storage."""
        return self.states.start + self.states.size


@final
class StateKeeper:
    """Keeps what it is told of, once `begin` was called; a `weft.techniques.core.Keeper`.

    Of a shard's master it keeps what is a tensor of its own; one that is the weights stays where the model computes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._states: dict[int, list[Tensor]] = {}
        """States by the identity of the shard."""
        self._groups: list[_Group] = []
        self._buffers: list[Tensor] = []
        self._writes: list[Future[None]] = []
        """Writes that nobody has waited for yet."""
        self._storage: Storage | None = None
        self._homes: dict[int, tuple[int, _Item]] = {}
        """Identity of a tensor → start of its region, and its place there."""
        self._mover: ThreadPoolExecutor | None = None

    # ── what is kept ──────────────────────────────────────────────────────────────────────────────────────────────────

    def new_state(self, shard: Shard) -> Tensor:
        """See `Keeper`; its storage comes to be with `begin`."""
        state = torch.empty(0, dtype=shard.master.dtype, device=shard.master.device)
        self._states.setdefault(id(shard), []).append(state)
        return state

    def begin(self, shards: Sequence[Shard], create: Callable[[int], Storage]) -> int:
        """Lay out all groups, let masters leave, and return the bytes that are kept; 0: there is nothing to keep.

        `create` makes a storage of so many bytes, all zero.
        """
        self._groups = self._laid_out([shard for shard in shards if shard.keeper is self])
        total = self._groups[-1].end if self._groups else 0
        if not total:
            return 0
        is_dry = any(isinstance(shard.master, FakeTensor) for shard in shards)
        largest = max(group.size for group in self._groups)
        count = min(_BUFFERS, len(self._groups))
        if is_dry:  # a rank that is only looked at: bytes count, files do not
            self._buffers = [torch.empty(largest, dtype=torch.uint8, device=self._device) for _ in range(count)]
        else:
            self._storage = create(total)
            # One thread runs all moves in their order, so a buffer is written out before it is read into again.
            self._mover = ThreadPoolExecutor(1, "weft-offload")
            self._buffers = [new_buffer(largest, self._device) for _ in range(count)]
        for group in self._groups:
            self._write_first(group)
        return total

    def _laid_out(self, shards: Sequence[Shard]) -> list[_Group]:
        groups: list[_Group] = []
        sizes = [shard.size * sum(tensor.element_size() for tensor in self._tensors(shard)) for shard in shards]
        least = min(_GROUP_BYTES, sum(sizes) // _GROUPS)
        start, waiting, waiting_bytes = 0, list[Shard](), 0
        for index, (shard, size) in enumerate(zip(shards, sizes, strict=True)):
            waiting.append(shard)
            waiting_bytes += size
            if waiting_bytes and (waiting_bytes >= least or index == len(shards) - 1):
                groups.append(self._group(waiting, start))
                start, waiting, waiting_bytes = groups[-1].end, [], 0
        if waiting and groups:  # shards without elements at the end
            groups[-1].shards += waiting
        return groups

    def _tensors(self, shard: Shard) -> list[Tensor]:
        own = [] if shard.weights is None else [shard.master]
        return own + self._states.get(id(shard), [])

    def _group(self, shards: Sequence[Shard], start: int) -> _Group:
        masters = _Region(start)
        for shard in shards:
            if shard.weights is not None:
                self._homes[id(shard.master)] = (start, masters.add(shard.master, shard.size))
        states = _Region(masters.end())
        for shard in shards:
            for state in self._states.get(id(shard), []):
                self._homes[id(state)] = (states.start, states.add(state, shard.size))
        states.end()
        return _Group(list(shards), masters, states)

    def _write_first(self, group: _Group) -> None:
        """Write masters to the storage for the first time; states are zeros, as the storage is."""
        region = self._buffers[0][: group.masters.size]
        for item in group.masters.items:
            region[item.offset : item.offset + item.size].view(item.dtype).copy_(item.tensor)
            item.detach()
        synchronize(self._device)
        self._write(group.masters.start, region)

    # ── visits ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def visit(self, shards: Sequence[Shard], *, states: bool, writes: bool) -> Iterator[Sequence[Shard]]:
        """See `Keeper`."""
        self.wait_writes()
        self.rest()
        kept = {id(shard) for group in self._groups for shard in group.shards}
        if resident := [shard for shard in shards if id(shard) not in kept]:
            yield resident
            _rest(resident)
        visited = {id(shard) for shard in shards}
        groups = [group for group in self._groups if any(id(shard) in visited for shard in group.shards)]
        # The read of the next group starts before this one is worked on, and the write of the last one may still run:
        # one buffer is read into, one is worked on, one is written from.
        reads = [self._fetch(group, number, states) for number, group in enumerate(groups[:1])]
        for number, group in enumerate(groups):
            reads[number].result()
            if number + 1 < len(groups):
                reads.append(self._fetch(groups[number + 1], number + 1, states))
            buffer, regions = self._buffers[number % len(self._buffers)], _regions(group, states)
            _attach(regions, buffer)
            try:
                yield [shard for shard in group.shards if id(shard) in visited]
            finally:  # also if the optimizer raises: buffers must not stay attached
                self._leave(group, regions, buffer, writes)

    def _fetch(self, group: _Group, number: int, states: bool) -> Future[None]:
        """Start to read a group, the `number`th of this visit, into its buffer."""
        regions, buffer = _regions(group, states), self._buffers[number % len(self._buffers)]
        return self._moved(self._read, regions[0].start, buffer[: _size(regions)])

    def _leave(self, group: _Group, regions: Sequence[_Region], buffer: Tensor, writes: bool) -> None:
        if writes:
            for shard in group.shards:
                shard.write_weights()
        # The moving thread does not wait for the device, so this one does: before the buffer is written out, or the
        # next group is read into it.
        synchronize(self._device)
        for region in regions:
            for item in region.items:
                item.detach()
        _rest(group.shards)
        if writes:
            self._writes.append(self._moved(self._write, regions[0].start, buffer[: _size(regions)]))

    def _moved(self, move: Callable[[int, Tensor], None], start: int, region: Tensor) -> Future[None]:
        if self._mover is not None:
            return self._mover.submit(move, start, region)
        done = Future[None]()  # nothing moves in a dry run
        done.set_result(None)
        return done

    def _read(self, start: int, into: Tensor) -> None:
        if self._storage is not None and into.numel():
            self._storage.read(start, into)

    def _write(self, start: int, source: Tensor) -> None:
        if self._storage is not None and source.numel():
            self._storage.write(start, source)

    # ── between visits ────────────────────────────────────────────────────────────────────────────────────────────────

    def wait_writes(self) -> None:
        """Wait until everything is written."""
        while self._writes:
            self._writes.pop().result()

    def at_rest(self, tensor: Tensor) -> Tensor:
        """See `Keeper`."""
        place = self._homes.get(id(tensor))
        if place is None or self._storage is None:
            return tensor
        self.wait_writes()
        start, item = place
        return self._storage.view(start + item.offset, item.size).view(item.dtype)

    def rest(self) -> None:
        """See `Keeper`."""
        if self._storage is not None:
            self._storage.let_go()

    def refresh(self, shards: Sequence[Shard]) -> None:
        """Write weights from masters that were changed in the storage (by a loaded checkpoint)."""
        for _ in self.visit(shards, states=False, writes=True):
            pass

    def buffer_bytes(self) -> int:
        """Return the bytes of the buffers that states pass through."""
        return sum(buffer.numel() for buffer in self._buffers)

    def close(self) -> None:
        """Let go of everything.  No visits follow."""
        if self._mover is not None:
            self._mover.shutdown()
            self._mover = None
        self._buffers = []
        if self._storage is not None:
            self._storage.close()
            self._storage = None


def _rest(shards: Sequence[Shard]) -> None:
    for shard in shards:
        if shard.rest is not None:
            shard.rest()


def _regions(group: _Group, states: bool) -> list[_Region]:
    return [group.masters, group.states] if states else [group.masters]


def _size(regions: Sequence[_Region]) -> int:
    return sum(region.size for region in regions)


def _attach(regions: Sequence[_Region], buffer: Tensor) -> None:
    start = 0
    for region in regions:
        for item in region.items:
            item.attach(buffer[start : start + region.size])
        start += region.size

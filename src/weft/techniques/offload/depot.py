"""Where activations lie between forward and backward: runs of a file that grows, or pinned memory of the host."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, final

import torch
from torch import Tensor

from weft.techniques.offload.storage import ALIGNMENT, FileStorage, new_buffer

_GROWTH_BYTES = 8 << 20
"""A file grows by as much at least, so that its runs are few."""


class Depot(Protocol):
    """Keeps bytes, and hands out places for them.  `put` and `get` each run on one thread of their own."""

    def put(self, source: Tensor) -> Any:
        """Store a flat uint8 tensor, and return its place once `source` may be changed.

        The place is free again when nobody holds the returned object.
        """
        ...

    def room(self, num_bytes: int) -> Tensor:
        """Return a flat uint8 tensor on the device, of `num_bytes` or more, to read into."""
        ...

    def get(self, place: Any, into: Tensor) -> None:
        """Read a place into a tensor from `room`; return when the bytes are there."""
        ...

    def close(self) -> None:
        """Free files and memory."""
        ...


class Runs:
    """Runs of a storage that are taken and given back; neighbours that are free are one."""

    def __init__(self, grow: Callable[[int], None]) -> None:
        """`grow` makes room for so many bytes in all, or raises."""
        self._grow = grow
        self._free: list[tuple[int, int]] = []
        """(first byte, length), ascending."""
        self._end = 0
        self._returned: deque[tuple[int, int]] = deque()
        self._lock = threading.RLock()

    def take(self, num_bytes: int) -> Extent:
        """Return the first free run that is long enough, or a new one at the end."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        with self._lock:
            self._collect()
            # First fit: sizes of a model's activations repeat from block to block, so freed runs mostly fit exactly.
            for index, (start, length) in enumerate(self._free):
                if length >= size:
                    self._free[index : index + 1] = [(start + size, length - size)] if length > size else []
                    return Extent(self, start, size)
            return Extent(self, self._lengthened(size), size)

    def _lengthened(self, size: int) -> int:
        """Grow so that a run of `size` ends the storage's used part, and return its first byte."""
        tail = self._free[-1] if self._free and sum(self._free[-1]) == self._end else (self._end, 0)
        end = tail[0] + size
        new = end + max(0, _GROWTH_BYTES - (end - self._end))
        self._grow(new)
        if tail[1]:
            self._free.pop()
        self._end = new
        if new > end:
            self._free.append((end, new - end))
        return tail[0]

    def give_back(self, start: int, size: int) -> None:
        """Any thread may call it, also in the middle of `take`: what lets go of a run may be the garbage collector."""
        self._returned.append((start, size))

    def _collect(self) -> None:
        if not self._returned:
            return
        while self._returned:
            self._free.append(self._returned.popleft())
        merged: list[tuple[int, int]] = []
        for start, length in sorted(self._free):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody has, of those that the storage has grown to."""
        with self._lock:
            self._collect()
            return sum(length for _, length in self._free)

    @property
    def size(self) -> int:
        """Bytes that the storage has grown to."""
        return self._end


@final
class Extent:
    """Bytes of a storage, as long as this lives."""

    __slots__ = ("_runs", "size", "start")

    def __init__(self, runs: Runs, start: int, size: int) -> None:
        self._runs, self.start, self.size = runs, start, size

    def __del__(self) -> None:
        self._runs.give_back(self.start, self.size)


@final
class FileDepot:
    """A file without a name, in pages of memory that are staged for it.

    Raises:
        PlanError: from `put`, where the disk has no more room.
    """

    def __init__(self, storage: FileStorage, device: torch.device) -> None:
        self._storage, self._device = storage, device
        self._out, self._back = _beside(device), _beside(device)
        self._runs = Runs(storage.grow)
        self._staging = new_buffer(ALIGNMENT, torch.device("cpu"))

    def put(self, source: Tensor) -> Extent:
        run = self._runs.take(source.numel())
        if self._staging.numel() < run.size:
            self._staging = new_buffer(run.size, torch.device("cpu"))
        with self._out():
            self._staging[: source.numel()].copy_(source)
        self._storage.write(run.start, self._staging[: run.size])
        return run

    def room(self, num_bytes: int) -> Tensor:
        return new_buffer(-(-num_bytes // ALIGNMENT) * ALIGNMENT, self._device)

    def get(self, place: Extent, into: Tensor) -> None:
        with self._back():
            self._storage.read(place.start, into)

    def close(self) -> None:
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._storage.close()


@final
class HostDepot:
    """Pinned memory of the host, which torch's allocator uses again."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out, self._back = _beside(device), _beside(device)

    def put(self, source: Tensor) -> Tensor:
        place = torch.empty(source.numel(), dtype=torch.uint8, pin_memory=True)
        with self._out():
            place.copy_(source, non_blocking=True)
        return place

    def room(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def get(self, place: Tensor, into: Tensor) -> None:
        with self._back():
            into.copy_(place, non_blocking=True)

    def close(self) -> None:
        """Nothing to do: memory goes with its places."""


def _beside(device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return what a move is wrapped in: a stream beside the device's others, whose work is waited for.

    For one thread only: a stream remembers whose current one it has replaced.  The two ways have one each, so that they
    go at the same time."""
    if device.type == "cpu":
        return nullcontext
    stream = torch.Stream(device)

    @contextmanager
    def entered() -> Generator[None]:
        with stream:
            yield
        stream.synchronize()

    return entered

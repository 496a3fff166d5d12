"""What backward needs of the blocks waits elsewhere, and comes back a block ahead.

    forward   │ block 0 │ block 1 │ block 2 │   backward   │ block 2 │ block 1 │ block 0 │
    write               │ block 0 │ block 1 │   read       │ block 1 │ block 0 │

Autograd hands over every tensor that it saves within a block and asks for it again (`saved_tensors_hooks`).  What is
moved is the memory below, once, however many tensors look at it.  A block's forward waits until all but the block
before it are written; what backward asks for before it was written has never left.  No weights or buffers go, nor what
is smaller than a page.

Sources: Rhu et al., "vDNN: virtualized deep neural networks for scalable, memory-efficient neural network design"
(arXiv 1602.08124); to disks Rajbhandari et al., "ZeRO-Infinity" (arXiv 2104.07857).
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, UntypedStorage
from torch._subclasses.fake_tensor import FakeTensor  # pyright: ignore[reportPrivateImportUsage]
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from weft.techniques.offload.depot import Depot
from weft.techniques.offload.storage import ALIGNMENT

SMALLEST_BYTES = ALIGNMENT
"""Tensors smaller than a page stay on the device: a place in the depot is a whole page."""
_BEHIND = 1
"""Number of blocks whose writes go on while another block computes."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Memory:
    """A storage that backward needs, shared by all saved tensors that view it."""

    size: int
    storage: UntypedStorage | None
    """The storage; None while it is offloaded."""
    alive: StorageWeakRef
    """Keeps the storage's identity from being given to another storage."""
    watch: Tensor
    """A tensor without elements that shares the version counter of the first saved tensor."""
    version: int
    place: Any = None
    is_wanted: bool = False
    """Whether backward has asked for it, so that it stays."""
    read: Future[None] | None = None

    def is_unchanged(self, version: int) -> bool:
        return self.version == version == self.watch._version


@dataclass(slots=True, eq=False, weakref_slot=True)
class _Call:
    """One forward of one block."""

    before: weakref.ref[_Call] | None
    """The block before it, of the same microbatch."""
    memories: weakref.WeakSet[_Memory] = field(default_factory=weakref.WeakSet[_Memory])
    writes: list[Future[None]] = field(default_factory=list[Future[None]])
    is_recalled: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """An offloaded tensor: the memory, and the view of it that was saved."""

    memory: _Memory
    call: _Call
    watch: Tensor
    version: int
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int
    here: Tensor | None = None
    """The tensor itself in a dry run, where nothing moves; else None."""

    @property
    def is_unchanged(self) -> bool:
        """Whether nobody has written to the tensor since it was saved."""
        return self.watch._version == self.version


@dataclass(frozen=True, slots=True)
class _Kept:
    """A saved tensor that stays on the device."""

    tensor: Tensor
    version: int | None


@final
class ActivationKeeper:
    """Takes what blocks save while they compute (`within`), and brings it back for their backward.

    `create` makes the place where it waits, before anything does.  One per rank; every method may be called by the
    thread that runs backward.
    """

    def __init__(self, device: torch.device, create: Callable[[], Depot]) -> None:
        self._device, self._create = device, create
        self._depot: Depot | None = None
        self._writer: ThreadPoolExecutor | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._known: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
        self._call: _Call | None = None
        self._last: tuple[Any, _Call] | None = None
        """Microbatch and block of the forward before."""
        self._unread: deque[weakref.ref[_Call]] = deque()
        """The last block of each microbatch that has ended its forward, in that order."""
        self._behind: deque[_Call] = deque()
        self._lock = threading.RLock()
        self._own: Collection[int] = ()
        self._held = self.peak_bytes = 0
        """Bytes that wait for their backward now, and the most so far."""
        self._gone: deque[int] = deque()
        """Sizes of what waits no longer; whoever lets go of it may be the garbage collector, in the middle of a sum."""
        self.moved_bytes = 0
        """Bytes written so far."""

    # ── forward ───────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def within(self, microbatch: object, own: Iterable[Tensor]) -> Generator[None]:
        """Let what is saved here wait elsewhere.  `own` tensors belong to the block and stay."""
        # Bounds what has not left yet: a block computes while the block before it is written, and no more wait.
        while len(self._behind) > _BEHIND:
            _wait_call(self._behind.popleft())
        before = None if self._last is None or self._last[0] is not microbatch else weakref.ref(self._last[1])
        if before is None and self._last is not None:
            self._unread.append(weakref.ref(self._last[1]))
        self._call = call = _Call(before)
        self._own = {_identity(_local(tensor).untyped_storage()) for tensor in own}
        self._last = microbatch, call
        try:
            with saved_tensors_hooks(self._pack, self.unpack):
                yield
        finally:
            self._call = None
            self._behind.append(call)

    def _pack(self, tensor: Tensor) -> Waiting | _Kept:
        return self.pack(tensor) or _Kept(tensor, None if tensor.is_inference() else tensor._version)

    def pack(self, tensor: Tensor) -> Waiting | None:
        """Let a tensor of the block that computes leave; None: it stays where it is."""
        call = self._call
        if call is None or not self._can_leave(tensor):
            return None
        storage, version = tensor.untyped_storage(), tensor._version
        identity = _identity(storage)
        if identity in self._own:
            return None
        watch, is_fake = self.watch(tensor), isinstance(tensor, FakeTensor)
        # Several saved tensors may view one storage: it is written once, unless it was changed in between.
        memory = self._known.get(identity)
        if memory is None or not memory.is_unchanged(version):
            memory = _Memory(storage.nbytes(), storage, StorageWeakRef(storage), watch, version)
            self._count(memory)
            self._known[identity] = memory
            if not is_fake:
                call.writes.append(self._begin_write(memory))
        call.memories.add(memory)
        looks = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
        return Waiting(memory, call, watch, version, *looks, tensor if is_fake else None)

    def watch(self, tensor: Tensor) -> Tensor:
        """See `weft.techniques.core.activation_store.ActivationStore`."""
        counts_versions = torch._C.DispatchKey.ADInplaceOrView  # pyright: ignore[reportPrivateUsage]
        with torch._C._SetExcludeDispatchKeyGuard(counts_versions, False):  # pyright: ignore[reportPrivateUsage]
            watch = tensor.detach()
        watch.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return watch

    def _can_leave(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, FakeTensor) or tensor.device.type != self._device.type:
            return False
        if tensor.layout != torch.strided or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
            return False
        return tensor.untyped_storage().nbytes() >= SMALLEST_BYTES

    def _count(self, memory: _Memory) -> None:
        while self._gone:
            self._held -= self._gone.popleft()
        self._held += memory.size
        self.peak_bytes = max(self.peak_bytes, self._held)
        weakref.finalize(memory, self._gone.append, memory.size).atexit = False

    # ── on its way ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begin_write(self, memory: _Memory) -> Future[None]:
        if self._writer is None:
            self._depot = self._create()
            self._writer = ThreadPoolExecutor(1, "weft-offload-write")
            self._reader = ThreadPoolExecutor(1, "weft-offload-read")
        return self._writer.submit(self._write, weakref.ref(memory), _moment(self._device))

    def _write(self, waiting: weakref.ref[_Memory], computed: torch.Event | None) -> None:
        memory = waiting()
        if memory is None or memory.is_wanted:
            return  # backward has come before the write: the storage stays, and nothing is lost
        if computed is not None:
            computed.synchronize()
        assert self._depot is not None
        assert memory.storage is not None
        place = self._depot.put(_bytes_of(memory.storage, self._device))
        with self._lock:
            self.moved_bytes += memory.size
            if not memory.is_wanted:  # looked at again: backward may have asked while the bytes were on their way
                memory.place, memory.storage = place, None

    def _recall(self, memory: _Memory) -> None:
        """Begin to bring a memory back, or keep it where it has not left."""
        with self._lock:
            if memory.is_wanted:
                return
            memory.is_wanted = True
            if memory.storage is not None:
                return
        assert self._depot is not None
        assert self._reader is not None
        room = self._depot.room(memory.size)
        memory.read = self._reader.submit(self._read, memory, room, _moment(self._device))

    def _read(self, memory: _Memory, room: Tensor, free: torch.Event | None) -> None:
        if free is not None:
            free.synchronize()
        assert self._depot is not None
        self._depot.get(memory.place, room)
        memory.storage, memory.place = room.untyped_storage(), None

    # ── backward ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def unpack(self, saved: Waiting | _Kept) -> Tensor:
        """Return what was packed, as it was.

        Raises:
            RuntimeError: somebody has written to it since, as autograd itself would say.
        """
        if isinstance(saved, _Kept):
            if saved.version is not None and saved.tensor._version != saved.version:
                raise _written_to(saved.tensor.shape, saved.tensor._version, saved.version)
            return saved.tensor
        if not saved.is_unchanged:
            raise _written_to(saved.shape, saved.watch._version, saved.version)
        if saved.here is not None:
            return saved.here
        # A block's backward starts the reads of the block before it, so that they travel while this one computes.
        self._bring(saved.call)
        memory = saved.memory
        self._recall(memory)
        if memory.read is not None:
            memory.read.result()
            memory.read = None
        assert memory.storage is not None
        looking = torch.empty(0, dtype=saved.dtype, device=self._device)
        return looking.set_(memory.storage, saved.offset, saved.shape, saved.strides)

    def fetch(self, value: Any) -> Any:
        """See `weft.techniques.core.activation_store.ActivationStore`."""
        return self.unpack(value) if isinstance(value, Waiting) else value

    def _bring(self, call: _Call) -> None:
        """Bring back what a block and the one before it have saved."""
        if call.is_recalled:
            return
        for kept_call in (call, call.before() if call.before is not None else self._next_unread()):
            if kept_call is not None:
                for memory in list(kept_call.memories):
                    self._recall(memory)
        call.is_recalled = True

    def _next_unread(self) -> _Call | None:
        """Return the last block of the microbatch that has waited longest: schedules run its backward next."""
        while self._unread:
            call = self._unread[0]()
            if call is not None and not call.is_recalled:
                return call
            self._unread.popleft()
        return None

    def bytes_here(self) -> int:
        """Return the bytes that wait for their backward and have not left, or have come back."""
        return sum(memory.size for memory in list(self._known.values()) if memory.storage is not None)

    def close(self) -> None:
        """Let go of files and threads.  No pass follows."""
        for mover in (self._writer, self._reader):
            if mover is not None:
                mover.shutdown(cancel_futures=True)
        if self._depot is not None:
            self._depot.close()
        self._writer = self._reader = self._depot = self._last = None
        self._behind.clear()


def _wait_call(call: _Call) -> None:
    """Wait until what a block has saved is written."""
    while call.writes:
        call.writes.pop().result()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _identity(storage: UntypedStorage) -> int:
    return storage._cdata  # pyright: ignore[reportPrivateUsage]  the same for all tensors of a memory


def _bytes_of(storage: UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def _moment(device: torch.device) -> torch.Event | None:
    """Return an event after the device's work so far; None on a CPU, which has done its work already."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event()


def _written_to(shape: torch.Size, version: int, expected: int) -> RuntimeError:
    return RuntimeError(
        f"a tensor of shape {tuple(shape)} that backward needs was written to after it was saved (version {version}"
        f" instead of {expected}): the model works in place on what its gradient is computed from. Use an operation"
        " that returns a new tensor there."
    )

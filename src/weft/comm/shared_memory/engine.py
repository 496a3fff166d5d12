"""The C++ engine, by way of ctypes, which gives up Python's lock during each call."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_char, c_double, c_int, c_int32, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from typing import Any

from weft.comm._failure import ErrorCode, Failure
from weft.comm.shared_memory._arena import Arena, whole_pages
from weft.comm.shared_memory._call import DTYPES, OPS, Call, GroupFailed, Kind, Region
from weft.comm.shared_memory._segment import SharedSegment
from weft.comm.shared_memory._sources import FOLDER, LIBRARY, digest
from weft.errors import CollectiveError

REBUILD = "python setup.py build_ext --inplace"
_MANY_TYPES = 64
_NOT_KNOWN = (1 << 64) - 1
_POPULATE_WRITE = 23
"""Advice to madvise, since Linux 5.14; Python has no name for it."""


class _CallStruct(ctypes.Structure):
    _fields_ = [  # noqa: RUF012 - ctypes reads it once
        ("kind", c_uint32),
        ("dtype", c_uint32),
        ("op", c_uint32),
        ("is_background", c_uint32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("num_bytes", c_uint64),
        ("timeout_seconds", c_double),
        ("send_at", c_void_p),
        ("send_bytes", c_void_p),
        ("receive_at", c_void_p),
        ("receive_bytes", c_void_p),
    ]


class _FailureStruct(ctypes.Structure):
    _fields_ = [("code", c_int32), ("culprit", c_int32), ("reporter", c_int32)]  # noqa: RUF012


class _DeliveryStruct(ctypes.Structure):
    _fields_ = [  # noqa: RUF012
        ("failure", _FailureStruct),
        ("source", c_int32),
        ("done_ns", c_uint64),
        ("sent_bytes", c_uint64),
    ]


@dataclass(frozen=True, slots=True)
class Manner:
    """How an engine copies: measured once per group, at its first large call."""

    slot_bytes: int
    """Bytes of a piece that is staged at a time; up to 4 MiB."""
    streams_in: bool
    """Copy into the staging memory by stores that pass the cache by."""


def load_library() -> ctypes.CDLL | None:
    """Return the engine, or None where it was not built (no C++ compiler at installation).

    Raises:
        CollectiveError: it was built from other sources than those that lie beside it.
    """
    path = FOLDER / LIBRARY
    if not path.exists():
        return None
    try:
        library = ctypes.CDLL(str(path))
    except OSError:  # built for another processor or C++ library than this process has
        return None
    library.weft_digest.restype = ctypes.c_char_p
    built, here = library.weft_digest().decode(), digest()
    if built != here:
        raise CollectiveError(
            f"the shared-memory engine was built from other sources ({built}) than those beside it ({here}), so that"
            f" ranks might not understand one another. Build it again: {REBUILD} (`make setup` does so, too)."
        )
    _declare(library)
    return library


def _declare(library: ctypes.CDLL) -> None:
    declared: tuple[tuple[str, Any, Sequence[Any]], ...] = (
        ("weft_kernel_variant", ctypes.c_char_p, ()),
        ("weft_segment_bytes", c_uint64, (c_int, c_uint64)),
        ("weft_is_defined", c_int, (c_uint32, c_uint32)),
        ("weft_prepare", None, (c_void_p, c_int, c_uint64)),
        ("weft_arena_offset", c_uint64, (c_void_p, c_int)),
        ("weft_open", c_void_p, (c_void_p, c_int, c_int, c_int)),
        ("weft_close", None, (c_void_p,)),
        ("weft_leave", None, (c_void_p,)),
        ("weft_completed", c_uint64, (c_void_p,)),
        ("weft_done_ns", c_uint64, (c_void_p, c_uint64)),
        ("weft_in_place_calls", c_uint64, (c_void_p,)),
        ("weft_abort", None, (c_void_p,)),
        ("weft_submit", c_uint64, (c_void_p, POINTER(_CallStruct))),
        ("weft_wait", c_int, (c_void_p, c_uint64, c_double, POINTER(_FailureStruct))),
        (
            "weft_all_reduce",
            c_int,
            (c_void_p, c_void_p, c_void_p, c_uint64, c_uint32, c_uint32, c_double, POINTER(_FailureStruct)),
        ),
        ("weft_send", c_uint64, (c_void_p, c_int, c_uint32, c_void_p, c_uint64)),
        ("weft_receive", c_uint64, (c_void_p, c_int, c_uint32, c_void_p, c_uint64)),
        ("weft_wait_for_message", c_int, (c_void_p, c_uint64, c_double, POINTER(_DeliveryStruct))),
        ("weft_is_message_done", c_int, (c_void_p, c_uint64)),
        ("weft_forget_message", None, (c_void_p, c_uint64)),
        ("weft_announced", None, (c_void_p, c_int, POINTER(c_uint64))),
        ("weft_manner", None, (c_void_p, POINTER(c_uint64))),
        ("weft_set_manner", None, (c_void_p, c_uint64, c_int)),
    )
    for name, result, arguments in declared:
        function = getattr(library, name)
        function.restype = result
        function.argtypes = list(arguments)


def prepare(library: ctypes.CDLL, segment: SharedSegment, num_ranks: int, arena_bytes: int) -> None:
    """Lay the segment out.  By the rank that made it, before any rank opens an engine on it."""
    library.weft_prepare(_address(segment), num_ranks, arena_bytes)


def _address(segment: SharedSegment) -> int:
    return ctypes.addressof(c_char.from_buffer(segment.memory))


class Engine:
    """This rank's engine on a segment: carries out calls one after another in the order of their submission, and
    messages, those to one other rank and of one tag in the order in which they were sent.

    What waits or begins raises `GroupFailed` where it cannot be carried out, or this rank has left the group.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        segment: SharedSegment,
        *,
        rank: int,
        num_ranks: int,
        num_local_ranks: int,
        arena_bytes: int,
    ) -> None:
        self._library = library
        self._segment: SharedSegment | None = segment
        self._num_ranks = num_ranks
        self._array = c_uint64 * num_ranks
        self._base = _address(segment)
        self._arena = Arena(arena_bytes)
        self._backed_bytes = 0
        self._piece_types: dict[int, Any] = {}
        self._arena_offset = int(library.weft_arena_offset(self._base, rank))
        self._rank = rank
        self._process = os.getpid()
        self._closed = False
        self._reduce: Callable[..., int] = library.weft_all_reduce
        self._defined = frozenset(
            (dtype, op) for dtype in DTYPES.values() for op in range(len(OPS)) if library.weft_is_defined(dtype, op)
        )
        self._failure = _FailureStruct()  # of the short way: whoever fails at the same time fails for the same reason
        self._failure_at = byref(self._failure)
        self._handle: int | None = library.weft_open(self._base, rank, num_ranks, num_local_ranks)
        assert self._handle, "the segment is laid out before engines are opened"
        # At the interpreter's exit the thread must end before the memory goes; the rest goes with the process.
        self._at_exit = weakref.finalize(self, _leave, library, self._handle, self._process, segment)

    # ── calls ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, call: Call, timeout_seconds: float, *, background: bool) -> int:
        """Put a call in the queue and return its number; `background`: begin although nobody waits for it yet."""
        send, receive = self._arrays(call.send), self._arrays(call.receive)
        struct = _CallStruct(
            call.kind,
            call.dtype,
            call.op,
            background,
            call.input,
            call.output,
            call.num_bytes,
            timeout_seconds,
            *(None if array is None else ctypes.addressof(array) for array in (*send, *receive)),
        )
        return int(self._library.weft_submit(self._alive(), byref(struct)))

    def wait(self, ticket: int, timeout_seconds: float) -> None:
        """Return when the call is done."""
        failure = _FailureStruct()
        if self._library.weft_wait(self._alive(), ticket, timeout_seconds, byref(failure)):
            raise GroupFailed(self._described(failure))

    def all_reduce(self, address: int, num_bytes: int, dtype: int, op: int, timeout_seconds: float) -> None:
        """All-reduce in place and wait: the same as `submit` and `wait`, in one call into C++."""
        handle = self._alive()
        if self._reduce(handle, address, address, num_bytes, dtype, op, timeout_seconds, self._failure_at):
            raise GroupFailed(self._described(self._failure))

    def completed(self) -> int:
        """Return the number up to which calls have ended, with or without an error."""
        return int(self._library.weft_completed(self._alive()))

    def done_ns(self, ticket: int) -> int:
        """Return when a call was done, by `perf_counter_ns`; 0: it is not done, or too long ago to be known."""
        return int(self._library.weft_done_ns(self._handle, ticket)) if self._handle else 0

    def supports(self, dtype: int, op: int) -> bool:
        """Whether the reduction is defined: bitwise ones are not for floats, averages not for truth values."""
        return (dtype, op) in self._defined

    # ── messages ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def send(self, target: int, tag: int, address: int, num_bytes: int) -> int:
        """Begin to send, and return the message's number.  It is done when its memory can be used again: it may still
        lie in the shared memory then."""
        return self._begun(self._library.weft_send(self._alive(), target, tag, address, num_bytes))

    def receive(self, source: int, tag: int, address: int, num_bytes: int) -> int:
        """Begin to receive from a rank, or (-1) from any, and return the message's number."""
        return self._begun(self._library.weft_receive(self._alive(), source, tag, address, num_bytes))

    def _begun(self, number: int) -> int:
        if number == 0:  # left by another thread, just now
            raise GroupFailed(Failure(ErrorCode.CLOSED, self._rank, self._rank))
        return number

    def wait_for_message(self, number: int, timeout_seconds: float) -> tuple[int, int]:
        """Wait until a message is done, and forget it; return the position in the group of the rank that sent it, and
        its end by `perf_counter_ns` (0 where another thread had waited for it before)."""
        delivery = _DeliveryStruct()
        if self._library.weft_wait_for_message(self._alive(), number, timeout_seconds, byref(delivery)):
            failure = delivery.failure
            detail = "" if delivery.sent_bytes == _NOT_KNOWN else f"sent {delivery.sent_bytes:,}"
            raise GroupFailed(Failure(ErrorCode(failure.code), failure.culprit, failure.reporter, detail))
        return delivery.source, delivery.done_ns

    def is_message_done(self, number: int) -> bool:
        """Whether a wait would return, or raise, at once."""
        return bool(self._library.weft_is_message_done(self._alive(), number))

    def forget_message(self, number: int) -> None:
        """Forget one that is done and that nobody will wait for."""
        self._library.weft_forget_message(self._alive(), number)

    # ── memory and life ───────────────────────────────────────────────────────────────────────────────────────────────

    def allocate(self, num_bytes: int) -> memoryview | None:
        """Return memory that the other ranks of the group can reach; None where there is no more."""
        self._alive()
        segment, start = self._segment, self._arena.take(num_bytes)
        if segment is None or start is None:
            return None
        if not self._has_memory(segment, start + whole_pages(num_bytes)):
            self._arena.give_back(start)
            return None
        # The array keeps the mapping alive, whatever becomes of this engine; tensors made of it keep the array.
        array = self._piece_of(num_bytes).from_buffer(segment.memory, self._arena_offset + start)
        weakref.finalize(array, self._arena.give_back, start)
        return memoryview(array).cast("B")

    def _piece_of(self, num_bytes: int) -> Any:
        """An array type whose instances, unlike those of ctypes' own, can be watched by weak references.  A training
        asks for the same few sizes again and again, and types are garbage that only the collector can free."""
        piece_type = self._piece_types.get(num_bytes)
        if piece_type is None:
            if len(self._piece_types) > _MANY_TYPES:
                self._piece_types.clear()
            piece_type = self._piece_types[num_bytes] = type("Piece", (c_char * num_bytes,), {})
        return piece_type

    def _has_memory(self, segment: SharedSegment, stop: int) -> bool:
        """Return whether the arena has memory up to `stop`, and reserve it."""
        # A write to a shared page without memory behind it ends the process by SIGBUS, so pages are populated here.
        # They stay when pieces are given back, so everything before `_backed_bytes` has been reserved already.
        start = self._backed_bytes
        if stop <= start:
            return True
        try:
            segment.memory.madvise(_POPULATE_WRITE, self._arena_offset + start, stop - start)
        except OSError as problem:
            if problem.errno != errno.EINVAL:  # else this kernel cannot be asked
                return False
        self._backed_bytes = stop
        return True

    def abort(self) -> None:
        """Release every rank that waits in this group, with an error; the group cannot be used afterwards."""
        if self._handle is not None and self._process == os.getpid():
            self._library.weft_abort(self._handle)

    def leave(self) -> None:
        """End the thread and fail what waits; the engine can still be asked.  Twice is as good as once."""
        if self._handle is not None and self._process == os.getpid():
            self._library.weft_leave(self._handle)

    def close(self) -> None:
        """Leave, and let go of the memory.  Threads that are still inside a call of this object get their error: what
        they use in C++ goes with this object, which they hold."""
        self.leave()
        self._closed = True
        self._at_exit.detach()
        self._segment = None  # torch may remember the group for long; its memory must not stay as long

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # A group that is dropped and not destroyed ends with its last reference, as Gloo's do.  At the very end this
        # module's names are gone before its objects: hence the argument.
        handle = getattr(self, "_handle", None)
        if handle is None or is_finalizing():
            return
        self._at_exit.detach()
        if self._process == os.getpid():  # a forked child has not got the thread
            self._library.weft_close(handle)

    @property
    def kernel_variant(self) -> str:
        """The instruction set of the summing loops, chosen when the library was loaded."""
        return self._library.weft_kernel_variant().decode()

    @property
    def in_place_calls(self) -> int:
        """Calls in which tensors were reduced or read where they lie, without staging."""
        return int(self._library.weft_in_place_calls(self._alive()))

    @property
    def arena_taken_bytes(self) -> int:
        return self._arena.taken_bytes

    @property
    def manner(self) -> Manner:
        numbers = (c_uint64 * 2)()
        self._library.weft_manner(self._alive(), numbers)
        return Manner(numbers[0], bool(numbers[1]))

    def set_manner(self, manner: Manner) -> None:
        """Copy in this way from now on.  On every rank alike, between two calls."""
        assert 4096 <= manner.slot_bytes <= 4 << 20, "a slot fits into a bank"
        self._library.weft_set_manner(self._alive(), manner.slot_bytes, manner.streams_in)

    def _alive(self) -> int:
        if self._handle is None or self._closed or self._process != os.getpid():
            raise GroupFailed(Failure(ErrorCode.CLOSED, self._rank, self._rank))
        return self._handle

    def _arrays(self, regions: Sequence[Region]) -> tuple[Any, Any]:
        if not regions:
            return None, None
        assert len(regions) == self._num_ranks, "one region per rank of the group"
        return self._array(*(at for at, _ in regions)), self._array(*(size for _, size in regions))

    def _described(self, failure: _FailureStruct) -> Failure:
        code = ErrorCode(failure.code)
        detail = ""
        if code is ErrorCode.MISMATCH and failure.culprit >= 0:
            other = failure.reporter if failure.culprit == self._rank else failure.culprit
            detail = f"{self._announced(self._rank)} here, {self._announced(other)} there"
        return Failure(code, failure.culprit, failure.reporter, detail)

    def _announced(self, rank: int) -> str:
        numbers = (c_uint64 * 5)()
        self._library.weft_announced(self._handle, rank, numbers)
        kind = Kind(numbers[0])
        if kind is Kind.BARRIER:
            return "a barrier"
        return f"{kind.title} of {numbers[3]:,} bytes (dtype {numbers[1]}, op {numbers[2]}, cut {numbers[4]:x})"


def _leave(library: ctypes.CDLL, handle: int, process: int, segment: SharedSegment) -> None:
    """End an engine's thread.  `segment` is held until then."""
    del segment
    if process == os.getpid():
        library.weft_leave(handle)

"""The same transport in pure Python, for machines without a C++ compiler: mapped memory, torch's sums, polling.

A rank copies a piece into one of its two banks, publishes a turn, waits for everybody's, and reads what it needs out of
the others' banks; the next piece takes the other bank.  When a rank writes a bank again, it has seen every other rank's
later turn, and so the end of its reading.

Words are stored and loaded by plain moves of eight aligned bytes, and nothing here can ask for more.  x86-64 keeps
stores in order and loads in order, so a turn that is seen brings along what was copied before it; arm64 does not, and
gets Gloo instead (`may_work_here`).
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import platform
import sys
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch
from torch import Tensor

from weft.comm.shared_memory._call import DTYPES, OPS, Call, Failure, GroupFailed, Kind, Region, Trouble
from weft.comm.shared_memory._process import started_at
from weft.comm.shared_memory._segment import SharedSegment

_PAGE = 4096
_BANK = 1 << 20
_TROUBLE = 8
"""Word of the first page: 0, or what ended the group."""
_TURN, _HAS_LEFT, _PROCESS, _STARTED, _SIGNATURE, _TABLE = 0, 16, 17, 18, 32, 128
"""Words of a rank's page.  Signature (2 × 4 words) and table (2 × 128) alternate from call to call."""
_MAX_RANKS = 128
_POLLS = 400
_LOOK_SECONDS = 0.1
_KEPT_TIMES = 256
"""Calls of which it is known when they were done."""
_DTYPES = tuple(DTYPES)
_ACCUMULATED_IN = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
_SUPPORTED = _DTYPES[:10]
_TRUTH_OPS = tuple(op for op in OPS if op != "avg")
_FLOAT_OPS = OPS[:5]


def may_work_here() -> bool:
    """Whether this processor keeps the order of stores that plain Python relies on."""
    return sys.platform.startswith("linux") and platform.machine() in ("x86_64", "AMD64")


def segment_bytes(num_ranks: int) -> int:
    """What `PythonTransport` needs."""
    return _PAGE + num_ranks * (_PAGE + 2 * _BANK)


class PythonTransport:
    """This rank's part; a `Transport`.  Calls run one after another on one thread of their own."""

    name = "shared memory in pure Python"
    has_arena = False
    mail = None

    def __init__(self, segment: SharedSegment, *, rank: int, num_ranks: int) -> None:
        assert num_ranks <= _MAX_RANKS
        self._memory: mmap.mmap | None = segment.memory
        self._words = memoryview(segment.memory).cast("Q")
        self._rank, self._num_ranks = rank, num_ranks
        self._turn = self._calls = 0
        self._words[self._word(rank, _STARTED)] = started_at(os.getpid())
        self._words[self._word(rank, _PROCESS)] = os.getpid()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weft-shared-memory")
        self._pending: dict[int, Future[None]] = {}
        self._submitted = self._done = 0
        self._done_ns: dict[int, int] = {}
        """Ends of the last calls, by ticket."""
        self._failure: Failure | None = None
        self._first_failed = 0
        self._is_closed = False
        self._is_compared = True
        self._deadline = 0.0

    # ── the transport ─────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(self, call: Call, patience_seconds: float, *, background: bool) -> int:
        if self._is_closed:
            raise GroupFailed(Failure(Trouble.CLOSED, self._rank, self._rank))
        self._submitted += 1
        ticket = self._submitted
        self._pending[ticket] = future = self._thread.submit(self._run, ticket, call, patience_seconds)
        if future.done():  # it may have been before it was noted
            self._pending.pop(ticket, None)
        return ticket

    def wait(self, ticket: int, patience_seconds: float) -> None:
        future = self._pending.get(ticket)
        if future is not None:
            try:
                future.result(patience_seconds + 1.0)  # the call itself ends at its deadline, with a better reason
            except TimeoutError:
                raise GroupFailed(Failure(Trouble.DEADLINE, -1, self._rank)) from None
            except CancelledError:
                raise GroupFailed(Failure(Trouble.CLOSED, self._rank, self._rank)) from None
        if self._failure is not None and ticket >= self._first_failed:
            raise GroupFailed(self._failure)

    def all_reduce(self, address: int, num_bytes: int, dtype: int, op: int, patience_seconds: float) -> None:
        call = Call(Kind.ALL_REDUCE, dtype, op, address, address, num_bytes)
        self.wait(self.submit(call, patience_seconds, background=False), patience_seconds)

    def completed(self) -> int:
        return self._done

    def done_ns(self, ticket: int) -> int:
        return self._done_ns.get(ticket, 0)

    def supports(self, dtype: int, op: int) -> bool:
        kind = _DTYPES[dtype]
        if kind not in _SUPPORTED:
            return False
        allowed = _FLOAT_OPS if kind.is_floating_point else _TRUTH_OPS if kind is torch.bool else OPS
        return OPS[op] in allowed

    def allocate(self, num_bytes: int) -> memoryview | None:
        return None

    def abort(self) -> None:
        if not self._is_closed:
            self._tell(Trouble.ABORTED, self._rank)

    def leave(self) -> None:
        self.close()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._done < self._submitted:
            self._tell(Trouble.LEFT, self._rank)
        self._words[self._word(self._rank, _HAS_LEFT)] = 1
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._words.release()
        self._memory = None  # torch may remember the group for long; its memory must not stay as long

    # ── waiting ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _run(self, ticket: int, call: Call, patience_seconds: float) -> None:
        self._deadline = time.monotonic() + patience_seconds
        try:
            if self._num_ranks > 1:
                self._calls += 1
                self._check()
                self._announce(call)
            self._carry_out(call)
        except GroupFailed as failed:
            if self._failure is None:
                self._first_failed, self._failure = ticket, failed.failure
        finally:
            self._done_ns[ticket] = time.perf_counter_ns()
            self._done_ns.pop(ticket - _KEPT_TIMES, None)
            self._done = ticket
            self._pending.pop(ticket, None)

    def _carry_out(self, call: Call) -> None:
        match call.kind:
            case Kind.ALL_REDUCE:
                self._all_reduce(call)
            case Kind.REDUCE_SCATTER:
                self._reduce_scatter(call)
            case Kind.ALL_GATHER:
                self._all_gather(call)
            case Kind.ALL_TO_ALL:
                self._all_to_all(call)
            case Kind.BARRIER:
                self._pass()

    def _word(self, rank: int, word: int) -> int:
        return (1 + rank) * _PAGE // 8 + word

    def _pass(self) -> None:
        """Publish a turn, and wait for everybody's; after the first of a call, compare what the ranks call."""
        if self._num_ranks == 1:
            return
        self._turn += 1
        self._words[self._word(self._rank, _TURN)] = self._turn
        for step in range(1, self._num_ranks):
            self._wait_for((self._rank + step) % self._num_ranks)
        if not self._is_compared:
            self._is_compared = True
            self._compare()

    def _wait_for(self, peer: int) -> None:
        at, polls, nap = self._word(peer, _TURN), 0, 20e-6
        next_look = time.monotonic() + _LOOK_SECONDS
        while self._words[at] < self._turn:
            polls += 1
            if polls < _POLLS:
                time.sleep(0)  # lets another thread of this process and another process on this core go on
                continue
            time.sleep(nap)
            nap = min(nap * 1.5, 1e-3)
            self._check()
            now = time.monotonic()
            if now >= next_look:
                next_look = now + _LOOK_SECONDS
                self._look_at_processes()
            if now >= self._deadline:
                self._fail(Trouble.DEADLINE, peer)

    def _look_at_processes(self) -> None:
        for rank in range(self._num_ranks):
            if rank == self._rank or self._words[self._word(rank, _TURN)] >= self._turn:
                continue
            has_left = self._words[self._word(rank, _HAS_LEFT)]
            started = started_at(self._words[self._word(rank, _PROCESS)])
            is_alive = started == self._words[self._word(rank, _STARTED)]
            if self._words[self._word(rank, _TURN)] >= self._turn:
                continue  # it has published, and left or died since
            if has_left:
                self._fail(Trouble.LEFT, rank)
            if not is_alive:
                self._fail(Trouble.DIED, rank)

    def _tell(self, trouble: Trouble, culprit: int) -> None:
        if not self._words[_TROUBLE]:
            self._words[_TROUBLE] = int(trouble) << 32 | self._rank << 16 | culprit

    def _fail(self, trouble: Trouble, culprit: int) -> None:
        self._tell(trouble, culprit)
        self._check()

    def _check(self) -> None:
        word = self._words[_TROUBLE]
        if word:
            raise GroupFailed(Failure(Trouble(word >> 32), word & 0xFFFF, word >> 16 & 0xFFFF))

    def _announce(self, call: Call) -> None:
        regions = call.send if call.kind is Kind.REDUCE_SCATTER else call.receive
        sizes = () if call.kind is Kind.ALL_TO_ALL else tuple(size for _, size in regions)
        layout = hashlib.sha256(repr((call.num_bytes, sizes)).encode()).digest()
        start = self._word(self._rank, _SIGNATURE) + 4 * (self._calls & 1)
        reduces = call.kind in (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
        self._words[start] = call.kind
        self._words[start + 1] = call.dtype if reduces else 0
        self._words[start + 2] = call.op if reduces else 0
        self._words[start + 3] = int.from_bytes(layout[:8], "little")
        table = self._word(self._rank, _TABLE) + _MAX_RANKS * (self._calls & 1)
        for rank, (_, size) in enumerate(call.send):
            self._words[table + rank] = size
        self._is_compared = False

    def _announced(self, rank: int) -> list[int]:
        start = self._word(rank, _SIGNATURE) + 4 * (self._calls & 1)
        return self._words[start : start + 4].tolist()

    def _sent(self, source: int, to: int) -> int:
        return self._words[self._word(source, _TABLE) + _MAX_RANKS * (self._calls & 1) + to]

    def _compare(self) -> None:
        mine = self._announced(self._rank)
        for rank in range(self._num_ranks):
            if self._announced(rank) != mine:
                self._fail(Trouble.MISMATCH, rank)

    # ── the collectives ───────────────────────────────────────────────────────────────────────────────────────────────

    def _bank(self, rank: int, turn: int, start: int, size: int) -> Tensor:
        assert self._memory is not None
        at = _PAGE * (1 + self._num_ranks) + (2 * rank + (turn & 1)) * _BANK + start
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=at) if size else _NOTHING

    def _stage(self, start: int, source: Tensor) -> None:
        self._bank(self._rank, self._turn + 1, start, source.numel()).copy_(source)

    def _published(self, rank: int, start: int, size: int) -> Tensor:
        return self._bank(rank, self._turn, start, size)

    def _all_reduce(self, call: Call) -> None:
        given, result = _bytes_at((call.input, call.num_bytes)), _bytes_at((call.output, call.num_bytes))
        for start in range(0, max(call.num_bytes, 1), _BANK):
            piece = given[start : start + _BANK]
            self._stage(0, piece)
            self._pass()
            parts = [
                piece if rank == self._rank else self._published(rank, 0, piece.numel())
                for rank in range(self._num_ranks)
            ]
            _reduce(call, parts, result[start : start + _BANK])

    def _reduce_scatter(self, call: Call) -> None:
        given = [_bytes_at(region) for region in call.send]
        own = given[self._rank]
        result = _bytes_at((call.output, own.numel()))
        room = _BANK // self._num_ranks // 128 * 128
        for start in range(0, max(1, *(tensor.numel() for tensor in given)), room):
            for rank, tensor in enumerate(given):
                if rank != self._rank:
                    self._stage(rank * room, tensor[start : start + room])
            self._pass()
            piece = own[start : start + room]
            parts = [
                piece if rank == self._rank else self._published(rank, self._rank * room, piece.numel())
                for rank in range(self._num_ranks)
            ]
            _reduce(call, parts, result[start : start + room])

    def _all_gather(self, call: Call) -> None:
        taken = [_bytes_at(region) for region in call.receive]
        given = _bytes_at((call.input, taken[self._rank].numel()))
        for start in range(0, max(1, *(tensor.numel() for tensor in taken)), _BANK):
            self._stage(0, given[start : start + _BANK])
            self._pass()
            for rank, tensor in enumerate(taken):
                piece = tensor[start : start + _BANK]
                if rank != self._rank:
                    piece.copy_(self._published(rank, 0, piece.numel()))
        if call.receive[self._rank][0] != call.input:
            taken[self._rank].copy_(given)

    def _all_to_all(self, call: Call) -> None:
        given, taken = [_bytes_at(region) for region in call.send], [_bytes_at(region) for region in call.receive]
        room = _BANK // self._num_ranks // 128 * 128
        start, most = 0, 1  # what the others send to one another is known after the first turn
        while start < most:
            for rank, tensor in enumerate(given):
                if rank != self._rank:
                    self._stage(rank * room, tensor[start : start + room])
            self._pass()
            if start == 0 and self._num_ranks > 1:
                most = max(most, self._check_sizes(taken))
            for rank, tensor in enumerate(taken):
                piece = tensor[start : start + room]
                if rank != self._rank:
                    piece.copy_(self._published(rank, self._rank * room, piece.numel()))
            start += room
        taken[self._rank].copy_(given[self._rank])

    def _check_sizes(self, taken: Sequence[Tensor]) -> int:
        for rank, tensor in enumerate(taken):
            if self._sent(rank, self._rank) != tensor.numel():
                self._fail(Trouble.MISMATCH, rank)
        everyone = range(self._num_ranks)
        return max(self._sent(source, to) for source in everyone for to in everyone if source != to)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _bytes_at(region: Region) -> Tensor:
    address, size = region
    if not size:
        return _NOTHING
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _reduce(call: Call, parts: Sequence[Tensor], result: Tensor) -> None:
    """In the order of the ranks; bf16 and fp16 in fp32, rounded once."""
    if not result.numel():
        return
    dtype, op = _DTYPES[call.dtype], OPS[call.op]
    typed = [part.view(dtype) for part in parts]
    total = typed[0].to(_ACCUMULATED_IN.get(dtype, dtype), copy=True)
    for part in typed[1:]:
        _combine(op, total, part)
    if op == "avg":
        total.div_(len(parts), rounding_mode=None if dtype.is_floating_point else "trunc")
    result.view(dtype).copy_(total)


def _combine(op: str, total: Tensor, part: Tensor) -> None:
    match op:
        case "sum" | "avg":
            total.add_(part)
        case "product":
            total.mul_(part)
        case "min":
            torch.minimum(total, part.to(total.dtype), out=total)
        case "max":
            torch.maximum(total, part.to(total.dtype), out=total)
        case "band":
            total.bitwise_and_(part)
        case "bor":
            total.bitwise_or_(part)
        case _:
            total.bitwise_xor_(part)

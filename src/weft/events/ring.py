"""What a rank did last, in memory that others read while it runs, while it hangs, and after it was killed.

A ring is a small file that the rank maps: its newest spans, collectives and steps, and the names that they point to.
The rank alone writes it and never waits for a reader; a reader takes what is there and sees by the counters what was
overwritten before it came.  Every write is one aligned store of eight bytes.  A span costs 0.6 µs, clock reads included
(AMD EPYC, 2026-11).

Layout, in cells of eight bytes: a header of 64 cells, names of 64 bytes each, then three rings of records.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Self, final

MAGIC = 0x5745_4654_5249_4E47
VERSION = 1
NUM_NAMES = 120
_NAME_BYTES = 64
HEADER_CELLS = 64
NAME_CELLS = NUM_NAMES * _NAME_BYTES // 8
SPAN_CELLS, COLLECTIVE_CELLS, STEP_CELLS = 8, 8, 16
"""Cells of a record.

Span: name, stage << 32 | microbatch, start, duration, own time, processor time (−1: not asked), 0, number + 1.
Collective: axis << 32 | operation, bytes, launch, end, begin of the first wait, time in waits, 0, number + 1.
Step: step, start, end, memory in bytes, loss, gradient norm, learning rate, loss scale, count (these five as fp64),
skipped, spans and collectives so far, 0, 0, 0, number + 1.
Times are nanoseconds of the host's monotonic clock.  The number is 0 while the rest is written.
"""
MAGIC_CELL, VERSION_CELL, PID_CELL, RANK_CELL = range(4)
NUM_SPANS_CELL, NUM_COLLECTIVES_CELL, NUM_STEPS_CELL = 4, 5, 6
"""Capacities of the rings."""
SPANS_CELL, COLLECTIVES_CELL, STEPS_CELL, NAMES_CELL = 8, 9, 10, 11
"""Records written so far, and names."""
CLOCK_CELL = 12
"""Nanoseconds from the monotonic clock to that of 1970."""
OPEN_CELL, OPEN_SINCE_CELL = 13, 14
"""Innermost open span: its name + 1 (0: none), and the time of the last change of it."""
LOOP_CELL, STEP_CELL = 15, 16
"""1 in the loop over steps, 2 behind it; finished steps."""


_pack_span = struct.Struct("@8q").pack_into
_pack_collective = _pack_span
_pack_step = struct.Struct("@4q5d7q").pack_into


class Capacities(NamedTuple):
    """Numbers of records that a ring holds."""

    spans: int = 8_192
    collectives: int = 8_192
    steps: int = 512

    @property
    def num_bytes(self) -> int:
        cells = SPAN_CELLS * self.spans + COLLECTIVE_CELLS * self.collectives + STEP_CELLS * self.steps
        return 8 * (HEADER_CELLS + NAME_CELLS + cells)


_USUAL = Capacities()
SMALL = Capacities(spans=512, collectives=512, steps=64)
"""Capacities where the host's memory for such files is short: longer gaps between two reads cost records."""


class StepScalars(NamedTuple):
    """Numbers of a step that all ranks agreed on."""

    loss: float
    gradient_norm: float
    learning_rate: float
    loss_scale: float
    num_counted: float
    """Tokens with a label, or samples, of the global batch."""
    skipped: bool


@final
class RankRing:
    """The ring of one rank, which it writes.  Spans by the thread that computes, collectives under the caller's
    lock."""

    def __init__(self, memory: mmap.mmap, rank: int, capacities: Capacities) -> None:
        """Begin a ring in memory that is all zeros."""
        self._memory = memoryview(memory)
        self.cells: memoryview[int] = self._memory.cast("q")
        self.names: list[str] = []
        """The names by their numbers."""
        self._numbers: dict[str, int] = {}
        self.capacities = capacities
        self.folder: Path | None = None
        """Folder of the rings of this host's ranks; None where no other process reads it."""
        self._most_spans = capacities.spans
        self._spans_at = HEADER_CELLS + NAME_CELLS
        self._collectives_at = self._spans_at + SPAN_CELLS * capacities.spans
        self._steps_at = self._collectives_at + COLLECTIVE_CELLS * capacities.collectives
        self.num_spans = self.num_collectives = self.num_steps = 0
        cells = self.cells
        cells[NUM_SPANS_CELL], cells[NUM_COLLECTIVES_CELL], cells[NUM_STEPS_CELL] = capacities
        cells[VERSION_CELL], cells[PID_CELL], cells[RANK_CELL] = VERSION, os.getpid(), rank
        cells[CLOCK_CELL] = time.time_ns() - time.perf_counter_ns()
        cells[MAGIC_CELL] = MAGIC  # last: from now on a reader may read it

    @classmethod
    def create(cls, path: Path, rank: int, capacities: Capacities = _USUAL) -> Self:
        """Make the ring's file.  Raises `OSError` where there is no room for it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Room is taken now: a full disk is an error here, and not a signal later.
            os.posix_fallocate(descriptor, 0, capacities.num_bytes)
            ring = cls(mmap.mmap(descriptor, capacities.num_bytes), rank, capacities)
            ring.folder = path.parent
            return ring
        except OSError:
            path.unlink()
            raise
        finally:
            os.close(descriptor)

    @classmethod
    def private(cls, capacities: Capacities = _USUAL) -> Self:
        """Make a ring that this process alone reads."""
        return cls(mmap.mmap(-1, capacities.num_bytes), 0, capacities)

    def name(self, name: str) -> int:
        """Return the number of a name: of a span, an axis or an operation.  Those beyond 119 names share `…`."""
        number = self._numbers.get(name)
        if number is None:
            if len(self.names) == NUM_NAMES:
                number = NUM_NAMES - 1
            else:
                number = len(self.names)
                self.names.append("…" if number == NUM_NAMES - 1 else name)
                text = self.names[number].encode()[: _NAME_BYTES - 1]
                start = 8 * HEADER_CELLS + number * _NAME_BYTES
                self._memory[start : start + len(text)] = text
                self.cells[NAMES_CELL] = number + 1
            self._numbers[name] = number
        return number

    def set_open(self, name: int, since_ns: int) -> None:
        """Say which span is the innermost open one from now on; −1: none."""
        self.cells[OPEN_SINCE_CELL] = since_ns
        self.cells[OPEN_CELL] = name + 1

    def span(self, name: int, start_ns: int, duration_ns: int, own_ns: int, cpu_ns: int = -1, place: int = -1) -> None:
        """Record a span that has ended.  `place` is stage << 32 | microbatch; −1: of neither."""
        number = self.num_spans
        at = self._spans_at + SPAN_CELLS * (number % self._most_spans)
        cells = self.cells
        cells[at + 7] = 0
        _pack_span(self._memory, 8 * at, name, place, start_ns, duration_ns, own_ns, cpu_ns, 0, number + 1)
        self.num_spans = cells[SPANS_CELL] = number + 1

    def launched(self, axis: str, operation: str, num_bytes: int, launched_ns: int) -> CollectiveSlot:
        """Record a collective that begins; what is returned takes how it goes on."""
        number = self.num_collectives
        at = self._collectives_at + COLLECTIVE_CELLS * (number % self.capacities.collectives)
        kind = self.name(axis) << 32 | self.name(operation)
        cells = self.cells
        cells[at + 7] = 0
        _pack_collective(self._memory, 8 * at, kind, num_bytes, launched_ns, 0, 0, 0, 0, number + 1)
        self.num_collectives = cells[COLLECTIVES_CELL] = number + 1
        return CollectiveSlot(cells, at, number + 1)

    def step(self, step: int, start_ns: int, end_ns: int, memory_bytes: int, scalars: StepScalars) -> None:
        """Record that `step` steps are finished, this one from `start_ns` to `end_ns`."""
        cells, number = self.cells, self.num_steps
        at = self._steps_at + STEP_CELLS * (number % self.capacities.steps)
        cells[at + 15] = 0
        counts = self.num_spans, self.num_collectives
        _pack_step(self._memory, 8 * at, step, start_ns, end_ns, memory_bytes, *scalars, *counts, 0, 0, 0, number + 1)
        cells[STEP_CELL] = step
        self.num_steps = cells[STEPS_CELL] = number + 1

    def begin(self, step: int) -> None:
        """The loop begins after `step` finished steps."""
        self.cells[STEP_CELL], self.cells[LOOP_CELL] = step, 1

    def end(self) -> None:
        """The loop is over."""
        self.cells[LOOP_CELL] = 2

    def spans(self) -> list[tuple[int, int, int]]:
        """Return (name, start, duration) of the spans that the ring holds, oldest first."""
        size, cells = self.capacities.spans, self.cells
        first = max(0, self.num_spans - size)
        places = (self._spans_at + SPAN_CELLS * (number % size) for number in range(first, self.num_spans))
        return [(cells[at], cells[at + 2], cells[at + 3]) for at in places]


class CollectiveSlot:
    """The record of one collective, as long as the ring has not come round to it."""

    __slots__ = ("_at", "_cells", "_number")

    def __init__(self, cells: memoryview[int], at: int, number: int) -> None:
        self._cells, self._at, self._number = cells, at, number

    def waits(self, since_ns: int) -> None:
        """Somebody begins to wait."""
        cells, at = self._cells, self._at
        if cells[at + 7] == self._number and not cells[at + 4]:
            cells[at + 4] = since_ns

    def waited(self, done_ns: int, exposed_ns: int) -> None:
        """It ended at `done_ns`, and was waited for so long."""
        cells, at = self._cells, self._at
        if cells[at + 7] == self._number:
            cells[at + 5] = exposed_ns
            cells[at + 3] = done_ns

    def done(self, done_ns: int) -> None:
        """It ended, and nobody waits."""
        if self._cells[self._at + 7] == self._number:
            self._cells[self._at + 3] = done_ns


def ring_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's ring in its generation's folder."""
    return folder / f"rank-{rank}.ring"


def open_ring(folder: Path | None, rank: int, warn: Callable[[str], object]) -> RankRing | None:
    """Make the ring of a rank; None where the run is not recorded, or there is no room, which is said."""
    if folder is None:
        return None
    try:
        return RankRing.create(ring_path(folder, rank), rank)
    except OSError:
        pass
    try:
        return RankRing.create(ring_path(folder, rank), rank, SMALL)
    except OSError as problem:
        warn(f"rank {rank} is not recorded: {ring_path(folder, rank)} cannot be made ({problem.strerror}).")
        return None

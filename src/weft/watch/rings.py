"""Reads the rings of a host's ranks (`weft.events.ring`) from outside, without their help."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from weft.events import ring as layout
from weft.process import is_stopped
from weft.run.launch._rank import STACKS_SIGNAL
from weft.run.launch._rank_info import job_note, stacks_path
from weft.watch.accounting import STEP
from weft.watch.store import COLLECTIVE

_MOST_CALLS = 24
"""Innermost calls of a stack that are kept."""
_RING_SPAN = np.dtype(
    [
        ("name", "<i8"),
        ("microbatch", "<i4"),
        ("stage", "<i4"),
        ("start_ns", "<i8"),
        ("duration_ns", "<i8"),
        ("own_ns", "<i8"),
        ("cpu_ns", "<i8"),
        ("unused", "<i8"),
        ("number", "<i8"),
    ]  # fmt: skip
)
_RING_COLLECTIVE = np.dtype(
    [
        ("operation", "<i4"),
        ("axis", "<i4"),
        ("num_bytes", "<i8"),
        ("launched_ns", "<i8"),
        ("done_ns", "<i8"),
        ("waited_ns", "<i8"),
        ("exposed_ns", "<i8"),
        ("unused", "<i8"),
        ("number", "<i8"),
    ]  # fmt: skip
)
_RING_STEP = np.dtype(
    [
        ("step", "<i8"),
        ("start_ns", "<i8"),
        ("end_ns", "<i8"),
        ("memory_bytes", "<i8"),
        ("loss", "<f8"),
        ("gradient_norm", "<f8"),
        ("learning_rate", "<f8"),
        ("loss_scale", "<f8"),
        ("num_counted", "<f8"),
        ("skipped", "<i8"),
        ("num_spans", "<i8"),
        ("num_collectives", "<i8"),
        ("unused", "<i8", 3),
        ("number", "<i8"),
    ]  # fmt: skip
)


class NewRecords(NamedTuple):
    """What a ring has got since it was read last."""

    steps: NDArray[Any]
    """Steps that have ended, with the fields of `STEP` and the numbers that all ranks agreed on."""
    spans: NDArray[Any]
    """Spans that have ended, those of the step before included."""
    collectives: NDArray[Any]
    """All collectives that the ring holds."""
    lost_spans: int
    lost_collectives: int
    lost_steps: int


class OpenCollective(NamedTuple):
    """The collective in whose wait a rank is."""

    axis: str
    operation: str
    num_bytes: int
    seconds: float
    """Time since the wait began."""
    number: int
    """Number of it among the rank's collectives, from 1."""


@final
class RingReader:
    """Reads one rank's ring.  Its file may be removed meanwhile, and the rank be gone."""

    def __init__(self, path: Path) -> None:
        """Map it.  Raises `OSError` where there is none, and `ValueError` where it is not begun or of another form."""
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._cells = np.frombuffer(self._memory, dtype="<i8")
        if len(self._cells) < layout.HEADER_CELLS or self._cells[layout.MAGIC_CELL] != layout.MAGIC:
            raise ValueError(f"{path} is no ring, or not begun")
        if self._cells[layout.VERSION_CELL] != layout.VERSION:
            raise ValueError(f"{path} is a ring of another version")
        self.rank, self.pid = int(self._cells[layout.RANK_CELL]), int(self._cells[layout.PID_CELL])
        self.clock_ns = int(self._cells[layout.CLOCK_CELL])
        spans, collectives, steps = (int(self._cells[cell]) for cell in range(4, 7))
        at = 8 * (layout.HEADER_CELLS + layout.NAME_CELLS)
        self._spans = np.frombuffer(self._memory, _RING_SPAN, spans, at)
        at += _RING_SPAN.itemsize * spans
        self._collectives = np.frombuffer(self._memory, _RING_COLLECTIVE, collectives, at)
        at += _RING_COLLECTIVE.itemsize * collectives
        self._steps = np.frombuffer(self._memory, _RING_STEP, steps, at)
        self._read_steps = 0
        self._first_span = 0
        """Spans before the newest step that was read."""
        self._first_collective = 0

    @property
    def names(self) -> list[str]:
        """The names of spans, axes and operations, by their numbers."""
        size, first = layout.NAME_CELLS * 8 // layout.NUM_NAMES, 8 * layout.HEADER_CELLS
        count = int(self._cells[layout.NAMES_CELL])
        rows = (self._memory[first + size * number : first + size * (number + 1)] for number in range(count))
        return [row.rstrip(b"\0").decode(errors="replace") for row in rows]

    @property
    def step(self) -> int:
        """Finished steps."""
        return int(self._cells[layout.STEP_CELL])

    @property
    def has_begun(self) -> bool:
        """Whether the rank is in its loop over steps, or behind it."""
        return int(self._cells[layout.LOOP_CELL]) > 0

    @property
    def has_ended(self) -> bool:
        """Whether the rank's loop is over."""
        return int(self._cells[layout.LOOP_CELL]) == 2

    @property
    def has_new_steps(self) -> bool:
        """Whether steps have ended since the last read."""
        return int(self._cells[layout.STEPS_CELL]) > self._read_steps

    def phase(self) -> tuple[str, int]:
        """Return the innermost open span, and the moment of the last change of it (0: none yet)."""
        number = int(self._cells[layout.OPEN_CELL]) - 1
        names = self.names
        return (names[number] if 0 <= number < len(names) else ""), int(self._cells[layout.OPEN_SINCE_CELL])

    def open_collective(self, now_ns: int) -> OpenCollective | None:
        """Return the collective in whose wait the rank is, if it is in one: the one that it has waited for longest."""
        rows, _ = self._newest(self._collectives, layout.COLLECTIVES_CELL, 0)
        waiting = rows[(rows["waited_ns"] > 0) & (rows["done_ns"] == 0)]
        if not len(waiting):
            return None
        row, names = waiting[waiting["waited_ns"].argmin()], self.names
        seconds = max(now_ns - int(row["waited_ns"]), 0) / 1e9
        return OpenCollective(
            names[row["axis"]], names[row["operation"]], int(row["num_bytes"]), seconds, int(row["number"])
        )

    def read(self) -> NewRecords:
        """Return what has come since the last call."""
        steps, lost_steps = self._newest(self._steps, layout.STEPS_CELL, self._read_steps)
        first_span, first_collective = self._first_span, self._first_collective
        spans, lost_spans = self._newest(self._spans, layout.SPANS_CELL, first_span)
        collectives, _ = self._newest(self._collectives, layout.COLLECTIVES_CELL, 0)
        oldest = int(collectives["number"][0]) - 1 if len(collectives) else 0
        lost_collectives = max(0, min(oldest, int(self._cells[layout.COLLECTIVES_CELL])) - first_collective)
        if len(steps):
            self._read_steps = int(steps["number"][-1])
            self._first_span = int(steps["num_spans"][-1])
            self._first_collective = int(steps["num_collectives"][-1])
            # Losses before the first step that is there belong to steps that are lost, too, or to none.
        else:
            lost_spans = lost_collectives = 0
        return NewRecords(steps, spans, _as_stored(collectives), lost_spans, lost_collectives, lost_steps)

    def launched(self) -> NDArray[Any]:
        """Return the collectives that the ring holds, with their `number`, for counts by axis."""
        return self._newest(self._collectives, layout.COLLECTIVES_CELL, 0)[0]

    def _newest(self, ring: NDArray[Any], cell: int, first: int) -> tuple[NDArray[Any], int]:
        """Return the whole records from number `first` on, and how many were overwritten before they could be read."""
        count, size = int(self._cells[cell]), len(ring)
        oldest = max(first, count - size)
        numbers = np.arange(oldest, count)
        rows = ring[numbers % size].copy()
        # What the rank has overwritten meanwhile, or is writing now, has another number.
        whole = (rows["number"] == numbers + 1) & (ring["number"][numbers % size] == numbers + 1)
        return rows[whole], oldest - first + int((~whole).sum())


def ask_for_stacks(rings: Path, pids: Sequence[int]) -> None:
    """Let ranks write their stacks, where a launcher of Weft's has taught them to; from C, whatever Python does.  One
    that is stopped is not asked: it would answer when it goes on, and then perhaps in a bad moment."""
    if not job_note(rings).is_file():
        return
    for pid in pids:
        if not is_stopped(pid):
            with suppress(OSError):  # it has ended
                os.kill(pid, STACKS_SIGNAL)


def read_stack(rings: Path, rank: int) -> str:
    """Return the calls of a rank's main thread, innermost first, as it wrote them when it was asked; empty where it was
    not, or could not."""
    try:
        text = stacks_path(Path(job_note(rings).read_text()), rank).read_text(errors="replace")
    except OSError:
        return ""
    # faulthandler writes the main thread last, under a line with the number of the thread.
    calls = re.split(r"^(?:Current thread|Thread) .*$", text, flags=re.MULTILINE)[-1].strip("\n")
    return "\n".join(calls.splitlines()[:_MOST_CALLS])


def _as_stored(rows: NDArray[Any]) -> NDArray[Any]:
    """Return records of a ring as the store has them, with their numbers."""
    stored = np.zeros(len(rows), dtype=[*COLLECTIVE.descr, ("number", "<i8")])
    for name in stored.dtype.names or ():
        stored[name] = rows[name]
    return stored


def steps_of(records: NDArray[Any]) -> NDArray[Any]:
    """Return a ring's steps as `account` takes them."""
    steps = np.zeros(len(records), dtype=STEP)
    for name in STEP.names or ():
        steps[name] = records[name]
    return steps

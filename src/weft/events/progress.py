"""Progress of each rank of a job, in memory that the launcher reads while the ranks run.

The board is a small file that all processes of a host map.  Each rank writes its own row and nobody else's; the reader
never stops a rank.  It says where a rank was when it hung or was killed, because the memory outlives the process.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

PHASES = ("data_wait", "forward_backward", "reduce_wait", "optimizer", "checkpoint", "evaluation")
"""Phases of a training step; other names may be recorded besides."""

KEPT_STEPS = 24
"""Steps of which a row has the times."""
_NUMBERS = 8 + 3 * KEPT_STEPS
"""Numbers of a row: whole cache lines of 64 bytes, so that ranks do not slow one another down by writing."""
_PID, _STEP, _PHASE, _MOVES, _LOOP, _FIRST_STEP = range(6)
_BEGUN, _ENDED = 1, 2
_ROW_BYTES = 8 * _NUMBERS
_NO_PHASE, _OTHER_PHASE = 0, len(PHASES) + 1


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a rank in its training."""

    pid: int
    """Its process; 0 before it has written anything."""
    step: int
    """Finished steps, those before a resume included."""
    phase: str
    """Innermost phase that is open; empty between phases, `other` for one that is not a part of every step."""
    moves: int
    """Phases begun and ended, and steps finished: it changes with any progress."""
    has_begun: bool
    """Whether the loop over steps has begun."""
    has_ended: bool
    """Whether the loop is over."""
    first_step: int
    """Finished steps when the loop began."""

    def __str__(self) -> str:
        if not self.has_begun:
            return "before its first step"
        return f"in step {self.step + 1}" + (f" ({self.phase})" if self.phase else "")


class ProgressRow:
    """A rank's own row, which it writes.  Every write is one aligned store of eight bytes: a reader sees the old or the
    new number."""

    __slots__ = ("_cells",)

    def __init__(self, cells: memoryview[int]) -> None:
        self._cells = cells
        cells[_PID] = os.getpid()

    def begin(self, step: int) -> None:
        """The loop begins after `step` finished steps."""
        self._cells[_STEP] = self._cells[_FIRST_STEP] = step
        self._cells[_LOOP] = _BEGUN
        self._cells[_MOVES] += 1

    def end(self) -> None:
        """The loop is over: what follows is no step."""
        self._cells[_LOOP] = _ENDED

    def moved(self) -> None:
        """A part of a long phase is done, such as a batch of an evaluation."""
        self._cells[_MOVES] += 1

    def finished(self, step: int) -> None:
        """`step` steps are finished."""
        self._cells[_STEP] = step
        self._cells[_MOVES] += 1

    def took(self, step: int, own_ns: int, data_ns: int, optimizer_ns: int) -> None:
        """Step `step` took a rank so long without waiting for others; of that, waiting for data, and the optimizer.
        Call it before `finished`."""
        at = 8 + 3 * (step % KEPT_STEPS)
        self._cells[at], self._cells[at + 1], self._cells[at + 2] = own_ns, data_ns, optimizer_ns

    def enter(self, phase: int) -> int:
        """A phase begins, by its number in `PHASES`; return what `leave` takes."""
        cells = self._cells
        before = cells[_PHASE]
        cells[_PHASE] = phase + 1 if phase < len(PHASES) else _OTHER_PHASE
        cells[_MOVES] += 1
        return before

    def elsewhere(self) -> int:
        """Something begins that is no part of a step, such as printing; return what `leave` takes."""
        return self.enter(len(PHASES))

    def leave(self, before: int) -> None:
        """The phase ends that `enter` began."""
        self._cells[_PHASE] = before
        self._cells[_MOVES] += 1


@final
class ProgressBoard:
    """The rows of all ranks on one host."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._cells = memoryview(memory).cast("q")
        self.num_ranks = len(memory) // _ROW_BYTES

    @classmethod
    def create(cls, path: Path, num_ranks: int) -> Self:
        """Make the board.  Call it before the ranks start."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(descriptor, 0, num_ranks * _ROW_BYTES)  # a full disk is met here, and not by a signal later
        return cls._mapped(descriptor)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Map a board that another process has made.  Raises `OSError` where there is none."""
        return cls._mapped(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @classmethod
    def _mapped(cls, descriptor: int) -> Self:
        try:
            return cls(mmap.mmap(descriptor, 0))
        finally:
            os.close(descriptor)

    def row(self, local_rank: int) -> ProgressRow:
        """Return the row of a rank, for that rank alone."""
        return ProgressRow(self._cells[local_rank * _NUMBERS : (local_rank + 1) * _NUMBERS])

    def times(self, local_rank: int) -> list[int]:
        """Read what a rank has written of its last steps: three numbers for each, at 3 × (step % `KEPT_STEPS`)."""
        return self._cells[local_rank * _NUMBERS + 8 : (local_rank + 1) * _NUMBERS].tolist()

    def position(self, local_rank: int) -> Position:
        """Read where a rank is."""
        row = self._cells[local_rank * _NUMBERS : (local_rank + 1) * _NUMBERS]
        phase = row[_PHASE]
        names = ("", *PHASES, "other")
        return Position(
            pid=row[_PID],
            step=row[_STEP],
            phase=names[phase] if 0 <= phase < len(names) else "",
            moves=row[_MOVES],
            has_begun=row[_LOOP] in (_BEGUN, _ENDED),
            has_ended=row[_LOOP] == _ENDED,
            first_step=row[_FIRST_STEP],
        )

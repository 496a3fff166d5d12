"""Losses and the measured peak, in a file that outlives the ranks: the next generation reads them there."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.events import Emitted, RateEvent, StepEvent

_BYTES = 8
_PEAK = 0
_FIRST_LOSS = 1


class LossBoard:
    """A file with a number of eight bytes for each step of a run.  Rank 0 writes the loss of each step that it finishes
    (`LossSink`); steps that are repeated after a failure are written again."""

    def __init__(self, path: Path, num_steps: int) -> None:
        """Make the file.  It takes no room before losses are written."""
        self.path = path
        os.truncate(path, (_FIRST_LOSS + num_steps) * _BYTES)

    @classmethod
    @contextmanager
    def temporary(cls, num_steps: int) -> Generator[LossBoard]:
        """A board that is removed with the block."""
        descriptor, name = tempfile.mkstemp(prefix="weft-losses-")
        os.close(descriptor)
        try:
            yield cls(Path(name), num_steps)
        finally:
            Path(name).unlink(missing_ok=True)

    def of_steps(self, first: int, last: int) -> tuple[float, ...]:
        """Return the losses of the steps after `first` finished ones, up to `last`."""
        content = self.path.read_bytes()[(_FIRST_LOSS + first) * _BYTES : (_FIRST_LOSS + last) * _BYTES]
        return struct.unpack(f"{len(content) // _BYTES}d", content)

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of matrix products of all ranks, as the first generation measured them; None before it reported."""
        with self.path.open("rb") as file:
            (peak,) = struct.unpack("d", file.read(_BYTES))
        return peak or None


class LossSink:
    """Writes the loss of every finished step, and the measured peak, into the board of another process.  Attach it on
    rank 0."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def take(self, emitted: Emitted) -> None:
        match emitted.event:
            case StepEvent(step=step, loss=loss):
                self._numbers[_FIRST_LOSS + step - 1] = loss
            case RateEvent(flops_per_second=float() as flops, peak_share=float() as share) if share:
                self._numbers[_PEAK] = flops / share
            case _:
                return

    def close(self) -> None:
        """The file stays: the launcher reads it."""

"""Losses and the measured peak, in a file that outlives the ranks: the next generation reads them there."""

from __future__ import annotations

import math
import mmap
import os
import struct
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.events import Emitted, EvaluationEvent, RateEvent, StepEvent

_BYTES = 8
_PEAK, _VALIDATION, _FIRST_STEP, _FIRST_LOSS = 0, 1, 2, 3
_AT_ONCE = 4096


class LossBoard:
    """A file with a number of eight bytes for each step of a run.  Rank 0 writes the loss of each step that it finishes
    (`LossSink`); steps that are repeated after a failure are written again."""

    def __init__(self, path: Path, num_steps: int) -> None:
        """Make the file, with room for all steps.  Raises `OSError` where the disk has none."""
        self.path = path
        with path.open("r+b") as file:
            # A sparse file that meets a full disk later would kill the rank that writes, by a signal.
            os.posix_fallocate(file.fileno(), 0, (_FIRST_LOSS + num_steps) * _BYTES)
            file.write(struct.pack("3d", 0.0, math.nan, 0.0))

    @classmethod
    @contextmanager
    def temporary(cls, num_steps: int, folder: Path | None = None) -> Generator[LossBoard]:
        """A board that is removed with the block; with a `folder`, one that somebody removes when this process is
        killed, it lies in there."""
        descriptor, name = tempfile.mkstemp(prefix="weft-losses-", dir=folder)
        os.close(descriptor)
        try:
            yield cls(Path(name), num_steps)
        finally:
            Path(name).unlink(missing_ok=True)

    def losses(self, last: int) -> tuple[float, ...]:
        """Return the losses from the earliest step that any generation has done, up to the step `last`."""
        first = self.first_step
        if not first:
            return ()
        content = self.path.read_bytes()[(_FIRST_LOSS + first - 1) * _BYTES : (_FIRST_LOSS + last) * _BYTES]
        return struct.unpack(f"{len(content) // _BYTES}d", content)

    @property
    def first_step(self) -> int:
        """Earliest step that any generation has done, counted from 1; 0 before the first."""
        return int(self._number(_FIRST_STEP))

    def after(self, step: int) -> tuple[float, ...]:
        """Return the losses of the steps after `step` finished ones, as far as they are there.  A loss that is exactly
        zero is not told from one that is not there yet."""
        with self.path.open("rb") as file:
            file.seek((_FIRST_LOSS + step) * _BYTES)
            content = file.read(_AT_ONCE * _BYTES)
        losses = struct.unpack(f"{len(content) // _BYTES}d", content)
        return losses[: losses.index(0.0)] if 0.0 in losses else losses

    @property
    def peak_flops(self) -> float | None:
        """FLOP/s of matrix products of all ranks, as the first generation measured them; None before it reported."""
        return self._number(_PEAK) or None

    @property
    def validation_loss(self) -> float | None:
        """Loss of the newest evaluation; None before the first."""
        loss = self._number(_VALIDATION)
        return None if math.isnan(loss) else loss

    def _number(self, index: int) -> float:
        with self.path.open("rb") as file:
            file.seek(index * _BYTES)
            (number,) = struct.unpack("d", file.read(_BYTES))
        return float(number)


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
                # A run may go on from an older save than the newest, where that is damaged.
                self._numbers[_FIRST_STEP] = min(step, int(self._numbers[_FIRST_STEP]) or step)
            case EvaluationEvent(validation_loss=loss):
                self._numbers[_VALIDATION] = loss
            case RateEvent(flops_per_second=float() as flops, peak_share=float() as share) if share:
                self._numbers[_PEAK] = flops / share
            case _:
                return

    def close(self) -> None:
        """The file stays: the launcher reads it."""

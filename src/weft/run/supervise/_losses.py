"""The loss of every step of a run, kept where it outlives the ranks."""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from weft.events import Emitted, StepEvent

_BYTES = 8


class LossBoard:
    """A file with a number of eight bytes for each step of a run.  Rank 0 writes the loss of each step that it finishes
    (`LossSink`); steps that are repeated after a failure are written again."""

    def __init__(self, path: Path, num_steps: int) -> None:
        """Make the file.  It takes no room before losses are written."""
        self.path = path
        os.truncate(path, num_steps * _BYTES)

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
        content = self.path.read_bytes()[first * _BYTES : last * _BYTES]
        return struct.unpack(f"{len(content) // _BYTES}d", content)


class LossSink:
    """Writes the loss of every finished step into the board of another process.  Attach it on rank 0."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self._losses = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")

    def take(self, emitted: Emitted) -> None:
        event = emitted.event
        if isinstance(event, StepEvent) and event.step <= len(self._losses):
            self._losses[event.step - 1] = event.loss

    def close(self) -> None:
        """The file stays: the launcher reads it."""

"""Progress of a preparation: a bar on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

Progress = Callable[[str, int, int], None]
"""`progress(stage, done, total)`, called from the preparing process only; total 0 means unknown."""

_WIDTH = 30
_LINE_SECONDS = 5.0


class ConsoleProgress:
    """Print progress to a stream: a bar that redraws itself on a terminal, else lines per stage and every 5 seconds."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._stage = ""
        self._printed = 0.0

    def __call__(self, stage: str, done: int, total: int) -> None:
        share = done / total if total else 0.0
        if self._stream.isatty():
            self._draw(stage, share, finished=bool(total) and done >= total)
        else:
            self._line(stage, share, finished=bool(total) and done >= total)

    def _draw(self, stage: str, share: float, *, finished: bool) -> None:
        full = round(share * _WIDTH)
        bar = "█" * full + "·" * (_WIDTH - full)
        self._stream.write(f"\r\x1b[K{stage:<9} {bar} {share:4.0%}" + ("\n" if finished else ""))
        self._stream.flush()

    def _line(self, stage: str, share: float, *, finished: bool) -> None:
        now = time.monotonic()
        if stage == self._stage and not finished and now - self._printed < _LINE_SECONDS:
            return
        self._stage, self._printed = stage, now
        self._stream.write(f"{stage:<9} {share:.0%}\n" if share else f"{stage}\n")
        self._stream.flush()


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""

"""Signals to a supervisor while none of its launchers runs."""

from __future__ import annotations

import signal
import threading
from dataclasses import replace
from typing import Any, Self

from weft.run.launch.job_end import JobEnd


class SupervisorSignals:
    """SIGINT and SIGTERM that come while no launcher passes them on: before the first generation, between two, and
    behind the last, while saves reach the disk.  Outside the main thread Python allows no handlers."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        """Set where a signal has come: no more generations start."""
        self.number: signal.Signals | None = None
        """The first that came."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def added_to(self, end: JobEnd) -> JobEnd:
        """The end of the last generation; one that a signal kept from starting again was stopped by it."""
        if self.number is None or end.signals:
            return end
        return replace(end, signals=(self.number,))

    def _handle(self, number: int, _frame: object) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # somebody at the terminal wants an end at once
        self.number = self.number or signal.Signals(number)
        self.stopping.set()

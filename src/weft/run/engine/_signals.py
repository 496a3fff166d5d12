"""Stopping when asked: all ranks at the same step, with everything saved."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from types import FrameType

import torch
import torch.distributed as dist

from weft.run.launch import HAND_OVER

_TOGETHER_SECONDS = 1.0
"""Signals this close are one: a terminal sends Ctrl-C to every process of a job, and the launcher passes it on."""


class StopRequest:
    """Remembers SIGINT, SIGTERM and `HAND_OVER` so that the training loop can stop at a step all ranks agree on.

    Use it as a context around the loop.  The engine adds `flag` to what it sums over all ranks in every step; when the
    sum is not zero every rank stops after that very step.  A further SIGINT raises `KeyboardInterrupt` at once; a
    further SIGTERM changes nothing, because job engines send it twice while a rank may be saving.
    """

    def __init__(self, *, announce: bool = False) -> None:
        """Install nothing yet.  With `announce` (rank 0) the first signal is answered on stderr."""
        self._announce = announce
        self._signal: signal.Signals | None = None
        self._requested_at: float | None = None
        self._previous: dict[signal.Signals, object] = {}

    @property
    def requested(self) -> bool:
        """Whether this rank was asked to stop; other ranks may not have been."""
        return self._requested_at is not None

    @property
    def flag(self) -> float:
        """1.0 when this rank was asked to stop, else 0.0: to be summed over all ranks, once per step."""
        return 1.0 if self.requested else 0.0

    @property
    def reason(self) -> str:
        """The cause of the stop, for the log: a signal's name, the program, or another rank."""
        if not self.requested:
            return "another rank was asked to stop"
        return self._signal.name if self._signal is not None else "the program asked to stop"

    @property
    def signal_number(self) -> int:
        """The signal that this rank got, 0 for none."""
        return int(self._signal) if self._signal is not None else 0

    def request(self) -> None:
        """Ask to stop from within the program, from any thread."""
        if self._requested_at is None:
            self._requested_at = time.monotonic()

    def __enter__(self) -> StopRequest:
        """Take over the signals."""
        self.take(signal.SIGINT, signal.SIGTERM, HAND_OVER)
        return self

    def take(self, *numbers: signal.Signals) -> None:
        """Take over these signals; outside the main thread Python allows no handlers and only `request` works."""
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                self._previous[number] = signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        if self._previous.get(HAND_OVER) == signal.SIG_DFL:
            self._previous[HAND_OVER] = signal.SIG_IGN  # one that comes late finds nothing to stop, and must not kill
        for number, handler in self._previous.items():
            # None: the handler was not installed by Python and cannot be put back
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # pyright: ignore[reportArgumentType]
        self._previous.clear()

    def agreed(self, device: torch.device, group: dist.ProcessGroup | None) -> int:
        """Return the signal that some rank of the group got: the others may not have, or not yet.  Collective."""
        number = torch.tensor(self.signal_number, device=device)
        if group is not None:
            dist.all_reduce(number, dist.ReduceOp.MAX, group=group)
        return int(number)

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The handler only notes the signal: a rank that left here would strand the others in a collective.
        now = time.monotonic()
        # Somebody who wants an end comes before the supervisor, who only wants other ranks.
        if self._requested_at is None or self._signal == HAND_OVER:
            self._requested_at, self._signal = now, signal.Signals(number)
            if self._announce and number != HAND_OVER:
                once_more = "once more" if number == signal.SIGINT else "Ctrl-C"
                self._say(f"\n{self._signal.name}: stopping after this step and saving; {once_more} stops at once\n")
        elif number == signal.SIGINT and now - self._requested_at > _TOGETHER_SECONDS:
            raise KeyboardInterrupt

    @staticmethod
    def _say(text: str) -> None:
        """Write past Python's buffers: a handler may run while they are in use."""
        try:
            os.write(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2, text.encode())
        except (OSError, ValueError):  # stderr is closed; the request stands
            return

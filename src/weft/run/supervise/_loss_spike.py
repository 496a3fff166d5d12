"""A loss that leaps up and stays there: found by the supervisor, which reads the losses of all steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

from weft.events import format_loss

_WINDOW = 64
"""Losses before, with which one is compared."""
_LEAST = 32
_DEVIATIONS = 6.0
_IN_A_ROW = 3
"""Losses above the limit that make a spike: a single batch may be odd."""
_LEAST_DEVIATION = 1e-3
"""Least deviation that counts, as a share of the loss: the losses of a run that overfits lie close together."""


class LossSpikeWatch:
    """Watches the losses of one run.  Call `look` with the losses of finished steps, in their order, and each step's
    once: one that is done again has the same."""

    def __init__(self, samples_per_step: int, warn: Callable[[str], object]) -> None:
        self._samples_per_step = samples_per_step
        self._warn = warn
        self._usual: deque[float] = deque(maxlen=_WINDOW)
        self._high: list[float] = []
        """Losses above the limit, the newest ones in a row."""
        self.step = 0
        """Finished steps whose losses have been looked at; set it where a run goes on from a save."""

    def look(self, losses: Sequence[float]) -> None:
        """Take the losses of the next steps."""
        for loss in losses:
            self.step += 1
            self._take(loss)

    def _take(self, loss: float) -> None:
        if loss != loss:  # a step that was skipped has none
            return
        limit = self._limit()
        if limit is None or loss <= limit:
            self._high = []
            self._usual.append(loss)
            return
        self._high.append(loss)
        if len(self._high) == _IN_A_ROW:
            self._tell()
        elif len(self._high) == _WINDOW:  # it has become usual
            self._usual.extend(self._high)
            self._high = []

    def _limit(self) -> float | None:
        if len(self._usual) < _LEAST:
            return None
        middle, deviation = self._middle()
        return middle + _DEVIATIONS * deviation

    def _middle(self) -> tuple[float, float]:
        """Median of the losses before, and their deviation from it, as robust as that."""
        middle = median(self._usual)
        # 1.4826 turns a median deviation into a standard one.
        deviation = 1.4826 * median(abs(loss - middle) for loss in self._usual)
        return middle, max(deviation, _LEAST_DEVIATION * abs(middle))

    def _tell(self) -> None:
        middle, deviation = self._middle()
        first = self.step - _IN_A_ROW + 1
        low, high = (first - 1) * self._samples_per_step, self.step * self._samples_per_step - 1
        self._warn(
            f"the loss has leapt up: {format_loss(min(self._high))} or more in steps {first} to {self.step}, and"
            f" {format_loss(middle)} ± {format_loss(deviation)} in the {len(self._usual)} before. Their batches are"
            f" samples {low:,} to {high:,} of the order."
        )

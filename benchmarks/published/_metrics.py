"""How far predictions lie from measurements: errors, order within sweeps, judgement of memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, median


@dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """Of |predicted / measured - 1| over some rows."""

    count: int
    median: float
    p90: float
    mean: float
    bias: float
    """Median of log(predicted / measured): above 0, predictions are too high."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """Whether layouts fit in memory, predicted against seen."""

    fits: int
    """Ran, and was said to fit."""
    false_alarms: int
    """Ran, and was said not to fit."""
    caught: int
    """Ran out of memory, as predicted."""
    missed: int
    """Ran out of memory, and was said to fit."""

    @property
    def count(self) -> int:
        return self.fits + self.false_alarms + self.caught + self.missed

    @property
    def accuracy(self) -> float:
        return (self.fits + self.caught) / max(1, self.count)

    @property
    def missed_share(self) -> float:
        """Share of all judged layouts that ran out of memory and were said to fit."""
        return self.missed / max(1, self.count)

    def __add__(self, other: Confusion) -> Confusion:
        return Confusion(
            fits=self.fits + other.fits,
            false_alarms=self.false_alarms + other.false_alarms,
            caught=self.caught + other.caught,
            missed=self.missed + other.missed,
        )


def errors_of(predicted: Sequence[float], measured: Sequence[float]) -> Errors | None:
    """Return the errors of predictions, or None where there are none."""
    if not predicted:
        return None
    relative = [abs(guess / truth - 1) for guess, truth in zip(predicted, measured, strict=True)]
    logs = [math.log(guess / truth) for guess, truth in zip(predicted, measured, strict=True)]
    return Errors(
        count=len(relative),
        median=median(relative),
        p90=quantile(relative, 0.9),
        mean=fmean(relative),
        bias=median(logs),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which `share` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def kendall_tau(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Return Kendall's tau-b: 1 for the same order, -1 for the reverse; None where either side has one value only.

    M. G. Kendall, "The treatment of ties in ranking problems", Biometrika 33 (1945).
    """
    score = tied_predicted = tied_measured = pairs = 0
    for (guess, truth), (other_guess, other_truth) in combinations(zip(predicted, measured, strict=True), 2):
        pairs += 1
        first, second = _sign(guess - other_guess), _sign(truth - other_truth)
        score += first * second
        tied_predicted += first == 0
        tied_measured += second == 0
    scale = math.sqrt((pairs - tied_predicted) * (pairs - tied_measured))
    return score / scale if scale else None


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)

"""Medians and spreads of interleaved samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median, quantiles


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, high


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % confidence interval of the median, by order statistics: no assumption about the distribution."""
    ordered, count = sorted(values), len(values)
    rank = max(int(count / 2 - 0.98 * math.sqrt(count)), 0)
    return ordered[rank], ordered[count - 1 - rank]


def summary(values: Sequence[float]) -> dict[str, float]:
    low, high = spread(values)
    return {"median": median(values), "lower_quartile": low, "upper_quartile": high, "n": len(values)}


def round_ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """`slow / fast` round by round: what a machine does to one round, it does to both."""
    return [a / b for a, b in zip(slow, fast, strict=True)]


def best_of(rounds: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """The name with the smallest median."""
    return min(names, key=lambda name: median(rounds[name]))

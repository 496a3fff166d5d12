"""Fitting few physical constants and one scalar per training framework to published runs.

The errors are logarithms of predicted over measured step time.  Every family counts as at most `_FAMILY_ROWS`
independent rows, however many it publishes; far outliers pull no harder than near ones (Huber 1964).  Constants may
leave the data sheet's as far as their priors allow, and so may stacks leave the mean of all stacks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.published._cases import Case, Forecaster
from benchmarks.published._factors import FACTORS, with_factors
from benchmarks.published._knowledge import Knowledge, StackScalar, datasheet_knowledge
from weft.errors import DataError
from weft.techniques.cost_terms import DATASHEET

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array = NDArray[Any]

_FAMILY_ROWS = 12.0
_CONTEXT_ROWS = 3.0
_ROW_SPREAD = 0.12
"""Standard deviation of a row's logarithm: what re-measurements and unsaid settings leave."""
_STACK_SPREAD = 0.15
"""The same of a framework's scalar around the mean of all stacks."""
_MEAN_SPREAD = 0.2
_OUTLIER = 2.0
"""Standard deviations beyond which an error counts linearly."""
_STEP = 0.05
_ROUNDS = 1
_MOST_ROWS = 16
"""Rows of one family that are fitted on, evenly drawn: more change nothing but the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A row to fit on."""

    case: Case
    """Case with one layout."""
    seconds: float
    """Measured."""
    family: str
    is_context: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The state of knowledge after a fit, and what is needed to fit again without some rows."""

    knowledge: Knowledge
    factors: Mapping[str, float]
    samples: tuple[Sample, ...]
    logs: Array
    """Logarithms of predicted times at `factors`, stacks left out."""
    slopes: Array
    """Their derivatives by the logarithm of each factor."""


def drawn(samples: Sequence[Sample]) -> tuple[Sample, ...]:
    """Return at most `_MOST_ROWS` samples of every family, evenly drawn in their order."""
    by_family: dict[str, list[Sample]] = {}
    for sample in samples:
        by_family.setdefault(sample.family, []).append(sample)
    kept: list[Sample] = []
    for found in by_family.values():
        trusted = [sample for sample in found if not sample.is_context] or found
        count = min(len(trusted), _MOST_ROWS)
        kept += [trusted[place * len(trusted) // count] for place in range(count)]
    return tuple(kept)


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit constants and stacks to rows.

    Raises:
        DataError: there are fewer than two families.
    """
    import numpy as np

    samples = drawn(samples)
    if len({sample.family for sample in samples}) < 2:
        raise DataError("a fit needs rows of at least two families with a measured time and a known layout.")
    theta = np.zeros(len(FACTORS))
    for _ in range(_ROUNDS):
        logs, slopes = _linearised(samples, theta)
        theta, stacks = _solved(samples, logs, slopes, theta)
    logs, slopes = _linearised(samples, theta)
    theta_last, stacks = _solved(samples, logs, slopes, theta)
    return _fit_of(samples, theta_last, logs, slopes, theta, stacks)


def without(fitted: Fit, family: str) -> Knowledge:
    """Return what the fit would know had the family published nothing; rows' slopes are those of the whole fit."""
    import numpy as np

    kept = [place for place, sample in enumerate(fitted.samples) if sample.family != family]
    samples = tuple(fitted.samples[place] for place in kept)
    theta = np.log([fitted.factors[name] for name in FACTORS])
    found, stacks = _solved(samples, fitted.logs[kept], fitted.slopes[kept], theta)
    logs = fitted.logs[kept] + fitted.slopes[kept] @ (found - theta)
    return _knowledge(samples, found, logs, stacks)


def _linearised(samples: Sequence[Sample], theta: Array) -> tuple[Array, Array]:
    """Return logarithms of predicted times at the factors, and their derivatives."""
    import numpy as np

    base = _logs(samples, theta)
    slopes = np.zeros((len(samples), len(theta)))
    for place in range(len(theta)):
        moved = theta.copy()
        moved[place] += _STEP
        slopes[:, place] = (_logs(samples, moved) - base) / _STEP
    return base, slopes


def _logs(samples: Sequence[Sample], theta: Array) -> Array:
    import numpy as np

    calibration = with_factors(DATASHEET, _factors(theta), name="trial")
    forecaster = Forecaster(replace(datasheet_knowledge(), calibration=calibration))
    return np.log([forecaster.seconds(sample.case) for sample in samples])


def _factors(theta: Array) -> dict[str, float]:
    return {name: math.exp(float(value)) for name, value in zip(FACTORS, theta, strict=True)}


def _weights(samples: Sequence[Sample]) -> Array:
    """Return the inverse variance of every row, families balanced."""
    import numpy as np

    counts: dict[str, int] = {}
    for sample in samples:
        counts[sample.family] = counts.get(sample.family, 0) + 1
    limits = [(_CONTEXT_ROWS if sample.is_context else _FAMILY_ROWS) for sample in samples]
    shares = [min(1.0, limit / counts[sample.family]) for sample, limit in zip(samples, limits, strict=True)]
    return np.array(shares) / _ROW_SPREAD**2


def _solved(samples: Sequence[Sample], logs: Array, slopes: Array, theta: Array) -> tuple[Array, dict[str, float]]:
    """Return factors' logarithms and stacks' scalars (under "" their mean) that minimise the robust errors."""
    import numpy as np

    names = ["", *sorted({sample.case.framework.name for sample in samples})]
    member = np.zeros((len(samples), len(names)))
    member[:, 0] = 1.0
    for place, sample in enumerate(samples):
        member[place, names.index(sample.case.framework.name)] = 1.0
    columns = np.hstack([slopes, member])
    target = np.log([sample.seconds for sample in samples]) - logs + slopes @ theta
    spreads = np.array([*FACTORS.values(), _MEAN_SPREAD, *([_STACK_SPREAD] * (len(names) - 1))])
    weights = _weights(samples)
    robust = np.ones(len(samples))
    found = np.zeros(columns.shape[1])
    for _ in range(30):
        scaled = columns * (weights * robust)[:, None]
        found = np.linalg.solve(scaled.T @ columns + np.diag(spreads**-2.0), scaled.T @ target)
        distance = np.abs(target - columns @ found) / _ROW_SPREAD
        robust = np.minimum(1.0, _OUTLIER / np.maximum(distance, 1e-9))
    factors, scalars = found[: len(FACTORS)], found[len(FACTORS) :]
    # A round moves no constant by more than half, because the slopes hold nearby only.
    factors = theta + np.clip(factors - theta, -0.4, 0.4)
    mean = float(scalars[0])
    return factors, {"": mean, **{name: mean + float(one) for name, one in zip(names[1:], scalars[1:], strict=True)}}


def _fit_of(
    samples: tuple[Sample, ...], theta: Array, logs: Array, slopes: Array, around: Array, stacks: Mapping[str, float]
) -> Fit:
    moved = logs + slopes @ (theta - around)
    return Fit(
        knowledge=_knowledge(samples, theta, moved, stacks),
        factors=_factors(theta),
        samples=samples,
        logs=moved,
        slopes=slopes,
    )


def _knowledge(samples: Sequence[Sample], theta: Array, logs: Array, stacks: Mapping[str, float]) -> Knowledge:
    left: dict[str, list[float]] = {}
    for sample, log in zip(samples, logs, strict=True):
        name = sample.case.framework.name
        left.setdefault(name, []).append(math.log(sample.seconds) - float(log) - stacks[name])
    offsets = [value - stacks[""] for name, value in stacks.items() if name]
    within = [_spread(found) for found in left.values()]
    between = math.sqrt(fmean([offset**2 for offset in offsets]))
    return Knowledge(
        calibration=with_factors(DATASHEET, _factors(theta), name="fitted"),
        stacks={
            name: StackScalar(slowdown=math.exp(stacks[name]), spread=_spread(found)) for name, found in left.items()
        },
        unseen=StackScalar(slowdown=math.exp(stacks[""]), spread=math.hypot(between, median(within))),
    )


def _spread(errors: Sequence[float]) -> float:
    """Standard deviation of errors by their median size, drawn to the usual one where there are few."""
    robust = 1.4826 * median([abs(error) for error in errors])
    trust = len(errors) / (len(errors) + 4.0)
    return math.sqrt(trust * robust**2 + (1 - trust) * _ROW_SPREAD**2)

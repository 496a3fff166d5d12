"""Corrections from recorded runs: least squares of relative errors, held to "no correction" where runs are few."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.planning.learned._runs import RecordedRun
from weft.techniques.cost_terms import ComputeCorrection, Corrections

_MOST_FACTOR = 4.0
"""A factor is at most this, or its inverse: beyond, the price is of something else."""
_RUN_NOISE = 0.1
"""Relative error of a part of a step that a fit is content with."""
_FACTOR_PRIOR = 0.6
"""Standard deviation of a factor before any run is known."""
_CORES_PRIOR = 0.15
"""Standard deviation, relative, of what a factor is for one number of cores of a rank beside what it is for all."""
_OPERATOR_PRIOR, _MOST_OPERATOR = 1e-5, 2e-4
"""Standard deviation and limit of what an operator takes more, in seconds."""
_COLLECTIVE_PRIOR, _MOST_COLLECTIVE = 2e-4, 5e-3
"""The same of a collective."""
_UPDATE_PRIOR, _MOST_UPDATE = 1e-3, 5e-2
"""The same of the optimizer's step."""
_HALF_LIFE_SECONDS = 60 * 86_400.0
"""Age at which a run weighs half."""
_BUSY = 0.1
"""Descheduled share at which a run weighs half."""
_ROUNDS = 4
_FEWEST_MODELS = 3
"""Models of recorded runs from which the spread of corrected predictions can be told."""
_LEAST_SPREAD = 0.03

_COMPUTED = ("products", "convolutions", "plain", "copies", "operator_seconds")

Vector = npt.NDArray[np.float64]


class _Unknown(NamedTuple):
    """One number of a fit."""

    prior: float
    deviation: float
    least: float
    most: float


def corrections_of(runs: Sequence[RecordedRun], now: float | None = None) -> Corrections:
    """Return what runs say of prices.  Their spread is that of runs predicted without any run of their model."""
    if not runs:
        return Corrections()
    now = now or time.time()
    models = {run.model for run in runs}
    fitted = _fit(runs, now)
    if len(models) < _FEWEST_MODELS:
        return fitted
    errors: list[float] = []
    for model in models:
        others = _fit([run for run in runs if run.model != model], now)
        errors += [math.log(run.measured.step / corrected_step(run, others)) for run in runs if run.model == model]
    # 1.4826: the median of absolute values of a normal distribution, over its standard deviation, inverted.
    spread = max(1.4826 * statistics.median(map(abs, errors)), _LEAST_SPREAD)
    return replace(fitted, spread=min(spread, 1.0))


def corrected_step(run: RecordedRun, corrections: Corrections) -> float:
    """Return the seconds of a run's step by its price in parts and corrections of each."""
    priced = run.priced
    row = corrections.compute_of(run.precision, run.cores) or ComputeCorrection(
        precision=run.precision, cores=run.cores
    )
    computing = sum(getattr(row, name) * feature for name, feature in _computed(run).items())
    sent = corrections.communication * priced.communication + corrections.collective_seconds * priced.collectives
    bubble = priced.bubble * computing / priced.computing
    other = priced.other if corrections.step_seconds is None else corrections.step_seconds
    optimizer = corrections.optimizer * priced.optimizer + corrections.optimizer_seconds
    return computing + sent + bubble + optimizer + other


def _fit(runs: Sequence[RecordedRun], now: float) -> Corrections:
    if not runs:
        return Corrections()
    weights = [_weight(run, now) for run in runs]
    communication, collective_seconds = _part(
        runs, weights, lambda run: ((run.priced.communication, run.priced.collectives), run.measured.communication),
        (_factor(1.0), _Unknown(0.0, _COLLECTIVE_PRIOR, 0.0, _MOST_COLLECTIVE)),
    )  # fmt: skip
    optimizer, optimizer_seconds = _part(
        runs, weights, lambda run: ((run.priced.optimizer, 1.0), run.measured.optimizer),
        (_factor(1.0), _Unknown(0.0, _UPDATE_PRIOR, 0.0, _MOST_UPDATE)),
    )  # fmt: skip
    return Corrections(
        compute=tuple(_compute_rows(runs, weights)),
        communication=communication,
        collective_seconds=collective_seconds,
        optimizer=optimizer,
        optimizer_seconds=optimizer_seconds,
        step_seconds=statistics.median(max(run.measured.other, 0.0) for run in runs),
    )


def _compute_rows(runs: Sequence[RecordedRun], weights: Sequence[float]) -> list[ComputeCorrection]:
    """One row for each precision and number of cores of a rank: the fit of all runs in the precision is where each
    starts from."""
    rows: list[ComputeCorrection] = []
    for precision in sorted({run.precision for run in runs}):
        known = [(run, weight) for run, weight in zip(runs, weights, strict=True) if run.precision == precision]
        factors = [_factor(1.0)] * (len(_COMPUTED) - 1)
        common = _computing(known, [*factors, _Unknown(0.0, _OPERATOR_PRIOR, 0.0, _MOST_OPERATOR)])
        for cores in sorted({run.cores for run, _ in known}):
            mine = [(run, weight) for run, weight in known if run.cores == cores]
            factors = [_factor(factor, _CORES_PRIOR) for factor in common[:-1]]
            found = _computing(mine, [*factors, _Unknown(common[-1], _OPERATOR_PRIOR, 0.0, _MOST_OPERATOR)])
            values = dict(zip(_COMPUTED, found, strict=True))
            rows.append(ComputeCorrection(precision=precision, cores=cores, **values))
    return rows


def _computing(known: Sequence[tuple[RecordedRun, float]], unknowns: Sequence[_Unknown]) -> tuple[float, ...]:
    runs, weights = [run for run, _ in known], [weight for _, weight in known]
    return _part(runs, weights, lambda run: (tuple(_computed(run).values()), run.measured.computing), unknowns)


def _computed(run: RecordedRun) -> dict[str, float]:
    """What computing consists of, by the field of a `ComputeCorrection` that belongs to it."""
    priced = run.priced
    seconds = priced.products, priced.convolutions, priced.plain, priced.copies, priced.operators
    return dict(zip(_COMPUTED, seconds, strict=True))


def _factor(prior: float, deviation: float = _FACTOR_PRIOR) -> _Unknown:
    return _Unknown(prior, deviation * prior, 1 / _MOST_FACTOR, _MOST_FACTOR)


def _weight(run: RecordedRun, now: float) -> float:
    """Old runs weigh less, and so do those beside which other work ran."""
    return 0.5 ** (max(0.0, now - run.ended) / _HALF_LIFE_SECONDS) / (1 + (run.descheduled / _BUSY) ** 2)


def _part(
    runs: Sequence[RecordedRun],
    weights: Sequence[float],
    of: Callable[[RecordedRun], tuple[tuple[float, ...], float]],
    unknowns: Sequence[_Unknown],
) -> tuple[float, ...]:
    """Return the unknowns for which features times unknowns are nearest to what was measured, relative to it.

    A part that is small beside its step counts little: its error is taken over the part and a twentieth of the step.
    """
    rows: list[list[float]] = []
    targets: list[float] = []
    counts: list[float] = []
    for run, weight in zip(runs, weights, strict=True):
        features, measured = of(run)
        if measured <= 0 or not any(features):
            continue
        scale = (measured + 0.05 * run.measured.step) * _RUN_NOISE
        rows.append([feature / scale for feature in features])
        targets.append(measured / scale)
        counts.append(weight)
    values = np.array([unknown.prior for unknown in unknowns])
    if not rows:
        return tuple(values.tolist())
    matrix, wanted, base = np.array(rows), np.array(targets), np.array(counts)
    held = np.diag([1 / unknown.deviation**2 for unknown in unknowns])
    robust = np.ones(len(rows))
    for _ in range(_ROUNDS):
        weighted = matrix * (base * robust)[:, None]
        values = _bounded(weighted.T @ matrix + held, weighted.T @ wanted + held @ _priors(unknowns), unknowns)
        # Huber: beyond two standard errors an outlier pulls no harder than at two.
        away = np.abs(matrix @ values - wanted)
        robust = np.minimum(1.0, 2.0 / np.maximum(away, 1e-9))
    return tuple(values.tolist())


def _priors(unknowns: Sequence[_Unknown]) -> Vector:
    return np.array([unknown.prior for unknown in unknowns])


def _bounded(left: Vector, right: Vector, unknowns: Sequence[_Unknown]) -> Vector:
    """Solve left · x = right within the limits: an unknown that would leave them is set to its limit, and the others
    are solved for again."""
    fixed: dict[int, float] = {}
    while True:
        free = [index for index in range(len(unknowns)) if index not in fixed]
        values = np.array([fixed.get(index, 0.0) for index in range(len(unknowns))])
        if free:
            known = right[free] - left[np.ix_(free, list(fixed))] @ np.array(list(fixed.values()))
            values[free] = np.linalg.solve(left[np.ix_(free, free)], known)
        beyond = [at for at in free if not unknowns[at].least <= values[at] <= unknowns[at].most]
        if not beyond:
            return values
        at = beyond[0]
        fixed[at] = float(np.clip(values[at], unknowns[at].least, unknowns[at].most))

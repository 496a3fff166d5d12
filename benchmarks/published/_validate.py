"""Predict every row of a file, and say how far the predictions lie from the measurements."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

from benchmarks.published._cases import Case, Forecast, Forecaster, cases_of
from benchmarks.published._contradictions import Contradiction, contradictions_of
from benchmarks.published._fit import Sample, fit, without
from benchmarks.published._floor import floor_of
from benchmarks.published._knowledge import Knowledge, datasheet_knowledge, fitted_knowledge
from benchmarks.published._metrics import Errors
from benchmarks.published._rows import Row, read_rows
from benchmarks.published._score import Outcome, Score, memory_errors, outcomes_of, score_of, seconds_of
from weft.errors import DataError

Mode = Literal["datasheet", "fitted"]

_ROW_SPREAD = 0.12
_ROW_SPREAD_ROWS = 2
"""Standard deviation of a row around its family, and as how many seen rows this counts."""
_FAMILY_SPREAD = 0.12
"""The same of families around what predictions know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """A file, predicted and scored."""

    mode: Mode
    cross_validated: bool
    few_shot: int
    outcomes: tuple[Outcome, ...]
    score: Score
    contradictions: tuple[Contradiction, ...]
    """Pairs of measured peaks that cannot both be right."""

    @property
    def memory(self) -> Errors | None:
        """Accuracy over all measured peaks, each row counted once."""
        return memory_errors(self.outcomes)

    @property
    def consistent_memory(self) -> Errors | None:
        """The same of rows that contradict no other."""
        doubtful = {row for pair in self.contradictions for row in (pair.larger, pair.smaller)}
        return memory_errors([outcome for outcome in self.outcomes if outcome.row.run.index not in doubtful])


def validate(path: Path, mode: Mode, *, cross_validate: bool = False, few_shot: int = 0) -> Validation:
    """Predict every row of a file of published runs.

    Args:
        mode: what predictions know: data sheets alone, or the constants that ship with Weft.
        cross_validate: fit anew on the file's other families for each family; nothing is fitted for `datasheet`.
        few_shot: so many rows of each family set its scalar, and are not scored.

    Raises:
        DataError: the file cannot be read, or has too few rows to fit on.
    """
    if few_shot < 0:
        raise DataError(f"--few-shot {few_shot} is no number of rows. Use 0 for none.")
    rows = read_rows(path)
    cases = cases_of([row.run for row in rows])
    knowledge = datasheet_knowledge() if mode == "datasheet" else fitted_knowledge()
    shown = Forecaster(knowledge)
    cases = [shown.settled_or_refused(case) for case in cases]
    by_family = _knowledge_by_family(rows, cases, knowledge, refit=cross_validate and mode == "fitted")
    forecasts = [Forecast(index=row.run.index) for row in rows]
    floors: dict[str, Callable[[Case], float | None]] = {}
    used: set[int] = set()
    for family, places in _places(rows).items():
        forecaster = Forecaster(by_family[family])
        for place in places:
            forecasts[place] = forecaster.forecast(cases[place])
        floors[family] = _floor_without(rows, cases, family)
        if few_shot:
            # A family with a single timed row has none to spare, and is not scored.
            used |= _adapted(rows, cases, forecasts, places, few_shot) or set(places)
    outcomes = outcomes_of(rows, cases, forecasts, lambda case: floors[case.run.family](case))
    scored = [outcome for place, outcome in enumerate(outcomes) if place not in used]
    return Validation(
        mode=mode,
        cross_validated=cross_validate,
        few_shot=few_shot,
        outcomes=outcomes,
        score=score_of(scored),
        contradictions=contradictions_of(outcomes),
    )


def samples_of(rows: Sequence[Row], cases: Sequence[Case | Forecast]) -> tuple[Sample, ...]:
    """Return what can be fitted on: predictable rows with a measured time."""
    samples: list[Sample] = []
    for row, case in zip(rows, cases, strict=True):
        if isinstance(case, Case) and (seconds := seconds_of(row, case)) is not None:
            is_context = row.use != "calibrate"
            samples.append(Sample(case=case, seconds=seconds, family=row.run.family, is_context=is_context))
    return tuple(samples)


def predictable_samples(rows: Sequence[Row]) -> tuple[Sample, ...]:
    """Return what can be fitted on, each row with the one layout that its authors would have chosen."""
    forecaster = Forecaster(datasheet_knowledge())
    return samples_of(rows, [forecaster.settled_or_refused(case) for case in cases_of([row.run for row in rows])])


def dump_forecasts(validation: Validation) -> str:
    """Return the predictions as JSON: a list of row, step_time_s, peak_mem_gib and refused."""
    return json.dumps(
        [
            {
                "row": outcome.forecast.index,
                "step_time_s": outcome.forecast.step_seconds,
                "peak_mem_gib": outcome.forecast.peak_gibibytes,
                "refused": outcome.forecast.refused,
            }
            for outcome in validation.outcomes
        ],
        indent=0,
    )


def _places(rows: Sequence[Row]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for place, row in enumerate(rows):
        places[row.run.family].append(place)
    return places


def _knowledge_by_family(
    rows: Sequence[Row], cases: Sequence[Case | Forecast], knowledge: Knowledge, *, refit: bool
) -> dict[str, Knowledge]:
    families = list(_places(rows))
    if not refit:
        return dict.fromkeys(families, knowledge)
    fitted = fit(samples_of(rows, cases))
    return {family: without(fitted, family) for family in families}


def _floor_without(
    rows: Sequence[Row], cases: Sequence[Case | Forecast], family: str
) -> Callable[[Case], float | None]:
    """Return the floor, learnt from all families but one."""
    samples = [sample for sample in samples_of(rows, cases) if sample.family != family]
    return floor_of([sample.case for sample in samples], [sample.seconds for sample in samples]).seconds


def _adapted(
    rows: Sequence[Row],
    cases: Sequence[Case | Forecast],
    forecasts: list[Forecast],
    places: Sequence[int],
    few_shot: int,
) -> set[int]:
    """Correct the forecasts of a family by the median error of few of its rows; return these rows.

    They are drawn evenly from its timed rows, and are never more than half of them.
    """
    errors: dict[int, float] = {}
    for place in places:
        case, guess = cases[place], forecasts[place].step_seconds
        if isinstance(case, Case) and guess and (seconds := seconds_of(rows[place], case)):
            errors[place] = math.log(seconds / guess)
    timed = list(errors)
    count = min(few_shot, len(timed) // 2)
    if not count:
        return set()
    chosen = [timed[(2 * shot + 1) * len(timed) // (2 * count)] for shot in range(count)]
    factor = math.exp(_scalar_of([errors[place] for place in chosen]))
    for place in places:
        seconds = forecasts[place].step_seconds
        if seconds is not None:
            forecasts[place] = replace(forecasts[place], step_seconds=seconds * factor)
    return set(chosen)


def _scalar_of(errors: Sequence[float]) -> float:
    """Return the scalar's logarithm after few rows: their median, less as they differ among themselves."""
    centre, count = median(errors), len(errors)
    seen = 1.4826 * median([abs(error - centre) for error in errors])
    variance = (_ROW_SPREAD_ROWS * _ROW_SPREAD**2 + count * seen**2) / (_ROW_SPREAD_ROWS + count)
    return centre * count / (count + variance / _FAMILY_SPREAD**2)

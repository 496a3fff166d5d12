"""Predictions beside measurements, family by family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.published._cases import Case, Forecast
from benchmarks.published._measure import measured_step
from benchmarks.published._metrics import Confusion, Errors, errors_of, kendall_tau
from benchmarks.published._rows import Row

_SMALLEST_SWEEP = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One row with what was predicted and what was measured."""

    row: Row
    case: Case | None
    """None: refused before pricing."""
    forecast: Forecast
    measured_seconds: float | None
    floor_seconds: float | None

    @property
    def is_timed(self) -> bool:
        return self.forecast.step_seconds is not None and self.measured_seconds is not None

    @property
    def is_judged(self) -> bool:
        """Whether it is known if the layout fits, and was predicted."""
        ran = self.row.measured.out_of_memory or self.measured_seconds is not None
        return ran and self.forecast.fits is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyScore:
    """How well one family is predicted.  None: it publishes nothing of the kind."""

    family: str
    rows: int
    refused: int
    """Refused ones of the rows with a measured time and a known layout."""
    refusable: int
    """Rows with a measured time and a known layout."""
    time: Errors | None
    floor: Errors | None
    memory: Errors | None
    tau: float | None
    """Mean over sweeps."""
    sweeps: int
    confusion: Confusion
    publishes_failures: bool
    """Whether it reports layouts that ran out of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """How well a file is predicted."""

    families: tuple[FamilyScore, ...]
    refusals: tuple[tuple[int, str, str], ...]
    """Index, family and reason of rows with a measured time and a known layout that got no prediction."""
    unknown: tuple[tuple[int, str, str], ...]
    """The same of all other refused rows."""

    def over_families(self, value: Callable[[FamilyScore], float | None]) -> float | None:
        """Return the median over families of a figure, of those that have it."""
        found = [number for score in self.families if (number := value(score)) is not None]
        return median(found) if found else None

    @property
    def refused_share(self) -> float:
        """Share of the rows with a measured time and a known layout."""
        return len(self.refusals) / max(1, sum(score.refusable for score in self.families))

    @property
    def confusion(self) -> Confusion:
        """Counts over families that report layouts which ran out of memory."""
        total = Confusion(fits=0, false_alarms=0, caught=0, missed=0)
        for score in self.families:
            total = total + score.confusion if score.publishes_failures else total
        return total

    @property
    def everywhere(self) -> Confusion:
        """Counts over all families: what was timed has fitted."""
        total = Confusion(fits=0, false_alarms=0, caught=0, missed=0)
        for score in self.families:
            total = total + score.confusion
        return total


def outcomes_of(
    rows: Sequence[Row],
    cases: Sequence[Case | Forecast],
    forecasts: Sequence[Forecast],
    floor: Callable[[Case], float | None],
) -> tuple[Outcome, ...]:
    """Join rows, predictions and measurements."""
    outcomes: list[Outcome] = []
    for row, case, forecast in zip(rows, cases, forecasts, strict=True):
        known = case if isinstance(case, Case) else None
        outcomes.append(
            Outcome(
                row=row,
                case=known,
                forecast=forecast,
                measured_seconds=seconds_of(row, known),
                floor_seconds=floor(known) if known is not None else None,
            )
        )
    return tuple(outcomes)


def seconds_of(row: Row, case: Case | None) -> float | None:
    """Return the measured step; without a case only a printed one is known."""
    if case is None:
        return row.measured.step_seconds
    return measured_step(row, case.profile, case.cluster, case.layouts[0].precision)


def score_of(outcomes: Sequence[Outcome]) -> Score:
    """Return the score of all rows."""
    by_family: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_family[outcome.row.run.family].append(outcome)
    refused = [outcome for outcome in outcomes if outcome.forecast.refused is not None]
    return Score(
        families=tuple(_family_score(family, found) for family, found in sorted(by_family.items())),
        refusals=tuple(_told(outcome) for outcome in refused if _should_be_predicted(outcome)),
        unknown=tuple(_told(outcome) for outcome in refused if not _should_be_predicted(outcome)),
    )


def _told(outcome: Outcome) -> tuple[int, str, str]:
    return outcome.row.run.index, outcome.row.run.family, outcome.forecast.refused or ""


def _should_be_predicted(outcome: Outcome) -> bool:
    """Whether the row is timed and its layout known."""
    run, measured = outcome.row.run, outcome.row.measured
    figures = (
        measured.step_seconds,
        measured.tokens_per_second,
        measured.model_teraflops,
        measured.hardware_teraflops,
        measured.utilization,
    )
    return any(figure is not None for figure in figures) and None not in (run.data, run.tensor, run.pipeline)


def _family_score(family: str, outcomes: Sequence[Outcome]) -> FamilyScore:
    timed = [outcome for outcome in outcomes if outcome.is_timed]
    measured = [outcome.measured_seconds or 0.0 for outcome in timed]
    with_floor = [outcome for outcome in timed if outcome.floor_seconds is not None]
    taus = [tau for sweep in _sweeps(timed) if (tau := _tau_of(sweep)) is not None]
    expected = [outcome for outcome in outcomes if _should_be_predicted(outcome)]
    return FamilyScore(
        family=family,
        rows=len(outcomes),
        refused=sum(outcome.forecast.refused is not None for outcome in expected),
        refusable=len(expected),
        time=errors_of([outcome.forecast.step_seconds or 0.0 for outcome in timed], measured),
        floor=errors_of(
            [outcome.floor_seconds or 0.0 for outcome in with_floor],
            [outcome.measured_seconds or 0.0 for outcome in with_floor],
        ),
        memory=memory_errors(outcomes),
        tau=fmean(taus) if taus else None,
        sweeps=len(taus),
        confusion=_confusion(outcomes),
        publishes_failures=any(outcome.row.measured.out_of_memory for outcome in outcomes),
    )


def memory_errors(outcomes: Sequence[Outcome]) -> Errors | None:
    """Return the errors of peaks, each row counted once; None where none was measured and predicted."""
    pairs = [
        (outcome.forecast.peak_gibibytes, outcome.row.measured.peak_gibibytes)
        for outcome in outcomes
        if outcome.forecast.peak_gibibytes is not None and outcome.row.measured.peak_gibibytes is not None
    ]
    return errors_of([guess for guess, _ in pairs], [truth for _, truth in pairs])


def _confusion(outcomes: Sequence[Outcome]) -> Confusion:
    judged = [(outcome.forecast.fits, outcome.row.measured.out_of_memory) for outcome in outcomes if outcome.is_judged]
    return Confusion(
        fits=judged.count((True, False)),
        false_alarms=judged.count((False, False)),
        caught=judged.count((False, True)),
        missed=judged.count((True, True)),
    )


def _sweeps(timed: Sequence[Outcome]) -> list[list[Outcome]]:
    """Rows of one source with the same model, batch, devices, precision and software, which differ in layout."""
    groups: dict[tuple[object, ...], list[Outcome]] = defaultdict(list)
    for outcome in timed:
        run, case = outcome.row.run, outcome.case
        framework = case.framework.name if case else ""
        key = (run.model, run.sequence_length, run.global_batch, run.device, run.devices, run.precision, framework)
        groups[key].append(outcome)
    return list(groups.values())


def _tau_of(sweep: Sequence[Outcome]) -> float | None:
    """Kendall's tau over the distinct layouts of a sweep; repeated ones count once, with their median."""
    measured: dict[object, list[float]] = defaultdict(list)
    predicted: dict[object, float] = {}
    for outcome in sweep:
        run = outcome.row.run
        layout = (
            *(run.data, run.tensor, run.pipeline, run.context, run.expert, run.chunks, run.zero),
            *(run.microbatch, run.recompute, run.sequence_parallel),
        )
        measured[layout].append(outcome.measured_seconds or 0.0)
        predicted[layout] = outcome.forecast.step_seconds or 0.0
    if len(measured) < _SMALLEST_SWEEP:
        return None
    return kendall_tau([predicted[layout] for layout in measured], [median(times) for times in measured.values()])

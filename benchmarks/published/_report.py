"""A validation in words and tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.published._metrics import Confusion, Errors
from benchmarks.published._score import FamilyScore, Score
from benchmarks.published._validate import Validation

_HEADER = (
    *("family", "rows", "median", "p90", "mean", "bias", "floor median", "floor p90"),
    *("tau", "sweeps", "memory mean", "memory rows", "fits", "false alarms", "caught", "missed"),
)


@dataclass(frozen=True, slots=True)
class Report:
    """Tables and lines, for a terminal or for plain text."""

    title: str
    header: tuple[str, ...]
    table: tuple[tuple[str, ...], ...]
    lines: tuple[str, ...]


def report_of(validation: Validation) -> Report:
    """Return what there is to say of a validation."""
    score = validation.score
    table = [_cells(family) for family in score.families if family.time or family.memory or family.confusion.count]
    return Report(
        title=_title(validation),
        header=_HEADER,
        table=(*table, _over_families(score)),
        lines=(*_peaks(validation), *_summary(score)),
    )


def _title(validation: Validation) -> str:
    knows = "data sheets only" if validation.mode == "datasheet" else "constants fitted on published runs"
    if validation.cross_validated and validation.mode == "fitted":
        knows = "constants fitted on all other families of this file"
    shots = f", {validation.few_shot} rows of each family set its scalar" if validation.few_shot else ""
    return f"{len(validation.outcomes):,} rows; predictions know {knows}{shots}"


def _cells(score: FamilyScore) -> tuple[str, ...]:
    confusion = score.confusion
    return (
        score.family,
        str(score.rows),
        *_errors(score.time, "median", "p90", "mean"),
        f"{score.time.bias:+.1%}" if score.time else "",
        *_errors(score.floor, "median", "p90"),
        "" if score.tau is None else f"{score.tau:.2f}",
        str(score.sweeps or ""),
        *_errors(score.memory, "mean"),
        str(score.memory.count) if score.memory else "",
        *(str(count or "") for count in (confusion.fits, confusion.false_alarms, confusion.caught, confusion.missed)),
    )


def _errors(errors: Errors | None, *names: str) -> tuple[str, ...]:
    return tuple("" if errors is None else f"{getattr(errors, name):.1%}" for name in names)


def _over_families(score: Score) -> tuple[str, ...]:
    figures = (
        score.over_families(lambda one: one.time and one.time.median),
        score.over_families(lambda one: one.time and one.time.p90),
        score.over_families(lambda one: one.time and one.time.mean),
        score.over_families(lambda one: one.time and one.time.bias),
        score.over_families(lambda one: one.floor and one.floor.median),
        score.over_families(lambda one: one.floor and one.floor.p90),
    )
    tau = score.over_families(lambda one: one.tau)
    memory = score.over_families(lambda one: one.memory and one.memory.mean)
    return (
        "median of families",
        str(sum(family.rows for family in score.families)),
        *("" if figure is None else f"{figure:.1%}" for figure in figures),
        "" if tau is None else f"{tau:.2f}",
        str(sum(family.sweeps for family in score.families)),
        "" if memory is None else f"{memory:.1%}",
        str(sum(family.memory.count for family in score.families if family.memory)),
        *("", "", "", ""),
    )


def _peaks(validation: Validation) -> list[str]:
    """What is said of measured peaks, row by row, and which of them contradict each other."""
    whole, sure = validation.memory, validation.consistent_memory
    if whole is None:
        return []
    lines = [
        f"memory   peaks of {whole.count} rows are {whole.mean:.1%} off in the mean, {whole.median:.1%} in the median"
    ]
    if validation.contradictions and sure is not None:
        lines.append(
            f"memory   {sure.mean:.1%} in the mean of the {sure.count} that contradict no other, which leaves out"
        )
        lines += [
            f"           rows {pair.larger} and {pair.smaller}: {pair.reason}" for pair in validation.contradictions
        ]
    return lines


def _summary(score: Score) -> list[str]:
    lines: list[str] = []
    for told, confusion in (
        ("families that report failures", score.confusion),
        ("all families (what was timed has fitted)", score.everywhere),
    ):
        if confusion.count:
            lines.append(f"memory   {_judged(confusion)}, over {told}")
    lines.append(
        f"refused  {len(score.refusals)} of {sum(family.refusable for family in score.families)} rows"
        f" with a measured time and a known layout ({score.refused_share:.1%})"
    )
    lines += _reasons(score.refusals)
    if score.unknown:
        lines.append(f"refused  {len(score.unknown)} rows without one or the other")
        lines += _reasons(score.unknown)
    lines.append("floor    one share of peak per device and precision, with the exact bubble of the schedule")
    return lines


def _judged(confusion: Confusion) -> str:
    return (
        f"{confusion.accuracy:.1%} of {confusion.count} layouts judged rightly,"
        f" {confusion.missed_share:.1%} said to fit that ran out"
    )


def _reasons(refusals: Sequence[tuple[int, str, str]]) -> list[str]:
    rows: dict[tuple[str, str], list[int]] = {}
    for index, family, reason in refusals:
        rows.setdefault((family, reason), []).append(index)
    counted = Counter({key: len(found) for key, found in rows.items()})
    return [
        f"           {family}: {reason} (rows {_listed(rows[family, reason])})"
        for (family, reason), _ in counted.most_common()
    ]


def _listed(rows: Sequence[int]) -> str:
    shown = ", ".join(str(row) for row in rows[:8])
    return f"{shown}, … {len(rows)} in all" if len(rows) > 8 else shown

"""A run's figures by name: as they are now, for monitoring, and step by step, for trackers of experiments.

Names follow OpenTelemetry: a unit stands beside a name and not in it, and base units are used.  No figure is given rank
by rank, for a run may have thousands: least, median and most over ranks, and the few ranks that hold the step back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from weft.watch.accounting import STATES, axis_names
from weft.watch.run_record import RunRecord
from weft.watch.store import StepWindow
from weft.watch.verdicts import frontier_line, stages_of
from weft.watch.views import plan_terms

_RECENT_STEPS = 60
"""Steps that figures of now are over."""
_SUSPECTS = 5


class RunMetric(NamedTuple):
    """One figure of now."""

    name: str
    """Name such as `step.duration`; exporters put `weft.` before it."""
    unit: str
    """`s`, `By`, `1` (a ratio), or a noun in braces for what is counted, as UCUM has it."""
    description: str
    value: float
    attributes: Mapping[str, str] = {}
    is_sum: bool = False
    """Whether it only grows while the run goes on."""


class Scalar(NamedTuple):
    """One figure of one step."""

    name: str
    """Name such as `train/loss`, as `weft.session(track=…)` gives it."""
    value: float
    step: int
    unix_time: float


def run_metrics(record: RunRecord) -> list[RunMetric]:
    """Return all figures of a run that are known now."""
    metrics = [*_of_steps(record), *_of_training(record), *_of_memory(record), *_of_the_record(record)]
    if record.is_recorded:
        window = _recent(record.window)
        metrics += [*_of_ranks(window, record), *_of_axes(window, record), *_of_the_plan(record)]
    return [metric for metric in metrics if math.isfinite(metric.value)]


def _recent(window: StepWindow) -> StepWindow:
    keep = slice(1 if len(window.steps) and window.steps[0] == 1 else 0, None)
    steps = window.steps[keep][-_RECENT_STEPS:]
    first = len(window.steps) - len(steps)
    return window._replace(steps=steps, num_steps=window.num_steps[first:], unix_times=window.unix_times[first:],
                           values=window.values[first:])  # fmt: skip


def _of_steps(record: RunRecord) -> Iterator[RunMetric]:
    rows = record.steps[-_RECENT_STEPS:]
    yield RunMetric("run.ranks", "{rank}", "Ranks of the newest generation.", record.num_ranks)
    yield RunMetric("run.running", "1", "1 while the run goes on.", float(record.state == "running"))
    yield RunMetric("elastic.generation", "{generation}", "Number of the newest generation.", record.facts.number)
    if not rows:
        return
    yield RunMetric("step.number", "{step}", "Finished steps.", rows[-1].step)
    yield RunMetric("step.age", "s", "Time since the end of the newest step.", record.silent_seconds)
    times = np.array([row.seconds for row in rows])
    for name, value in (("median", np.median(times)), ("p95", np.quantile(times, 0.95)), ("most", times.max())):
        yield RunMetric("step.duration", "s", "Wall time of the newest steps.", float(value), {"stat": name})


def _of_training(record: RunRecord) -> Iterator[RunMetric]:
    if not record.steps:
        return
    row, facts, usual = record.steps[-1], record.facts, record.usual_seconds
    for name, unit, what, value in (
        ("training.loss", "1", "Loss of the newest step.", row.loss),
        ("training.gradient_norm", "1", "Norm of the newest gradient, before clipping.", row.gradient_norm),
        ("training.learning_rate", "1", "Learning rate of the newest step.", row.learning_rate),
        ("training.loss_scale", "1", "Scale of the loss in 16-bit precision.", row.loss_scale),
    ):
        if value is not None:
            yield RunMetric(name, unit, what, value)
    if usual > 0 and facts.samples_per_step:
        rate = facts.samples_per_step / usual
        yield RunMetric("training.samples", "{sample}/s", "Samples per second of the whole job.", rate)
        if facts.tokens_per_sample:
            yield RunMetric("training.tokens", "{token}/s", "Tokens per second of the whole job.",
                            rate * facts.tokens_per_sample)  # fmt: skip
    if usual > 0 and facts.model_flops and facts.peak_flops:
        share = facts.model_flops / facts.peak_flops / usual
        yield RunMetric("training.peak_share", "1", "Model FLOP/s as a share of the measured peak.", share)


def _of_memory(record: RunRecord) -> Iterator[RunMetric]:
    kinds: dict[str, list[float]] = {}
    for about in record.facts.ranks:
        for kind, size in about.get("memory", {}).items():
            kinds.setdefault(str(kind), []).append(float(size))
    what = "Memory of the rank that holds most, by kind; `held`: all of it at the end of the newest step."
    for kind, sizes in kinds.items():
        yield RunMetric("memory.usage", "By", what, max(sizes), {"kind": kind})
    if record.is_recorded and "memory" in record.window.columns:
        held = record.window.column("memory")[-1]
        held = held[np.isfinite(held)]
        if len(held):
            yield RunMetric("memory.usage", "By", what, float(held.max()), {"kind": "held"})


def _of_the_record(record: RunRecord) -> Iterator[RunMetric]:
    for name in ("spans", "collectives", "steps"):
        lost = sum(getattr(gap, name) for gap in record.gaps)
        yield RunMetric("telemetry.dropped", "{record}", "What was not recorded.", lost, {"kind": name}, is_sum=True)
    failures = sum(event.get("kind") == "generation" for event in record.events)
    yield RunMetric("elastic.restarts", "{restart}", "Generations after the first.", failures, is_sum=True)


def _of_ranks(window: StepWindow, record: RunRecord) -> Iterator[RunMetric]:
    for state in (*STATES, "descheduled"):
        if state in window.columns:
            for name, value in _over_ranks(window.column(state)):
                yield RunMetric("rank.time", "s", "Time per step of a rank in each state, over ranks.", value,
                                {"state": state, "stat": name})  # fmt: skip
    for phase, seconds in frontier_line(window):
        what = "Time that each phase adds to the job's step; phases sum to the step."
        yield RunMetric("frontier.time", "s", what, seconds, {"phase": phase})
    for stage, ranks in enumerate(stages_of(record.facts)):
        bubble = window.column("bubble")[:, ranks]
        bubble = bubble[np.isfinite(bubble)]
        if len(bubble):
            yield RunMetric("pipeline.bubble.time", "s", "Time per step in which a stage waits for others.",
                            float(bubble.mean()), {"stage": str(stage)})  # fmt: skip
    blamed = [verdict for verdict in record.verdicts if verdict.kind != "unknown"]
    for verdict in blamed[:_SUSPECTS]:
        attributes = {"kind": verdict.kind, "phase": verdict.phase, "axis": verdict.axis,
                      "ranks": ",".join(map(str, verdict.ranks[:_SUSPECTS]))}  # fmt: skip
        yield RunMetric("verdict.cost", "s", "Time per step that a verdict costs.", verdict.seconds, attributes)


def _over_ranks(column: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Iterator[tuple[str, float]]:
    known = column[:, np.isfinite(column).all(axis=0)]
    if known.size:
        means = known.mean(axis=0, dtype=np.float64)
        yield from (("least", float(means.min())), ("median", float(np.median(means))), ("most", float(means.max())))


def _of_axes(window: StepWindow, record: RunRecord) -> Iterator[RunMetric]:
    for axis in axis_names(window.columns):
        for kind in ("exposed", "total"):
            for name, value in _over_ranks(window.column(f"{kind}:{axis}")):
                yield RunMetric("comm.duration", "s", "Time per step of an axis, inside of waits and from launch.",
                                value, {"mesh_dim": axis, "kind": kind, "stat": name})  # fmt: skip
    sums: dict[tuple[str, str], list[int]] = {}
    for of_rank in record.traffic().values():
        for axis, operations in of_rank.items():
            for operation, (_, size) in operations.items():
                sums.setdefault((axis, operation), []).append(size)
    for (axis, operation), sizes in sums.items():
        yield RunMetric("comm.io", "By", "Bytes per step of the rank that sends most.", max(sizes),
                        {"mesh_dim": axis, "op": operation})  # fmt: skip


def _of_the_plan(record: RunRecord) -> Iterator[RunMetric]:
    for term in plan_terms(record):
        if term.planned:
            error = term.measured / term.planned - 1
            yield RunMetric("plan.error", "1", "Measured over planned time of a term, less one.", error,
                            {"term": term.term})  # fmt: skip


def scalars_of(record: RunRecord, after: int = 0) -> Iterator[Scalar]:
    """Yield what is known of every step behind `after`, in the order of steps.

    Of a run of many thousand steps those that `RunRecord` holds: older ones are thinned out.
    """
    columns = _columns_by_step(record.window)
    rates = {int(report["step"]): report for report in record.reports if isinstance(report.get("step"), int)}
    for row in record.steps:
        if row.step <= after:
            continue
        end = row.unix_time + row.seconds * row.num_steps
        values: dict[str, float | None] = {
            "train/loss": row.loss, "train/gradient_norm": row.gradient_norm, "train/learning_rate": row.learning_rate,
            "train/loss_scale": row.loss_scale, "seconds/step": row.seconds,
        }  # fmt: skip
        report = rates.get(row.step, {})
        names = ("samples_per_second", "tokens_per_second", "flops_per_second", "peak_share")
        values |= {f"rate/{name}": report.get(name) for name in names}
        values |= columns.get(row.step, {})
        for name, value in values.items():
            if value is not None and math.isfinite(value):
                yield Scalar(name, float(value), row.step, end)
    for event in record.events:
        if event.get("kind") == "evaluation" and int(event["step"]) > after:
            loss = event.get("validation_loss")
            if loss is not None:
                when = float(event.get("unix_time_seconds") or 0.0)
                yield Scalar("evaluation/loss", float(loss), int(event["step"]), when)


def _columns_by_step(window: StepWindow) -> dict[int, dict[str, float | None]]:
    """Return the mean over ranks of every state and of every axis's waits, by step."""
    wanted = {f"state/{name}": name for name in (*STATES, "descheduled")}
    wanted |= {f"communication/{axis}/exposed": f"exposed:{axis}" for axis in axis_names(window.columns)}
    found: dict[int, dict[str, float | None]] = {}
    for name, column in wanted.items():
        if column not in window.columns:
            continue
        values = window.column(column)
        for step, of_ranks in zip(window.steps.tolist(), values, strict=True):
            known = of_ranks[np.isfinite(of_ranks)]
            if len(known):
                found.setdefault(step, {})[name] = float(known.mean())
    return found

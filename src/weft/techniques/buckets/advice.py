"""From the collectives that a run has seen: would other gradient buckets have left less to wait for?

The start α and the seconds per byte β of a collective follow from how long those of different sizes took, the pace of
backward from when buckets became full.  What other buckets would expose is then the closed form that plans are priced
with (`weft.techniques.buckets.sizes`), scaled so that it says for the buckets that were used what was measured.
Nothing is changed: a run must be what its plan says.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import NamedTuple

from weft.comm.telemetry import Recorder
from weft.comm.trace_event import TraceEvent
from weft.config.plan import DataParallelPlan, Plan
from weft.formatting import format_memory, format_seconds
from weft.techniques.buckets.sizes import SMALLEST_BUCKET, Flow, best_bucket

_AXIS = "data"
_WARM_STEPS = 3
"""Left out: connections open, and buckets have not got their order yet."""
_FEWEST_STEPS = 5
_MOST_STEPS = 100
"""The latest ones."""
_LEAST_BYTES = 4096
"""Smaller collectives are no buckets: counts, flags, norms."""
_LEAST_SPREAD = 1.5
"""Ratio of the largest to the smallest collective from which on α and β can be told apart."""
_EXPOSED_SHARE = 0.05
"""Share of a step from which on it is worth a word."""
_SAVED_SHARE = 0.2
"""Share of what is exposed, and a tenth of it of the step: less would not be seen again."""
_TRUSTED = 3.0
"""The closed form must be right by this factor for the buckets that were used, or it says nothing of others."""
_FORWARD_SHARE = 0.5
"""Seconds of a forward over those of its backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketAdvice:
    """Means over the steps of one rank."""

    axis: str
    total_seconds: float
    """Time from launch to end, all collectives of a step."""
    exposed_seconds: float
    """Time inside waits."""
    best_bytes: int
    """Bytes of a bucket that would have been better."""
    would_expose_seconds: float

    def __str__(self) -> str:
        times = (self.exposed_seconds, self.total_seconds, self.would_expose_seconds)
        exposed, total, would = (format_seconds(seconds, 2) for seconds in times)
        return (
            f"{self.axis} axis: {exposed} of {total} exposed in a step; buckets of {format_memory(self.best_bytes)}"
            f" would expose about {would}: --set plan.data_parallel.bucket_bytes={self.best_bytes}"
        )


class _Step(NamedTuple):
    """Collectives of one step on the axis, in the order of their launch."""

    reductions: list[TraceEvent]
    gathers: list[TraceEvent]


def advise_bucket(recorder: Recorder, plan: Plan, *, tail_bytes: int = 0) -> BucketAdvice | None:
    """Return which buckets would have exposed less, or None: little was exposed or would be saved, or too little was
    seen (steps, sizes, ends that were observed) to tell.  No collective: call on any rank.

    Args:
        recorder: of a run under `plan`.
        tail_bytes: of gradients that backward completes only at its end, however small the buckets: those of an
            embedding.
    """
    data = plan.data_parallel
    several = max(plan.microbatch.shares(plan.mesh.data)) > 1
    if plan.mesh.data == 1 or data.shards_weights or (data.shards_gradients and several):
        return None
    if data.compresses or data.replicas_step_alone:
        return None
    starts = [start for name, start, _ in recorder.latest() if name == "forward_backward"]
    starts = starts[_WARM_STEPS:][-_MOST_STEPS:]
    steps = _steps(recorder.collectives.latest(), starts)
    if len(steps) < _FEWEST_STEPS:
        return None
    flows = _flows(steps, tail_bytes)
    return _advice(flows, steps, median(_gaps(starts)), data) if flows else None


def _advice(
    flows: Sequence[Flow], steps: Sequence[_Step], step_seconds: float, data: DataParallelPlan
) -> BucketAdvice | None:
    first, others = data.bucket_limits
    seen = [[*step.reductions, *step.gathers] for step in steps]
    exposed = mean(sum(event.exposed_ns for event in step) for step in seen) / 1e9
    # The closed form is believed only if it explains what was seen; its forecast is scaled by the same factor.
    modelled = sum(flow.exposed(others, first) for flow in flows)
    if exposed < _EXPOSED_SHARE * step_seconds or not exposed / _TRUSTED <= modelled <= exposed * _TRUSTED:
        return None
    first_given = first if data.is_first_given else 0
    best = best_bucket(flows, first=first, low=max(SMALLEST_BUCKET, first_given))
    would = sum(flow.exposed(best, first) for flow in flows) * exposed / modelled
    saved = exposed - would
    if saved < _SAVED_SHARE * exposed or saved < _SAVED_SHARE / 10 * step_seconds:
        return None
    return BucketAdvice(
        axis=_AXIS,
        total_seconds=mean(sum(event.total_ns for event in step) for step in seen) / 1e9,
        exposed_seconds=exposed,
        best_bytes=best,
        would_expose_seconds=would,
    )


def _steps(seen: Sequence[TraceEvent], starts: Sequence[int]) -> list[_Step]:
    """Sort the axis's buckets by the step that launched them; the last step may not have ended, and is left out."""
    buckets = [event for event in seen if event.axis == _AXIS and event.num_bytes >= _LEAST_BYTES]
    borders = [bisect_left(buckets, start, key=lambda event: event.launched_ns) for start in starts]
    steps: list[_Step] = []
    for start, stop in zip(borders, borders[1:], strict=False):
        inside = buckets[start:stop] if start else []  # of the first that are kept there may be a part
        reductions = [event for event in inside if event.operation in ("all_reduce", "reduce_scatter")]
        steps.append(_Step(reductions, [event for event in inside if event.operation == "all_gather"]))
    return [step for step in steps if step.reductions]


def _gaps(starts: Sequence[int]) -> list[float]:
    return [(after - before) / 1e9 for before, after in zip(starts, starts[1:], strict=False)]


def _flows(steps: Sequence[_Step], tail_bytes: int) -> list[Flow]:
    """Return reductions, and gathers if there are any, as the closed form takes them; empty: they do not tell."""
    size = median(_bytes(step.reductions) for step in steps)
    window = median(_window_seconds(step.reductions) for step in steps)
    reduce = _line(step.reductions for step in steps)
    if reduce is None or window <= 0.0:
        return []
    flows = [_flow(size, window, reduce, 1.0, tail_bytes)]
    gathered = median(_bytes(step.gathers) for step in steps)
    if gathered > 0:
        gather = _line(step.gathers for step in steps)
        if gather is None:
            return []
        flows.append(_flow(size, _FORWARD_SHARE * window, gather, gathered / size, tail_bytes))
    return flows


def _flow(size: float, window: float, line: tuple[float, float], share: float, tail_bytes: int) -> Flow:
    """Return a flow; `share` is the ratio of the bytes that travel to those of the gradients."""
    start, per_byte = line
    return Flow(size=size, window=window, seconds=lambda x: start + per_byte * share * x, tail=float(tail_bytes))


def _bytes(seen: Sequence[TraceEvent]) -> int:
    return sum(event.num_bytes for event in seen)


def _window_seconds(reductions: Sequence[TraceEvent]) -> float:
    """Seconds in which backward completes all gradients, at the pace at which buckets after the first became full."""
    later = _bytes(reductions[1:])
    if not later:
        return 0.0
    return (reductions[-1].launched_ns - reductions[0].launched_ns) / 1e9 / later * _bytes(reductions)


def _line(steps: Iterable[Sequence[TraceEvent]]) -> tuple[float, float] | None:
    """Return α and β of the collectives that found the network idle.

    If these are too similar in size, all collectives count, less the time that they waited for earlier ones.
    """
    alone, behind = list[tuple[int, float]](), list[tuple[int, float]]()
    for seen in steps:
        free = 0
        for event in seen:
            if not event.is_done_exact:  # then the moment at which the network was free again is not known either
                break
            (alone if event.launched_ns >= free else behind).append(
                (event.num_bytes, (event.done_ns - max(event.launched_ns, free)) / 1e9)
            )
            free = max(free, event.done_ns)
    return fit_line(alone) or fit_line([*alone, *behind])


def fit_line(points: Sequence[tuple[int, float]]) -> tuple[float, float] | None:
    """Return α and β of seconds = α + β·bytes by least squares of relative errors over the medians of equal sizes, both
    at least 0; None where the sizes are too alike."""
    by_size: dict[int, list[float]] = {}
    for size, seconds in points:
        by_size.setdefault(size, []).append(seconds)
    rows = [(float(size), middle) for size, times in by_size.items() if (middle := median(times)) > 0.0]
    if len(rows) < 2 or max(rows)[0] < _LEAST_SPREAD * min(rows)[0]:
        return None
    w, x, y, xx, xy = (sum(column) for column in zip(*_weighted(rows), strict=True))
    # Weights 1 / seconds² make errors relative: a short collective says as much about α as a long one about β.
    slope = (w * xy - x * y) / (w * xx - x * x)
    start = (y - slope * x) / w
    if slope < 0.0:
        return y / w, 0.0
    return (start, slope) if start >= 0.0 else (0.0, xy / xx)


def _weighted(rows: Sequence[tuple[float, float]]) -> Iterator[tuple[float, ...]]:
    for size, seconds in rows:
        weight = 1.0 / seconds**2
        yield weight, weight * size, weight * seconds, weight * size * size, weight * size * seconds

"""Where the time of a step goes: spans by name, summed per step, and the latest of them kept in memory."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from time import perf_counter_ns

from weft.comm.telemetry._collectives import CollectiveLog
from weft.events.progress import PHASES, ProgressRow


class Recorder:
    """Measures nested spans of one rank.  Each sum is of the span's own time, so that the sums add up to the step.

    One span is on at a time: a span opened by autograd's thread while the main thread waits in its own is nested in it;
    threads that run beside the main one must not record here.  A span costs about a microsecond.
    """

    def __init__(self, *, keep: int = 65_536, progress: ProgressRow | None = None) -> None:
        """Keep the latest `keep` spans (24 bytes each).  `progress` is where the launcher reads how far this rank has
        come, where there is a launcher."""
        self.progress = progress
        self.collectives = CollectiveLog()
        """The collectives from `Mesh.watch`; their time lies inside of the spans, or beside them."""
        self._names: list[str] = []
        self._spans: dict[str, Span] = {}
        self._own_ns: list[int] = []
        self._open: list[int] = []
        """Nanoseconds spent in the children of each open span, outermost first."""
        self._kept = _Ring(keep)
        self._step_started_ns = perf_counter_ns()
        self._ended_ns = [0] * len(PHASES)
        """Nanoseconds of the phases before the last `end_step`."""
        self._mark = (0, 0, 0)
        for name in PHASES:
            self.span(name)

    def span(self, name: str) -> Span:
        """Return the context that measures `name`: `with recorder.span("optimizer"): …`.  It may nest."""
        span = self._spans.get(name)
        if span is None:
            index = len(self._names)
            span = self._spans[name] = Span(index, self._own_ns, self._open, self._kept, self.progress)
            self._names.append(name)
            self._own_ns.append(0)
        return span

    def end_step(self) -> dict[str, float]:
        """Return `<name>_seconds` of every name since the last call, `step_seconds` and the rest as `other_seconds`.

        Call it between steps, with no span open.
        """
        assert not self._open, "a step ended inside a span"
        now = perf_counter_ns()
        wall, self._step_started_ns = now - self._step_started_ns, now
        sums = {f"{name}_seconds": spent / 1e9 for name, spent in zip(self._names, self._own_ns, strict=True)}
        rest = wall - sum(self._own_ns)
        self._ended_ns = [ended + own for ended, own in zip(self._ended_ns, self._own_ns)]  # noqa: B905
        for index in range(len(self._own_ns)):
            self._own_ns[index] = 0
        return {"step_seconds": wall / 1e9, **sums, "other_seconds": max(rest, 0) / 1e9}

    def take_parts(self) -> tuple[int, int, int]:
        """Return the nanoseconds since the last call in waits for other ranks, for data, and in the optimizer."""
        spent = [ended + own for ended, own in zip(self._ended_ns, self._own_ns)]  # noqa: B905
        now = (self.collectives.waited_ns(), spent[PHASES.index("data_wait")], spent[PHASES.index("optimizer")])
        before, self._mark = self._mark, now
        return now[0] - before[0], now[1] - before[1], now[2] - before[2]

    def forget(self) -> None:
        """Leave out of the next sums what was done since the last ones.  Call it with no span open."""
        self.end_step()
        self.collectives.end_step()
        self.collectives.take_launched()

    def latest(self) -> list[tuple[str, int, int]]:
        """Return the kept spans, oldest first, as (name, start, duration), in nanoseconds of `perf_counter_ns`."""
        return [(self._names[index], start, duration) for index, start, duration in self._kept.rows()]


@dataclass(slots=True)
class _Ring:
    """The latest rows of three numbers, in storage made once."""

    size: int
    count: int = 0
    columns: tuple[array[int], array[int], array[int]] = field(init=False)

    def __post_init__(self) -> None:
        empty = bytes(8 * self.size)
        self.columns = (array("q", empty), array("q", empty), array("q", empty))

    def rows(self) -> list[tuple[int, int, int]]:
        first = max(0, self.count - self.size)
        indexes, starts, durations = self.columns
        return [
            (indexes[at], starts[at], durations[at]) for at in (row % self.size for row in range(first, self.count))
        ]


class Span:
    """The context of one name; made once per name and entered again and again."""

    __slots__ = ("_before", "_index", "_kept", "_open", "_own_ns", "_progress", "_starts")

    def __init__(
        self, index: int, own_ns: list[int], open_spans: list[int], kept: _Ring, progress: ProgressRow | None
    ) -> None:
        self._index = index
        self._own_ns = own_ns
        self._open = open_spans
        self._kept = kept
        self._starts: list[int] = []
        self._progress = progress
        self._before: list[int] = []

    def __enter__(self) -> None:
        if self._progress is not None:
            self._before.append(self._progress.enter(self._index))
        self._open.append(0)
        self._starts.append(perf_counter_ns())

    def __exit__(self, *_: object) -> None:
        start = self._starts.pop()
        duration = perf_counter_ns() - start
        inner = self._open.pop()
        self._own_ns[self._index] += duration - inner
        if self._open:
            self._open[-1] += duration
        if self._progress is not None:
            self._progress.leave(self._before.pop())
        ring = self._kept
        indexes, starts, durations = ring.columns
        at = ring.count % ring.size
        indexes[at], starts[at], durations[at] = self._index, start, duration
        ring.count += 1

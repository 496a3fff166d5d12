"""Where the time of a step goes: spans by name, summed per step, and the latest of them in the rank's ring."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter_ns, thread_time_ns

from weft.comm.telemetry._collectives import CollectiveLog
from weft.events.progress import PHASES, ProgressRow
from weft.events.ring import RankRing, StepScalars


class Recorder:
    """Measures nested spans of one rank.  Each sum is of the span's own time, so that the sums add up to the step.

    One span is on at a time: a span opened by autograd's thread while the main thread waits in its own is nested in it;
    threads that run beside the main one must not record here.  A span costs about a microsecond.
    """

    def __init__(self, *, progress: ProgressRow | None = None, ring: RankRing | None = None) -> None:
        """`progress` is where the launcher reads how far this rank has come, where there is a launcher; `ring` is what
        the run's collector reads, by default one that nobody else reads."""
        self.progress = progress
        self.ring = RankRing.private() if ring is None else ring
        self.collectives = CollectiveLog(ring=self.ring)
        """The collectives from `Mesh.watch`; their time lies inside of the spans, or beside them."""
        self._names: list[str] = []
        self._spans: dict[str, Span] = {}
        self._actions: dict[str, ActionSpan] = {}
        self._own_ns: list[int] = []
        self._open = _OpenSpans()
        self._step_started_ns = self._ring_started_ns = perf_counter_ns()
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
            number, asks_cpu = self.ring.name(name), name == "forward_backward"
            span = self._spans[name] = Span(
                index, number, self._own_ns, self._open, self.ring, self.progress, asks_cpu=asks_cpu
            )
            self._names.append(name)
            self._own_ns.append(0)
        return span

    def action(self, name: str, microbatch: int | None = None, stage: int = -1) -> ActionSpan:
        """Return the context that records one microbatch's `forward`, `backward` or `weights` inside of a span, which
        keeps its sum.  `microbatch` is by default how often the name was entered in this step."""
        action = self._actions.get(name)
        if action is None:
            action = self._actions[name] = ActionSpan(self.ring.name(name), self._open, self.ring)
        return action.at(microbatch, stage)

    def end_step(self) -> dict[str, float]:
        """Return `<name>_seconds` of every name since the last call, `step_seconds` and the rest as `other_seconds`.

        Call it between steps, with no span open.
        """
        assert not self._open.names, "a step ended inside a span"
        now = perf_counter_ns()
        wall, self._step_started_ns = now - self._step_started_ns, now
        sums = {f"{name}_seconds": spent / 1e9 for name, spent in zip(self._names, self._own_ns, strict=True)}
        rest = wall - sum(self._own_ns)
        self._ended_ns = [ended + own for ended, own in zip(self._ended_ns, self._own_ns)]  # noqa: B905
        for index in range(len(self._own_ns)):
            self._own_ns[index] = 0
        return {"step_seconds": wall / 1e9, **sums, "other_seconds": max(rest, 0) / 1e9}

    def begin_ring_step(self) -> None:
        """A step begins now, for the ring: what was since the last one is none of it."""
        self._ring_started_ns = perf_counter_ns()

    def end_ring_step(self, step: int, memory_bytes: int, scalars: StepScalars) -> None:
        """Write into the ring that `step` steps are finished, this one now.  The next one begins."""
        now = perf_counter_ns()
        self.ring.step(step, self._ring_started_ns, now, memory_bytes, scalars)
        self._ring_started_ns = now
        for action in self._actions.values():
            action.num_entered = 0

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
        """Return the spans that the ring holds, oldest first, as (name, start, duration), in nanoseconds of
        `perf_counter_ns`."""
        names = self.ring.names
        return [(names[number], start, duration) for number, start, duration in self.ring.spans()]


@dataclass(slots=True)
class _OpenSpans:
    """The spans that are open, outermost first."""

    names: list[int] = field(default_factory=list[int])
    inner_ns: list[int] = field(default_factory=list[int])
    """Nanoseconds spent in the children of each."""


class Span:
    """The context of one name; made once per name and entered again and again."""

    __slots__ = ("_asks_cpu", "_before", "_cpu_ns", "_index", "_number", "_open", "_own_ns", "_progress", "_ring",
                 "_starts")  # fmt: skip

    def __init__(
        self,
        index: int,
        number: int,
        own_ns: list[int],
        open_spans: _OpenSpans,
        ring: RankRing,
        progress: ProgressRow | None,
        *,
        asks_cpu: bool,
    ) -> None:
        """`index` is that of its sum in `own_ns` and of its phase on the board, `number` that of its name in the ring.
        With `asks_cpu` the time that its thread was on a processor is recorded, too."""
        self._index, self._number = index, number
        self._own_ns = own_ns
        self._open = open_spans
        self._ring = ring
        self._progress = progress
        self._asks_cpu = asks_cpu
        self._cpu_ns = 0
        self._starts: list[int] = []
        self._before: list[int] = []

    def __enter__(self) -> None:
        if self._progress is not None:
            self._before.append(self._progress.enter(self._index))
        self._open.inner_ns.append(0)
        self._open.names.append(self._number)
        if self._asks_cpu:
            self._cpu_ns = thread_time_ns()
        start = perf_counter_ns()
        self._starts.append(start)
        self._ring.set_open(self._number, start)

    def __exit__(self, *_: object) -> None:
        start = self._starts.pop()
        now = perf_counter_ns()
        duration = now - start
        cpu = thread_time_ns() - self._cpu_ns if self._asks_cpu else -1
        inner, names = self._open.inner_ns, self._open.names
        own = duration - inner.pop()
        names.pop()
        self._own_ns[self._index] += own
        if inner:
            inner[-1] += duration
        if self._progress is not None:
            self._progress.leave(self._before.pop())
        self._ring.span(self._number, start, duration, own, cpu)
        self._ring.set_open(names[-1] if names else -1, now)


class ActionSpan:
    """The context of one microbatch's action in a span, which keeps its sum."""

    __slots__ = ("_name", "_open", "_place", "_ring", "_start_ns", "num_entered")

    def __init__(self, name: int, open_spans: _OpenSpans, ring: RankRing) -> None:
        self._name, self._open, self._ring = name, open_spans, ring
        self._place = -1
        self._start_ns = 0
        self.num_entered = 0

    def at(self, microbatch: int | None, stage: int) -> ActionSpan:
        """Say of which microbatch and stage the next one is."""
        self._place = stage << 32 | (self.num_entered if microbatch is None else microbatch) & 0xFFFF_FFFF
        return self

    def __enter__(self) -> None:
        self.num_entered += 1
        self._start_ns = start = perf_counter_ns()
        self._ring.set_open(self._name, start)

    def __exit__(self, *_: object) -> None:
        start, now, names = self._start_ns, perf_counter_ns(), self._open.names
        self._ring.span(self._name, start, now - start, now - start, -1, self._place)
        self._ring.set_open(names[-1] if names else -1, now)

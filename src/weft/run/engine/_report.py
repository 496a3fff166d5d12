"""Reports of a loop's steps as events, for Weft's own loop and for a user's."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from weft.comm.device import memory_bytes, peak_memory_bytes
from weft.comm.telemetry import Recorder
from weft.events import (
    CollectiveEvent,
    MemoryEvent,
    MessageEvent,
    PhaseEvent,
    Run,
    RunFolder,
    StartEvent,
    StepEvent,
)
from weft.events.ring import StepScalars
from weft.formatting import format_number
from weft.run.engine._rank_facts import RankFacts
from weft.run.engine._setup import TrainingState
from weft.run.engine._throughput import ThroughputMeter, measure_peak_flops

if TYPE_CHECKING:
    from weft.run.engine.profiler import StepProfiler

_MEMORY_SECONDS = 0.1
_LOOK_SECONDS = 0.5
"""Time between two looks for a request to profile: a look costs some microseconds, on a file server some hundred."""


class StepReporter:
    """Says on one rank how its loop goes: every step, from time to time what the last of them took, and what is none of
    a step."""

    def __init__(
        self, run: Run, recorder: Recorder, training: TrainingState, *, profiled: RunFolder | None = None
    ) -> None:
        """`profiled` is the folder in which somebody may ask for a profile of some steps."""
        self._run = run
        self._recorder = recorder
        self._training = training
        self._model = model = training.model
        self._length = model.blueprint.sequence_length
        self._meter = ThroughputMeter(flops_per_sample=model.blueprint.flops_per_sample, peak_flops=None)
        self._since_report = 0
        self._step = 0
        self._mark = time.perf_counter()
        self._outside: int | None = None
        self._memory, self._memory_at = 0, -math.inf
        self._alone_flops: float | None = None
        self._profiled, self._look_at = profiled, 0.0
        self._profiler: StepProfiler | None = None
        self._was_asked = profiled is not None and os.path.exists(profiled.profile_request)
        """Whether a request lies there that was for the run before this one."""

    def measure_peak(self, known: float | None = None) -> None:
        """Measure the FLOP/s of matrix products of all ranks together, by all at once so that shared cores are shared:
        rates are held against them.  Nothing is measured where they are known.  Call on every rank."""
        if known is not None:
            self._meter.peak_flops = known
            return
        mesh = self._model.mesh
        world = mesh["world"]
        if world.group is not None:
            dist.barrier(group=world.group)
        own = measure_peak_flops(mesh.device, self._model.dtypes.compute)
        peak = torch.tensor(own, dtype=torch.float64, device=mesh.device)
        if world.group is not None:
            dist.all_reduce(peak, group=world.group)
        self._meter.peak_flops, self._alone_flops = peak.tolist()

    def start(self, step: int, num_steps: int | None, samples: int) -> None:
        """The loop begins, or goes on from a save, after `step` steps; `num_steps` are all, where that is known.
        `samples` is the global batch."""
        size, plan = self._model.mesh["world"].size, self._model.plan
        self._run.emit(StartEvent(step=step, num_steps=num_steps, world_size=size, plan=plan.digest))
        if self._recorder.progress is not None:
            self._recorder.progress.begin(step)
        self._recorder.ring.begin(step)
        if self._recorder.ring.folder is not None:
            peaks = {"peak_flops": self._meter.peak_flops, "alone_flops": self._alone_flops}
            RankFacts(training=self._training, samples_per_step=samples, **peaks).write(self._recorder.ring.folder)
        self.begin()

    def begin(self) -> None:
        """Time runs from now on.  Call it before a step where time has passed that was none of its own."""
        self._mark = time.perf_counter()
        self._recorder.begin_ring_step()

    def leave_step(self) -> None:
        """Until the next step the loop is about something of its own, which may take its time: no hang."""
        if self._recorder.progress is not None and self._outside is None:
            self._outside = self._recorder.progress.elsewhere()

    def enter_step(self) -> None:
        """A step begins."""
        if self._recorder.progress is not None and self._outside is not None:
            self._recorder.progress.leave(self._outside)
            self._outside = None

    @contextmanager
    def phase(self, name: str) -> Generator[Callable[[], float]]:
        """Time what is none of a step; yields how many seconds it has taken so far."""
        started = time.perf_counter()
        with self._recorder.span(name):
            yield lambda: time.perf_counter() - started
        self.begin()

    def step(self, event: StepEvent, *, samples: int) -> None:
        """A step of this global batch has been done, from data to update."""
        now = time.perf_counter()
        tokens = None if self._length is None else samples * self._length
        self._meter.add(seconds=now - self._mark, samples=samples, tokens=tokens)
        if self._recorder.progress is not None:
            waited, data, optimizer = self._recorder.take_parts()
            self._recorder.progress.took(event.step, int((now - self._mark) * 1e9) - waited, data, optimizer)
        self._mark, self._step, self._since_report = now, event.step, self._since_report + 1
        if self._recorder.progress is not None:
            self._recorder.progress.finished(event.step)
        scalars = StepScalars(
            loss=event.loss,
            gradient_norm=event.gradient_norm,
            learning_rate=event.learning_rate,
            loss_scale=event.loss_scale,
            num_counted=event.count,
            skipped=event.skipped,
        )
        self._recorder.end_ring_step(event.step, self._memory_bytes(), scalars)
        self._run.emit(event)
        self._profile(event.step)

    def _profile(self, step: int) -> None:
        """Begin or end a profile that was asked for.  Its time is none of a step's."""
        if self._profiler is None:
            if self._profiled is None or (now := time.monotonic()) < self._look_at:
                return
            self._look_at = now + _LOOK_SECONDS
            if not os.path.exists(self._profiled.profile_request):  # Path.exists raises where a file server fails
                return
            from weft.run.engine.profiler import StepProfiler  # most runs are never asked

            seen = None if self._was_asked else 0
            self._profiler = StepProfiler(self._profiled, self._run.rank or 0, seen, look_seconds=_LOOK_SECONDS)
        if self._profiler.after_step(step, self.leave_step):
            self.enter_step()
            self.begin()

    def end(self) -> None:
        """The loop is over: no steps follow."""
        if self._profiler is not None:
            self._profiler.close(self._step)
        if self._recorder.progress is not None:
            self._recorder.progress.end()
        self._recorder.ring.end()

    def _memory_bytes(self) -> int:
        """Memory that this rank holds, as of at most a tenth of a second ago: asking costs 15 µs."""
        if (now := time.monotonic()) - self._memory_at > _MEMORY_SECONDS:
            self._memory, self._memory_at = memory_bytes(self._model.mesh.device), now
        return self._memory

    def report(self, remaining_steps: int | None = None) -> None:
        """Say what the steps since the last report took; nothing where there were none."""
        progress = self._recorder.progress
        # A terminal that stands still, or a file system, may hold this rank up: that is no step that hangs.
        before = progress.elsewhere() if progress is not None else 0
        try:
            self._report(remaining_steps)
        finally:
            if progress is not None:
                progress.leave(before)

    def _report(self, remaining_steps: int | None) -> None:
        step, count = self._step, self._since_report
        if count == 0:
            return
        self._since_report = 0
        emit = self._run.emit
        emit(PhaseEvent(step=step, num_steps=count, seconds=self._recorder.end_step()))
        for axis, sums in self._recorder.collectives.end_step().items():
            emit(
                CollectiveEvent(
                    step=step,
                    num_steps=count,
                    axis=axis,
                    count=sums.count,
                    num_bytes=sums.num_bytes,
                    total_seconds=sums.total_ns / 1e9,
                    exposed_seconds=sums.exposed_ns / 1e9,
                )
            )
        emit(MemoryEvent(step=step, peak_bytes=peak_memory_bytes(self._model.mesh.device)))
        measured = self._meter.peak_flops
        rates = self._meter.read(step=step, num_steps=count, remaining_steps=remaining_steps)
        self._tell_of_peak(measured)
        emit(rates)

    def _tell_of_peak(self, measured: float | None) -> None:
        peak = self._meter.peak_flops
        if measured and peak and peak > measured:
            text = (
                f"step {self._step}: training ran at {format_number(peak / measured)} times the peak that was measured"
                f" at its start, while something else used the machine. The peak is {format_number(peak / 1e9)} GFLOP/s"
                " from here on, what these steps reached; shares of it said before were too high."
            )
            self._run.emit(MessageEvent(text=text))

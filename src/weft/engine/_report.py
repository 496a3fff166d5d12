"""From steps to events, whoever owns the loop."""

from __future__ import annotations

import time

from weft.comm import Mesh, peak_memory_bytes
from weft.engine._step import StepResult
from weft.engine._throughput import ThroughputMeter
from weft.events import CollectiveEvent, MemoryEvent, MessageEvent, PhaseEvent, RateEvent, Run, StepEvent
from weft.figures import spell_figure
from weft.record import Recorder


class StepReporter:
    """Says on one rank what its steps were: every step, and from time to time what the last of them took."""

    def __init__(self, run: Run, recorder: Recorder, mesh: Mesh, meter: ThroughputMeter) -> None:
        self._run = run
        self._recorder = recorder
        self._device = mesh.device
        self._meter = meter
        self._since_report = 0
        self._step = 0
        self._mark = time.perf_counter()

    def begin(self) -> None:
        """Time runs from now on.  Call it before a step where time has passed that was none of its own."""
        self._mark = time.perf_counter()

    def step(
        self,
        result: StepResult,
        *,
        samples: int,
        tokens: int | None,
        num_skipped: int,
        learning_rate: float | None = None,
    ) -> None:
        """A step of this global batch has been done, from data to update."""
        now = time.perf_counter()
        self._meter.add(seconds=now - self._mark, samples=samples, tokens=tokens)
        self._mark, self._step, self._since_report = now, result.step + 1, self._since_report + 1
        self._run.emit(
            StepEvent(
                step=result.step + 1,
                loss=result.loss,
                count=result.count,
                gradient_norm=result.gradient_norm,
                learning_rate=learning_rate,
                skipped=result.skipped,
                num_skipped=num_skipped,
                loss_scale=result.loss_scale,
                memory_bytes=result.memory_bytes,
                auxiliary=result.auxiliary,
            )
        )

    def report(self, remaining_steps: int | None = None) -> None:
        """Say what the steps since the last report took; nothing where there were none."""
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
        emit(MemoryEvent(step=step, peak_bytes=peak_memory_bytes(self._device)))
        measured = self._meter.peak_flops
        rates = self._meter.read()
        self._tell_of_peak(measured)
        emit(
            RateEvent(
                step=step,
                num_steps=count,
                samples_per_second=rates.samples_per_second,
                tokens_per_second=rates.tokens_per_second,
                flops_per_second=rates.flops_per_second,
                peak_share=rates.peak_share,
                remaining_seconds=None if remaining_steps is None else self._meter.remaining_seconds(remaining_steps),
            )
        )

    def _tell_of_peak(self, measured: float | None) -> None:
        peak = self._meter.peak_flops
        if measured and peak and peak > measured:
            text = (
                f"step {self._step}: training ran at {spell_figure(peak / measured)} times the peak that was measured"
                f" at its start, while something else used the machine. The peak is {spell_figure(peak / 1e9)} GFLOP/s"
                " from here on, what these steps reached; shares of it said before were too high."
            )
            self._run.emit(MessageEvent(text=text))

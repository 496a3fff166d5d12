"""What a session's loop says of itself, step by step."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager

import torch

from weft.engine import StepReporter, StepResult, ThroughputMeter
from weft.events import Run, StartEvent
from weft.parallel import ParallelModel
from weft.record import Recorder


class LoopRecord:
    """What one rank says of a model that the user's loop steps: every step with its report."""

    def __init__(self, run: Run, recorder: Recorder, model: ParallelModel) -> None:
        self._run = run
        self._recorder = recorder
        self._model = model
        self._skipped = 0
        meter = ThroughputMeter(flops_per_sample=model.blueprint.flops_per_sample, peak_flops=None)
        self._reporter = StepReporter(run, recorder, model.mesh, meter)
        self.emit = run.emit
        self.start(0)

    def start(self, step: int) -> None:
        """The loop begins, or goes on from a save."""
        size, plan = self._model.mesh["world"].size, self._model.plan
        self.emit(StartEvent(step=step, num_steps=None, world_size=size, plan=plan.digest))
        self._reporter.begin()

    def step(self, result: StepResult, samples: int, optimizer: torch.optim.Optimizer) -> None:
        """The learning rate is that of the optimizer's first group."""
        self._skipped += result.skipped
        rate = float(optimizer.param_groups[0]["lr"])
        self._reporter.step(result, samples=samples, tokens=None, num_skipped=self._skipped, learning_rate=rate)
        self._reporter.report()

    @contextmanager
    def phase(self, name: str) -> Generator[Callable[[], float]]:
        """Time what is none of a step; yields how many seconds it has taken so far."""
        started = time.perf_counter()
        with self._recorder.span(name):
            yield lambda: time.perf_counter() - started
        self._reporter.begin()

"""Generations of ranks: start them, judge how one ended, and start the next from what is saved.

A generation is one membership of a job: a number, a list of ranks, a plan, a fresh store at which they meet, and a
fencing token.  All its processes have ended before the next begins, and a save that an older one may still have under
way can no longer commit, since the folder's token has changed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from weft.config.plan import Plan
from weft.config.recipe import OnFailure
from weft.errors import PlanError
from weft.events import Event, GenerationEvent, Run, RunFolder, text_of
from weft.events.sinks.log import LogSink
from weft.events.sinks.metrics import MetricsSink
from weft.run.launch.job_end import JobEnd
from weft.run.supervise._failure import failure_of, kernel_memory_kills
from weft.run.supervise._failure_rate import FailureRate
from weft.run.supervise._policy import PolicyTexts, RestartPolicy, Shrink, Stop

_REPLAN = "replan"
"""`GenerationEvent.failure` where nothing has failed: the run goes on under another plan."""


class StartGeneration(Protocol):
    """Runs the ranks of one generation to their end."""

    def __call__(self, number: int, resumes: bool) -> JobEnd:
        """Start all ranks of generation `number`, from the newest saved state where it `resumes`, else anew."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanChange:
    """The next generation goes on under another plan."""

    text: str
    """Sentence that names both plans, and the reason."""


class Supervisor:
    """Keeps one run going on this host: `run` returns when the run is done, was stopped, or failed for good."""

    def __init__(
        self,
        policies: OnFailure,
        *,
        saved_step: Callable[[], int],
        samples_per_step: int,
        plan: Callable[[], Plan],
        plan_change: Callable[[JobEnd], PlanChange | None],
        log: Callable[[Event], object],
        report: Callable[[JobEnd], object],
        stopping: threading.Event,
        shrink: Callable[[Shrink], PlanChange] | None = None,
        may_restart: Callable[[JobEnd], bool] = lambda end: True,
        texts: PolicyTexts | None = None,
        tries_early_errors: bool = False,
    ) -> None:
        """Say how to keep the run going.  Nothing starts yet.

        Args:
            policies: the recipe's `[run.on_failure]`.
            saved_step: returns the finished steps of the newest saved state, 0 where nothing is saved.
            samples_per_step: samples of a global batch, by which the batch of a step that fails again is named.
            plan: returns the plan of the generation that runs, or is about to.
            plan_change: is told how a generation ended, and says whether the next one goes on under another plan.
            log: takes what happened, for the terminal and the folder of the run.
            report: shows the first cause of a failure after which the ranks start again.
            stopping: set where a signal has come: no more generations start.
            shrink: lets the next generation go on with fewer ranks; raises `PlanError` where there is no plan for them.
                None: no policy of the run asks for that.
            may_restart: whether ranks can go on from what is saved after such an end; policies are asked only then.
            texts: how messages name the policies; by default as those of a recipe.
            tries_early_errors: whether ranks start again once, too, after an error before the first step.
        """
        self._saved_step = saved_step
        self._policy = RestartPolicy(
            policies, saved_step(), samples_per_step, texts, tries_early_errors=tries_early_errors
        )
        self._may_restart = may_restart
        self._plan = plan
        self._plan_change = plan_change
        self._shrink = shrink
        self._log = log
        self._report = report
        self._stopping = stopping
        self._kills = kernel_memory_kills()
        self.failure_rate = FailureRate()
        """The failures so far."""

    def sample(self) -> None:
        """Look at the host; call it twice a second.  A kill for want of memory counts for a failure that follows it
        within that time, and not for one days later."""
        self._kills = kernel_memory_kills()

    def run(self, start: StartGeneration, *, resumes: bool) -> tuple[JobEnd, str]:
        """Start generations until one ends well, is stopped by a signal, or fails for good.

        Returns its end, and for a failure why the ranks did not start again: a sentence, empty where the error says
        everything.
        """
        number = 1
        while True:
            self.sample()
            end = start(number, resumes)
            if not end.signals and (change := self._plan_change(end)) is not None:
                saved_step = self._saved_step()
                if self._stopping.is_set():
                    return end, ""
                if end.cause is not None:  # a host was lost, or the plan has failed
                    self.failure_rate.count()
                number, resumes = number + 1, saved_step > 0
                self._log(self._generation(number, _REPLAN, 0, "", change.text, saved_step + 1, saved_step, 0))
                continue
            failure = failure_of(end, out_of_memory_kills=kernel_memory_kills() - self._kills)
            if failure is None or end.signals or not self._may_restart(end):
                return end, ""
            self.failure_rate.count()
            saved_step = self._saved_step()
            decision = self._policy.decide(failure, saved_step)
            plan_change, num_restarts, pause_seconds = "", 0, 0.0
            if isinstance(decision, Stop):
                return end, decision.reason
            if isinstance(decision, Shrink):
                assert self._shrink is not None
                try:
                    plan_change = self._shrink(decision).text
                except PlanError as problem:
                    return end, f"The run cannot go on with fewer ranks, {decision.reason}: {problem}"
                self._policy.shrunk()
            else:
                num_restarts, pause_seconds = decision.num_restarts, decision.pause_seconds
            self._report(end)
            if self._stopping.wait(pause_seconds):
                return end, "A signal stopped the run before the ranks started again."
            number, resumes = number + 1, saved_step > 0
            self._log(
                self._generation(
                    number,
                    failure.kind,
                    failure.rank,
                    failure.host,
                    failure.cause,
                    failure.step,
                    saved_step,
                    num_restarts,
                    plan_change,
                )
            )

    def _generation(
        self,
        number: int,
        failure: str,
        rank: int,
        host: str,
        cause: str,
        failed_step: int,
        restored_step: int,
        num_restarts: int,
        plan_change: str = "",
    ) -> GenerationEvent:
        plan = self._plan()
        return GenerationEvent(
            number=number,
            world_size=plan.mesh.world_size,
            plan=plan.digest,
            failure=failure,
            rank=rank,
            host=host,
            cause=cause,
            failed_step=failed_step,
            restored_step=restored_step,
            num_restarts=num_restarts,
            plan_change=plan_change,
        )


def report_end(end: JobEnd) -> None:
    """Show the first cause of a failure after which the ranks start again."""
    print(end.report(), file=sys.stderr, flush=True)


def log_between(run: RunFolder | None, event: Event, *, quiet: bool = False) -> None:
    """Say what happened between two generations, when no rank writes in the folder of the run: there, and but for
    `quiet` on the terminal."""
    if run is not None:
        with Run(None, [LogSink(run.launcher_log), MetricsSink(run.metrics)]) as log:
            log.emit(event)
    if not quiet and (words := text_of(event)) is not None:
        print(words, flush=True)

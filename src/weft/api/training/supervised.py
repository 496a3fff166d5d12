"""A training whose ranks start again when one fails: `weft.train` outside of other launchers."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weft.config.document import typed
from weft.config.plan import Plan, dump_plan
from weft.config.recipe import Recipe
from weft.events import Event, Run, RunFolder, text_of
from weft.events.folder_lock import FolderLock
from weft.events.loss_board import LossBoard
from weft.events.sinks.log import LogSink
from weft.events.sinks.metrics import MetricsSink
from weft.files import write_whole
from weft.run.checkpoint import KEEP, newest_saved_step
from weft.run.checkpoint.tiers import Drain, create_memory_folder, remove_memory_folder
from weft.run.data import PreparedData
from weft.run.engine import HAND_OVER, TrainingResult
from weft.run.engine.proof import ProveMode
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer, HangLimits, run_function
from weft.run.supervise import PlanChange, Supervisor
from weft.run.supervise.replan import ReplanRequests
from weft.techniques.check import mesh_sizes


@dataclass(slots=True, kw_only=True)
class SupervisedTraining:
    """A training that has been prepared, and is to run on this host until it is done."""

    recipe: Recipe
    plan: Plan
    run: RunFolder
    lock: FolderLock
    """Makes this process the owner of the run's folder.  Every generation gets a token of its own."""
    prepared: PreparedData
    prove: ProveMode
    quiet: bool
    fork_server: ForkServer | None
    check: Callable[[Plan], Plan]
    """Returns a plan complete, or raises where this run cannot go on under it."""
    _asked: Plan | None = None
    """Plan under which the next generation shall go on."""
    _is_handing_over: bool = False
    """Whether the ranks that run have been asked to stop for others."""
    _before: Plan | None = None
    """Plan before the last change of it, until a step has been done under the new one."""

    def train(self, *, resumes: bool) -> TrainingResult:
        """Run generations of ranks until the training is done, was stopped, or failed for good.

        Raises:
            WeftError, RankError, KeyboardInterrupt: as from `weft.run.launch.launcher.launch_function`.
        """
        with LossBoard.temporary(self.recipe.run.steps) as losses, self._saves_in_memory() as memory:
            supervisor = Supervisor(
                self.recipe.run.on_failure,
                saved_step=lambda: self._saved_step(memory),
                samples_per_step=self.recipe.batch.global_batch_size,
                plan=lambda: self.plan,
                plan_change=self._plan_change,
                log=self._log,
                report=self._report,
            )
            requests = ReplanRequests(self.run, self.check)
            first = self._saved_step(None) if resumes else 0

            def start(number: int, resumes: bool) -> JobEnd:
                return self._generation(number, resumes, losses, memory, requests)

            with _signals_stop(supervisor.stop) as signals:
                end, reason = supervisor.run(start, resumes=resumes)
            signals.added_to(end).raise_cause(reason)
            outcome = typed(TrainingResult, end.values[0])
            stop_signal = end.signals[0] if end.signals else outcome.stop_signal
            return replace(outcome, losses=losses.of_steps(first, outcome.steps), stop_signal=stop_signal)

    @contextmanager
    def _saves_in_memory(self) -> Generator[Path | None]:
        """Keep saves in memory, which outlive the ranks, and copy to the disk what shall last; None on a host that has
        no such memory.  At the end the newest one lies on the disk, whatever ended the run."""
        memory = create_memory_folder()
        if memory is None:
            yield None
            return
        try:
            drain = Drain(memory, self.run.checkpoints, keep=KEEP, owned=self.lock)
            try:
                with drain:
                    yield memory
            finally:
                drain.flush()
        finally:
            remove_memory_folder(memory)

    def _generation(
        self, number: int, resumes: bool, losses: LossBoard, memory: Path | None, requests: ReplanRequests
    ) -> JobEnd:
        """Start the ranks of a generation, and return how they ended."""
        self._is_handing_over = False
        if number > 1:
            self.lock.renew()
        assert self.lock.token is not None
        arguments: dict[str, Any] = {
            "folder": str(self.run.path),
            "owner": self.lock.token.to_json(),
            "prepared": self.prepared.to_json(),
            "resume": "latest" if resumes else None,
            "prove": self.prove if number == 1 else "never",
            "quiet": self.quiet,
            "losses": str(losses.path),
            "peak_flops": losses.peak_flops,
            "memory": None if memory is None else str(memory),
        }
        compute = self.plan.compute
        hang_seconds = self.recipe.run.on_failure.hang_seconds
        return run_function(
            "weft.run.worker:run_rank",
            arguments,
            self.plan.mesh.world_size,
            threads_per_rank=compute.num_threads,
            # A fork server that was killed with its ranks is replaced: without one, the job starts its own.
            fork_server=self.fork_server if self.fork_server is not None and self.fork_server.is_alive else None,
            stopped_timeout_seconds=min(compute.timeout_seconds, hang_seconds or compute.timeout_seconds),
            hang_limits=HangLimits(hang_seconds, compute.timeout_seconds),
            memory=memory,
            signal_to_send=lambda: self._hand_over(requests),
        )

    def _hand_over(self, requests: ReplanRequests) -> signal.Signals | None:
        """Ask the ranks to stop for others where another plan has been asked for."""
        if self._asked is None:
            self._asked = requests.take()
        if self._asked is None or self._is_handing_over:
            return None
        self._is_handing_over = True
        return HAND_OVER

    def _plan_change(self, end: JobEnd) -> PlanChange | None:
        """Whether the next generation goes on under another plan: the one that was asked for, or the one before, where
        no step could be done under the new one."""
        failed = end.cause is not None
        if failed and self._before is not None and not any(place.has_begun for place in end.positions.values()):
            self._report(end)
            why = f"since no step could be done under {mesh_sizes(self.plan)}"
            asked, self._before = self._before, None
            return self._change_to(asked, why)
        self._before = None
        if failed or self._asked is None:
            return None
        result = typed(TrainingResult, end.values[0])
        if not result.stopped_early or result.stop_signal != HAND_OVER:
            return None
        self._before, asked, self._asked = self.plan, self._asked, None
        return self._change_to(asked, "as was asked for")

    def _change_to(self, plan: Plan, why: str) -> PlanChange:
        text = f"{mesh_sizes(self.plan)} → {mesh_sizes(plan)}, {why}"
        self.plan = plan
        write_whole(self.run.plan, dump_plan(plan), durable=True)
        return PlanChange(text=text)

    def _saved_step(self, memory: Path | None) -> int:
        """Finished steps of the newest save in either tier."""
        folders = [self.run.checkpoints, *([memory] if memory is not None else [])]
        return max(newest_saved_step(folder) for folder in folders)

    def _report(self, end: JobEnd) -> None:
        if not self.quiet:
            print(end.report(), file=sys.stderr, flush=True)

    def _log(self, event: Event) -> None:
        """Say what happened between two generations, when no rank writes in the folder of the run."""
        with Run(None, [LogSink(self.run.launcher_log), MetricsSink(self.run.metrics)]) as log:
            log.emit(event)
        if not self.quiet and (words := text_of(event)) is not None:
            print(words, flush=True)


class _Signals:
    """Signals that come between two generations, while no launcher passes them on."""

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._number: signal.Signals | None = None

    def handle(self, number: int, _frame: object) -> None:
        self._number = self._number or signal.Signals(number)
        self._stop()

    def added_to(self, end: JobEnd) -> JobEnd:
        """The end of the last generation; one that a signal kept from starting again was stopped by it."""
        if self._number is None or end.signals:
            return end
        return replace(end, signals=(self._number,))


@contextmanager
def _signals_stop(stop: Callable[[], None]) -> Generator[_Signals]:
    """Let SIGINT and SIGTERM that come between two generations end the run; outside the main thread Python allows no
    handlers."""
    signals = _Signals(stop)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    before = {number: signal.signal(number, signals.handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

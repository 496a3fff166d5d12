"""A training whose ranks start again when one fails: `weft.train` outside of other launchers."""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

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
from weft.run.supervise import PlanChange, Supervisor, made_steps
from weft.run.supervise.replan import ReplanRequests
from weft.techniques.check import mesh_sizes

logger = logging.getLogger(__name__)


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
    check: Callable[[Plan], tuple[Plan, PreparedData]]
    """Returns a plan complete and the data as it is read under that, or raises where this run cannot go on so."""
    _asked: tuple[Plan, PreparedData] | None = None
    """Plan under which the next generation shall go on."""
    _before: tuple[Plan, PreparedData] | None = None
    """Plan before the last change of it, until a step has been done under the new one."""
    _is_handing_over: bool = False
    """Whether the ranks that run have been asked to stop."""

    def train(self, *, resumes: bool) -> TrainingResult:
        """Run generations of ranks until the training is done, was stopped, or failed for good.

        Raises:
            WeftError, RankError, KeyboardInterrupt: as from `weft.run.launch.launcher.launch_function`.
        """
        started = time.perf_counter()
        with (
            _Signals() as signals,
            LossBoard.temporary(self.recipe.run.steps) as losses,
            self._saves_in_memory() as memory,
        ):
            supervisor = Supervisor(
                self.recipe.run.on_failure,
                saved_step=lambda: self._saved_step(memory),
                samples_per_step=self.recipe.batch.global_batch_size,
                plan=lambda: self.plan,
                plan_change=self._plan_change,
                log=self._log,
                report=self._report,
                stopping=signals.stopping,
            )
            requests = ReplanRequests(self.run, self._check)
            first = self._saved_step(None) if resumes else 0
            world_size = self.plan.mesh.world_size

            def next_signal() -> signal.Signals | None:
                supervisor.sample()
                return self._hand_over(requests, signals.number)

            def start(number: int, resumes: bool) -> JobEnd:
                same = self.plan.mesh.world_size == world_size
                peak_flops = losses.peak_flops if same else None
                return self._generation(number, resumes, str(losses.path), peak_flops, memory, next_signal)

            end, reason = supervisor.run(start, resumes=resumes)
            signals.added_to(end).raise_cause(reason)
            return self._result(signals.added_to(end), losses, first, time.perf_counter() - started)

    def _result(self, end: JobEnd, losses: LossBoard, first: int, seconds: float) -> TrainingResult:
        """The result of all generations together."""
        last = typed(TrainingResult, end.values[0])
        validation = last.validation_loss if last.validation_loss is not None else losses.validation_loss
        return replace(
            last,
            losses=losses.of_steps(first, last.steps),
            validation_loss=validation,
            seconds=seconds,
            stop_signal=end.signals[0] if end.signals else last.stop_signal,
        )

    @contextmanager
    def _saves_in_memory(self) -> Generator[Path | None]:
        """Keep saves in memory, which outlive the ranks, and copy to the disk what shall last; None on a host that has
        no such memory.  At the end the newest one lies on the disk, whatever ended the run."""
        memory = create_memory_folder()
        if memory is None:
            yield None
            return
        drain = Drain(memory, self.run.checkpoints, keep=KEEP, owned=self.lock)
        try:
            with drain:
                yield memory
        finally:
            if drain.flush():
                remove_memory_folder(memory)
            else:
                logger.warning("the newest save lies in %s alone. Make room, and copy it to %s.", memory, self.run.path)

    def _generation(
        self,
        number: int,
        resumes: bool,
        losses: str,
        peak_flops: float | None,
        memory: Path | None,
        next_signal: Callable[[], signal.Signals | None],
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
            "losses": losses,
            "peak_flops": peak_flops,
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
            signal_to_send=next_signal,
        )

    def _check(self, plan: Plan) -> Plan:
        """Check a plan that is asked for, and keep it with the data as it is read under that."""
        self._asked = self.check(plan)
        return self._asked[0]

    def _hand_over(self, requests: ReplanRequests, noted: signal.Signals | None) -> signal.Signals | None:
        """Return the signal that the ranks shall get: one that came while no launcher passed it on, or to stop for
        others, where another plan has been asked for."""
        if self._asked is None and noted is None:
            requests.take()
        if self._is_handing_over or (self._asked is None and noted is None):
            return None
        self._is_handing_over = True
        return noted or HAND_OVER

    def _plan_change(self, end: JobEnd) -> PlanChange | None:
        """Whether the next generation goes on under another plan: the one that was asked for, or the one before, where
        no step could be done under the new one."""
        failed = end.cause is not None
        if failed and self._before is not None and not made_steps(end):
            self._report(end)
            why = f"since no step could be done under {mesh_sizes(self.plan)}"
            before, self._before = self._before, None
            return self._change_to(before, why)
        self._before = None
        if failed or self._asked is None:
            return None
        result = typed(TrainingResult, end.values[0])
        if not result.stopped_early or result.stop_signal != HAND_OVER:
            return None
        self._before, asked, self._asked = (self.plan, self.prepared), self._asked, None
        return self._change_to(asked, "as was asked for")

    def _change_to(self, plan_and_data: tuple[Plan, PreparedData], why: str) -> PlanChange:
        plan, data = plan_and_data
        text = f"{mesh_sizes(self.plan)} → {mesh_sizes(plan)}, {why}"
        self.plan, self.prepared = plan, data
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
    """SIGINT and SIGTERM that come while no launcher passes them on: before the first generation, between two, and
    behind the last, while saves reach the disk.  Outside the main thread Python allows no handlers."""

    def __init__(self) -> None:
        self.stopping = threading.Event()
        self.number: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def added_to(self, end: JobEnd) -> JobEnd:
        """The end of the last generation; one that a signal kept from starting again was stopped by it."""
        if self.number is None or end.signals:
            return end
        return replace(end, signals=(self.number,))

    def _handle(self, number: int, _frame: object) -> None:
        if self.number is not None and number == signal.SIGINT:
            raise KeyboardInterrupt  # somebody at the terminal wants an end at once
        self.number = self.number or signal.Signals(number)
        self.stopping.set()

"""A training whose ranks start again when one fails: `weft.train` outside of other launchers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.api.training.replanning import PlannedData, Replanner
from weft.api.training.step_times import StepTimes
from weft.config.cluster import Cluster
from weft.config.document import typed
from weft.config.plan import Plan, axis_coordinates
from weft.config.recipe import Recipe
from weft.errors import PlanError
from weft.events import Event, Run, RunFolder, WarningEvent
from weft.events.folder_lock import FolderLock
from weft.events.loss_board import LossBoard
from weft.events.sinks.log import LogSink
from weft.events.sinks.warnings import WarningSink
from weft.formatting import format_percent
from weft.run.checkpoint import newest_saved_step
from weft.run.checkpoint.memory_saves import saves_in_memory
from weft.run.data import PreparedData
from weft.run.engine import TrainingResult
from weft.run.engine.proof import ProveMode
from weft.run.hosts.crew import HostCrew
from weft.run.launch import HAND_OVER
from weft.run.launch.job_end import JobEnd
from weft.run.launch.launcher import ForkServer, HangLimits, run_function
from weft.run.supervise import (
    FoundPlan,
    LossSpikeWatch,
    PlanChange,
    PlanChanges,
    Shrink,
    Supervisor,
    SupervisorSignals,
    log_between,
    report_end,
)
from weft.run.supervise.replan import PlanRequest
from weft.techniques.check import mesh_sizes
from weft.watch.collector import Collecting
from weft.watch.profile_run import OwnProfile

if TYPE_CHECKING:
    from weft.run.checkpoint.store_tier import StoreSaves


@dataclass(slots=True, kw_only=True)
class HostsOfTraining:
    """The hosts of a training that has several, as the one that leads uses them."""

    crew: HostCrew
    cluster: Callable[[], Cluster]
    """Describes those that take part now."""
    ranks_per_host: int
    wait_seconds: float
    """Time to wait for others, where too few are left."""
    signals: SupervisorSignals
    """Handlers of signals, which this host has set before it led."""

    @property
    def num_devices(self) -> int:
        """Ranks that the hosts have which take part now: as many of each as at the beginning."""
        return sum(min(self.ranks_per_host, facts.num_devices) for facts in self.crew.hosts.values())


@dataclass(slots=True, kw_only=True)
class SupervisedTraining:
    """A training that has been prepared, and is to run on this host until it is done, or on several."""

    recipe: Recipe
    plan: Plan
    run: RunFolder
    lock: FolderLock
    """Makes this process the owner of the run's folder.  Every generation gets a token of its own."""
    prepared: PreparedData
    prove: ProveMode
    quiet: bool
    fork_server: ForkServer | None
    replanner: Replanner
    is_chosen: bool
    """Whether a search has chosen the plan: then another number of devices may have a very different one."""
    hosts: HostsOfTraining | None = None
    faults: dict[str, Any] | None = None
    """Faults that `weft chaos` injects into the ranks, for `weft.run.worker.faults`."""
    _left_out: set[int] = field(default_factory=set[int])
    """Accelerators on which a rank failed again and again."""

    def train(self, *, resumes: bool) -> TrainingResult:
        """Run generations of ranks until the training is done, was stopped, or failed for good.

        Raises:
            WeftError, RankError, KeyboardInterrupt: as from `weft.run.launch.launcher.launch_function`.
        """
        started = time.perf_counter()
        steps = StepTimes(self.run.metrics)
        plans = PlanChanges(
            self.run,
            self.plan,
            PlannedData(self.prepared, self.is_chosen),
            check=self.replanner.checked,
            find=lambda request: self._find(plans, steps, request),
            report=self._report,
        )
        with (
            SupervisorSignals() if self.hosts is None else nullcontext(self.hosts.signals) as signals,
            self._saves() as (memory, store),
            LossBoard.temporary(self.recipe.run.steps, memory) as losses,
            self._collecting() as collecting,
        ):
            if store is not None:
                store.begin(resumes=resumes)
                if resumes:
                    store.bring_newest()
            supervisor = Supervisor(
                self.recipe.run.on_failure,
                saved_step=lambda: self._saved_step(memory),
                samples_per_step=self.recipe.batch.global_batch_size,
                plan=lambda: self.plan,
                plan_change=lambda end: self._plan_change(plans, end),
                log=self._log,
                report=self._report,
                stopping=signals.stopping,
                shrink=lambda shrink: self._shrink(plans, shrink),
            )
            world_size = self.plan.mesh.world_size
            spikes = LossSpikeWatch(self.recipe.batch.global_batch_size, self._warn)

            def next_signal() -> signal.Signals | None:
                supervisor.sample()
                self._look_for_spike(spikes, losses)
                has_grown = self.hosts is not None and self.hosts.crew.has_grown()
                return plans.signal_to_send(signals.number, others_are_wanted=has_grown)

            def start(number: int, resumes: bool) -> JobEnd:
                peak_flops = losses.peak_flops if self.plan.mesh.world_size == world_size else None
                plans.begin()
                failure_seconds = supervisor.failure_rate.mean_seconds
                steps.begin(self.plan)
                if store is not None and number > 1 and resumes:
                    store.bring_newest()
                rings = collecting.begin(number) if self.recipe.run.telemetry else None
                if self.hosts is not None:
                    self.hosts.crew.collector = collecting.address_of(number)
                return self._generation(
                    number, resumes, str(losses.path), peak_flops, memory, next_signal, failure_seconds, rings
                )

            end, reason = supervisor.run(start, resumes=resumes)
            self._look_for_spike(spikes, losses)
            signals.added_to(end).raise_cause(reason)
            result = self._result(signals.added_to(end), losses, time.perf_counter() - started)
        self._learn(result)
        return result

    def _learn(self, result: TrainingResult) -> None:
        """Let a run that ended well correct later predictions; its telemetry is complete now."""
        if result.stopped_early or self.hosts is not None or not self.recipe.run.telemetry:
            return
        line = self.replanner.learn(self.run.path)
        if line and not self.quiet:
            print(line, flush=True)

    def _collecting(self) -> Collecting:
        profiler = OwnProfile(self.run, self.recipe.run.profile)
        return Collecting(lambda: self.run.path, self.replanner.predicted, listen=self._listen, judged=profiler)

    @property
    def _listen(self) -> tuple[str, bytes] | None:
        """Where the collector listens to other hosts; None: there are none, or nothing is recorded."""
        return self.hosts.crew.listen if self.hosts is not None and self.recipe.run.telemetry else None

    @contextmanager
    def _saves(self) -> Generator[tuple[Path | None, StoreSaves | None]]:
        """Keep saves in memory, and give their folder there, with the store that they last in where there is one.
        Ranks of several hosts save in the run's folder, which outlives each of them."""
        if self.hosts is not None:
            yield None, None
            return
        if self.recipe.run.checkpoints is None:
            with saves_in_memory(self.run.checkpoints, self.lock) as memory:
                yield memory, None
            return
        from weft.run.checkpoint.store_tier import saves_in_store  # what it stands on need not be installed

        url = self.run.store_url(self.recipe.run.checkpoints)
        with saves_in_store(url, self.run.checkpoints, self.lock) as store:
            yield store.memory, store

    def _plan_change(self, plans: PlanChanges[PlannedData], end: JobEnd) -> PlanChange | None:
        """Whether the next generation goes on under another plan, which is this training's then."""
        result = typed(TrainingResult, end.values[0]) if end.cause is None else None
        handed_over = result is not None and result.stopped_early and result.stop_signal == HAND_OVER
        # Who is there comes first: the plan that was asked for, or that before, may not fit those that are left.
        change = self._hosts_change(plans, end) if result is None or result.stopped_early else None
        change = change or plans.change_after(end, handed_over=handed_over)
        if change is None and handed_over and self.hosts is not None:
            change = plans.change_to((self.plan, plans.data), "since the host that had come is gone again")
        self.plan, self.prepared = plans.plan, plans.data.prepared
        return change

    def _hosts_change(self, plans: PlanChanges[PlannedData], end: JobEnd) -> PlanChange | None:
        """Whether the next generation has other hosts, and with them a plan for their devices.

        Raises:
            PlanError: no plan fits what is left.
            LaunchError: too few hosts are left.
        """
        if self.hosts is None or not (why := self.hosts.crew.change_after(end, self.hosts.wait_seconds)):
            return None
        self.replanner = replace(self.replanner, cluster=self.hosts.cluster())
        run, is_chosen = self.recipe.run, plans.data.is_chosen
        number = min(self.hosts.num_devices, run.max_devices or self.hosts.num_devices)
        try:
            after = self.replanner.for_devices(self.plan, number, is_chosen=is_chosen, fewest=run.min_devices)
        except PlanError:
            if number < self.plan.mesh.world_size:
                raise
            after = self.plan, plans.data  # nothing better for more devices: the ranks are shared out over them
        return plans.change_to(after, why)

    def _find(self, plans: PlanChanges[PlannedData], steps: StepTimes, request: PlanRequest) -> FoundPlan[PlannedData]:
        """Find a plan for a request that names none.

        Raises:
            PlanError: there is none, or none that is better.
        """
        most = len(self._devices()) or None
        if request.num_devices is None:
            better, plan, data = self.replanner.better(steps, most=most)
            why = f"{'measured' if better.is_measured else 'predicted'} {format_percent(100 * better.gain)} faster"
            return FoundPlan(plan, data, "\n".join(better.lines()), why)
        before, number = self.plan, request.num_devices
        if number == before.mesh.world_size:
            raise PlanError(f"the run has {number} device{'s' if number > 1 else ''} already.")
        if self._left_out and most is not None and number > most:
            raise PlanError(f"ranks failed on {len(self._left_out)} of this host's devices. Use at most {most}.")
        plan, data = self.replanner.for_devices(before, number, is_chosen=plans.data.is_chosen)
        return FoundPlan(plan, data, f"plan      {mesh_sizes(before)} → {mesh_sizes(plan)}", "as was asked for")

    def _shrink(self, plans: PlanChanges[PlannedData], shrink: Shrink) -> PlanChange:
        """Let the next generation go on without a rank's device.

        Raises:
            PlanError: no plan fits what is left.
        """
        devices, num_devices, without = self._devices(), self.plan.mesh.world_size - 1, ""
        if num_devices < len(devices):  # every rank has an accelerator of its own
            left_out = devices[shrink.without_rank]
            num_devices, without = min(num_devices + 1, len(devices) - 1), f" without device {left_out}"
            self._left_out.add(left_out)
        fewest = self.recipe.run.min_devices
        after = self.replanner.for_devices(self.plan, num_devices, is_chosen=plans.data.is_chosen, fewest=fewest)
        change = plans.change_to(after, f"{shrink.reason}{without}")
        self.plan, self.prepared = plans.plan, plans.data.prepared
        return change

    def _devices(self) -> list[int]:
        """The accelerators of this host that ranks may have."""
        count = self.replanner.cluster.num_accelerators if self.plan.compute.device != "cpu" else None
        return [device for device in range(count or 0) if device not in self._left_out]

    def _result(self, end: JobEnd, losses: LossBoard, seconds: float) -> TrainingResult:
        """The result of all generations together."""
        last = typed(TrainingResult, end.values[0])
        validation = last.validation_loss if last.validation_loss is not None else losses.validation_loss
        return replace(
            last,
            losses=losses.losses(last.steps),
            validation_loss=validation,
            seconds=seconds,
            stop_signal=end.signals[0] if end.signals else last.stop_signal,
        )

    def _generation(
        self,
        number: int,
        resumes: bool,
        losses: str,
        peak_flops: float | None,
        memory: Path | None,
        next_signal: Callable[[], signal.Signals | None],
        failure_seconds: float,
        rings: Path | None,
    ) -> JobEnd:
        """Start the ranks of a generation, and return how they ended."""
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
            "failure_seconds": failure_seconds,
            "memory": None if memory is None else str(memory),
            "devices": self._devices() if self._left_out else None,
        }
        if self.faults is not None:
            arguments["faults"] = self.faults
        compute = self.plan.compute
        hang_seconds = self.recipe.run.on_failure.hang_seconds
        run_ranks = run_function if self.hosts is None else self.hosts.crew.run
        return run_ranks(
            "weft.run.worker:run_rank",
            arguments,
            self.plan.mesh.world_size,
            threads_per_rank=compute.num_threads,
            # A fork server that was killed with its ranks is replaced: without one, the job starts its own.
            fork_server=self.fork_server if self.fork_server is not None and self.fork_server.is_alive else None,
            stopped_timeout_seconds=min(compute.timeout_seconds, hang_seconds or compute.timeout_seconds),
            hang_limits=HangLimits(hang_seconds, compute.timeout_seconds, self._peers()),
            memory=memory,
            signal_to_send=next_signal,
            rings=rings,
        )

    def _look_for_spike(self, spikes: LossSpikeWatch, losses: LossBoard) -> None:
        if self.recipe.run.on_failure.loss_spike == "warn":
            spikes.step = spikes.step or max(0, losses.first_step - 1)
            spikes.look(losses.after(spikes.step))

    def _peers(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that have equally much to do: of one stage, with as many microbatches."""
        if self.recipe.run.on_failure.straggler == "ignore":
            return ()
        mesh, groups = self.plan.mesh, dict[tuple[int, int], list[int]]()
        shares = self.plan.microbatch.shares(mesh.data)
        for rank in range(mesh.world_size):
            at = axis_coordinates(mesh, rank)
            share = shares[at["replicate"] * mesh.shard + at["shard"]]
            groups.setdefault((at["pipeline"], share), []).append(rank)
        return tuple(map(tuple, groups.values()))

    def _saved_step(self, memory: Path | None) -> int:
        """Finished steps of the newest save in either tier."""
        folders = [self.run.checkpoints, *([memory] if memory is not None else [])]
        return max(newest_saved_step(folder) for folder in folders)

    def _report(self, end: JobEnd) -> None:
        if not self.quiet:
            report_end(end)

    def _warn(self, text: str) -> None:
        """Say something while ranks run, whose metrics have no second writer."""
        sinks = [LogSink(self.run.launcher_log), *([] if self.quiet else [WarningSink()])]
        with Run(None, sinks) as log:
            log.emit(WarningEvent(text=text, source="weft.run.supervise"))

    def _log(self, event: Event) -> None:
        log_between(self.run, event, quiet=self.quiet)
